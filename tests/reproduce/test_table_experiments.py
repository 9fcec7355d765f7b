"""Tests of the paper's numbers, and of the runs of all table experiments at every scale."""

import dataclasses
import functools
import re
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.commanding import printed

from bertjax.cli.main import build_parser
from bertjax.config.load import load_config
from bertjax.data.corpus.store import MANIFEST
from bertjax.errors import UsageError
from bertjax.metrics.entities import entity_scores
from bertjax.metrics.squad import score_v1, score_v2
from bertjax.presets import load_settings
from bertjax.reproduce import scales
from bertjax.reproduce.formatting import as_markdown, format_table
from bertjax.reproduce.results import load_results
from bertjax.reproduce.runner import load_table
from bertjax.reproduce.table import PAPER_TABLES, missing_data
from bertjax.tasks.glue import SPECS
from bertjax.training.checkpoint import KeepBestAndPeriodic
from bertjax.training.checkpoint_config import experiment_config

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "experiments/tables"
NAMES = sorted(file.stem for file in TABLES.glob("*.py"))
SMALL_RESULTS = TABLES / "small.json"
DATA = {name: f"/data/{name}" for name in ("corpus", "glue", "squad", "squad2", "swag", "ner", "triviaqa")}
# Metrics of each task.
METRICS = {
    "squad": score_v1({}, {}),
    "squad2": score_v2({"question": []}, {"question": ""}),
    "swag": {"accuracy"},
    "ner": entity_scores([["O"]], [["O"]]),
    "pretrain": {"perplexity", "flops", "seconds"},
    **dict.fromkeys(("evaluate128", "evaluate512"), {"perplexity", "bits_per_byte"}),
    **{
        name: [f"{metric}{suffix}" for metric in spec.metrics for suffix in spec.eval_sets]
        for name, spec in SPECS.items()
    },
}
every_scale = pytest.mark.parametrize("scale", [scales.PAPER, scales.SMALL, scales.MEDIUM])


@functools.cache
def load(name: str, scale: str):
    file = TABLES / f"{name}.py"
    text = file.read_text()
    arguments = ",".join(f"{name}={path}" for name, path in DATA.items() if f"{name}=" in text)
    return load_table(f"{file}:scale={scale},{arguments}")


def test_experiments_cover_all_tables_of_the_paper():
    assert {name.removeprefix("table") for name in NAMES} == {*PAPER_TABLES, "figure3", "modern"}


@pytest.mark.parametrize("table", PAPER_TABLES.values(), ids=PAPER_TABLES)
def test_rows_of_the_paper_have_one_number_per_column(table):
    assert table.title and re.fullmatch(r"[45]\.\d|C\.\d", table.section)
    for row, values in table.rows.items():
        assert len(values) == len(table.columns), row
        assert any(value is not None for value in values), row
        assert all(value is None or 0 < value < 100 for value in values), row


def test_glue_average_is_the_mean_of_nine_columns():
    table = PAPER_TABLES["1"]
    assert table.columns[-1] == "Average" and len(table.columns) == 10
    for row, (*values, average) in table.rows.items():
        # In the ELMo row, the paper's average differs by 0.06 from the mean of the columns.
        assert statistics.mean(values) == pytest.approx(average, abs=0.07 if "ELMo" in row else 0.051), row


def test_figure_5_is_drawn(tmp_path, capfd):
    plot = tmp_path / "figure5.png"
    printed(capfd, "table", "figure5", f"--results={SMALL_RESULTS}", f"--plot={plot}")
    assert plot.read_bytes().startswith(b"\x89PNG")


def our_columns(table):
    return [texts for (_, source), texts in table.columns.items() if source == "ours"]


def test_documented_scores_of_the_medium_scale_match_the_results_file():
    results = load_results([str(TABLES / "medium.json")])
    written = (ROOT / "docs/results/tables.md").read_text().partition("## At the medium scale")[2]
    tables = {name: format_table(load_table(config), results) for name, config in results.tables.items()}
    for table in tables.values():
        texts = [text for texts in our_columns(table) for text in texts if "±" in text]
        scores = [re.sub(r" ?±(\S+).*", r" ± \1", text) for text in texts]
        assert len(scores) > 5 and [score for score in scores if f"| {score} |" not in written] == []
    figure5 = tables["figure5"]
    for row in zip(figure5.rows, *our_columns(figure5), strict=True):
        line = f"| {' | '.join(row)} |".replace("±", "± ")
        assert "±" not in line or line in written


@pytest.mark.parametrize("file", ["modern.json", "modern_medium.json"])
def test_documented_rows_of_the_modern_table_match_the_results_file(file):
    results, written = load_results([str(TABLES / file)]), (ROOT / "docs/results/modern.md").read_text().splitlines()
    table = format_table(load_table(results.tables["modern"]), results)
    rows = [f"| {' | '.join(row)} |" for row in zip(table.rows, *our_columns(table)[:6], strict=True)]
    assert len(rows) > 1 and [row for row in rows if re.sub(r" \(\d of \d\)", "", row) not in written] == []


def test_documented_tables_match_the_results_file():
    results, written = load_results([str(SMALL_RESULTS)]), (ROOT / "docs/results/tables.md").read_text().splitlines()
    lines = [
        line
        for config in results.tables.values()
        for line in as_markdown(format_table(load_table(config), results)).splitlines()
    ]
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 20
    assert [line for line in tables if line not in written] == []
    rows = format_table(load_table(results.tables["figure5"]), results).rows
    steps = [int(row.replace(",", "")) for row in rows]
    assert steps == sorted(steps) and steps[0] < 30_000 < steps[-1]


@every_scale
def test_runs_of_the_same_name_are_equal_in_all_tables(scale):
    by_name = {}
    for name in NAMES:
        for run in load(name, scale).runs():
            assert by_name.setdefault(run.name, run) == run, f"{run.name} of {name} differs between tables"
    assert len(by_name) > 90


@every_scale
@pytest.mark.parametrize("name", NAMES)
def test_runs_have_valid_commands_and_cells_have_the_paper_s_labels_and_metrics_of_their_task(name, scale):
    table, previous, parser = load(name, scale), set(), build_parser()
    for run in table.runs():
        assert {each.name for each in run.dependencies} <= previous
        previous.add(run.name)
        args, overrides = parser.parse_known_args(shlex.split(run.command("/results"))[1:])
        if run.members:
            assert args.command == "ensemble" and len(args.checkpoint) == scales.get_scale(scale).ensemble_size
            continue
        experiment_config(args.config, overrides)
        assert len({item.partition("=")[0] for item in overrides}) == len(overrides), "duplicate override"
        assert run.flops > 0
        if args.command == "sweep":
            assert load_settings(args.config) and args.seeds == scales.get_scale(scale).finetuning_seeds

    cells = [cell for cell in table.cells if cell.runs]
    assert cells and [cell for cell in cells if cell.metric not in METRICS[cell.runs[0].name.partition("/")[0]]] == []
    assert table.name == name.removeprefix("table")
    assert len({(cell.row, cell.column) for cell in table.cells}) == len(table.cells)
    if table.name in PAPER_TABLES and table.name != "figure5":
        paper = PAPER_TABLES[table.name]
        assert {cell.row for cell in table.cells} <= paper.rows.keys()
        # Labels of test sets are not public.
        assert {cell.column for cell in table.cells} >= {column for column in paper.columns if "Test" not in column}


def test_configs_of_tables_5_6_and_8_match_the_row_names():
    eight = {cell.row: cell.runs[0].init_from for cell in load("table8", scales.PAPER).cells if cell.runs[0].init_from}
    for row, start in eight.items():
        masking = experiment_config(start.config, start.overrides).data.masking
        shares = (masking.mask_prob, masking.keep_prob, masking.random_prob)
        assert "/".join(str(round(100 * share)) for share in shares) == row
    six = {cell.row: cell.runs[0] for cell in load("table6", scales.PAPER).cells if not cell.runs[0].init_from}
    for row, run in six.items():
        model = load_config(run.config, run.overrides).model
        assert f"{model.num_hidden_layers}/{model.hidden_size}/{model.num_attention_heads}" == row
    five = {cell.row: cell.runs[0] for cell in load("table5", scales.SMALL).cells if cell.column == "SST-2"}
    objectives = {
        row: (config.data.objective, config.model.attention_direction)
        for row, run in five.items()
        for config in [experiment_config(run.init_from.config, run.init_from.overrides)]
    }
    left = ("lm", "left")
    assert objectives == {
        "BERT BASE": ("nsp", "both"), "No NSP": ("pairs", "both"), "LTR & No NSP": left, "+ BiLSTM": left
    }  # fmt: skip
    bilstm = load_config(five["+ BiLSTM"].config, five["+ BiLSTM"].overrides)
    assert bilstm.feature_head.lstm_layers == 1 and not bilstm.feature_head.features


@every_scale
def test_equal_flops_rows_are_within_five_percent_of_bert(scale):
    three = {cell.row: cell.runs[0] for cell in load("figure3", scale).cells if not cell.runs[0].init_from}
    bert = three.pop("BERT").flops
    equal = [run.flops / bert for row, run in three.items() if "equal FLOPs" in row]
    assert len(equal) == 2 and all(abs(share - 1) < 0.05 for share in equal)
    assert three["Left-to-right, as wide"].flops > 1.2 * bert


def changed_fields(run, other) -> set[str]:
    pair = [
        flatten_dict(dataclasses.asdict(experiment_config(each.config, each.overrides)), sep=".")
        for each in (run, other)
    ]
    return {name for name, value in pair[0].items() if value != pair[1][name]}


def modern_table(arguments: str = ""):
    """Returns the table `modern`, and the pre-training run of each row with each seed, in order of the runs."""
    table = load_table(f"{TABLES}/modern.py:corpus=c,glue=g,ner=n{arguments}")
    starts = {}
    for run in table.runs():
        if run.name.startswith("pretrain/"):
            starts[re.fullmatch(r"pretrain/modern_(\w+)-(\d)", run.name).groups()] = run
    return table, starts


@every_scale
def test_rows_of_the_modern_table_change_only_the_settings_that_they_name_at_equal_flops(scale):
    table, starts = modern_table(f",scale={scale},helped=rotary+geglu")
    names = {name for name, _ in starts}
    bert, best = starts["bert", "1"], starts["best_rotary_geglu", "1"]
    if scale == scales.MEDIUM:
        assert names == {"bert", "best_rotary_geglu"}
        return
    assert len(names) == 18
    assert all(abs(run.flops / bert.flops - 1) < 1e-3 for run in starts.values())
    schedule = {"steps", "optimizer.warmup_steps"}
    changes = {name: changed_fields(starts[name, "1"], bert) for name in names}
    width = "model.intermediate_size"
    assert changes["rotary"] - schedule == {"model.position_embedding_type", "model.global_rope_theta"}
    assert changes["geglu"] - schedule == {"model.gated_mlp", width}
    assert changes["best_rotary_geglu"] == changes["rotary"] | changes["geglu"]
    assert changes["masks_30"] == {"data.masking.rate", *schedule} and changes["no_nsp"] == {"data.objective"}
    for local, full in (("local_512", "bert_512"), ("rotary_local_512", "rotary_512")):
        assert changed_fields(starts[local, "1"], starts[full, "1"]) - schedule == {"model.local_attention"}
    sizes = [run.model.intermediate_size for run in (bert, best)]
    assert abs(1.5 * sizes[1] / sizes[0] - 1) < 0.01 and sizes[1] % 8 == 0


def test_rows_of_the_modern_table_share_evaluation_settings_and_run_seed_by_seed():
    table, starts = modern_table()
    assert [seed for _, seed in starts] == [seed for seed in "123" for _ in range(17)]
    runs_of = {cell.row: cell.runs for cell in table.cells if cell.column == "perplexity"}
    assert {run.config for row in runs_of.values() for run in row} == {runs_of["BERT"][0].config}
    settings = {
        row: {tuple(flag for flag in run.overrides if "config.model" not in flag) for run in runs}
        for row, runs in runs_of.items()
    }
    (pairs,) = set.union(*(values for row, values in settings.items() if "running text" not in row))
    (text,) = settings["running text"] | settings["rotary, running text"]
    assert pairs[0] == "--config.data.objective=pairs" and pairs[1:] == text[2:]
    assert text[:2] == ("--config.data.objective=none", "--config.data.packing=False")
    for run in (run for row in runs_of.values() for run in row):
        changed = changed_fields(run, run.init_from)
        assert {name for name in changed if name.startswith("model.")} == {"model.dtype"}
    config = experiment_config(runs_of["BERT"][0].config, runs_of["BERT"][0].overrides)
    assert (config.steps, config.optimizer.learning_rate, config.data.masking.rate) == (1, 0, 0.15)
    assert [cell.row for cell in table.cells if cell.column == "perplexity at 512"] == [
        "BERT at 512", "local/global at 512", "rotary at 512", "rotary, local/global at 512"
    ]  # fmt: skip
    # The runs that start from a pre-training run follow it.
    order = [run.name.partition("/")[0] for run in table.runs()][:6]
    assert order == ["pretrain", "evaluate128", "sst2", "mrpc", "qnli", "ner"]
    for run in table.runs():
        if run.init_from:
            pretrained, seed = run.init_from.name.rpartition("-")[::2]
            assert f"seed={seed}" in run.init_from.overrides[0] and run.name.endswith((f"-{seed}", f"-seed{seed}"))
    with pytest.raises(UsageError, match="unknown change helped=rope; use some of bert, no_nsp"):
        modern_table(",helped=rope")


def test_description_of_missing_data_names_the_file_or_the_argument_to_set(tmp_path, monkeypatch):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/train.tsv").write_text("")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / MANIFEST).write_text("")
    loaded = load_table(f"tables/table5:corpus={tmp_path}/corpus,glue={tmp_path}")
    missing = {run.name: missing_data([run]) for run in loaded.runs()}
    assert not missing["pretrain/bert-1"] and not missing["sst2/bert-1"]
    assert missing["mrpc/bert-1"] == f"{tmp_path}/MRPC/train.tsv, which does not exist"
    assert missing["squad/bert-1"] == "squad:version=1.1, in a folder set with squad="
    monkeypatch.setenv("HOME", str(tmp_path))
    home = {run.name: run for run in load_table("tables/table5:corpus=~/corpus,glue=~").runs()}
    assert not missing_data([home["sst2/bert-1"]])
    (run, *_) = load_table(f"tables/table5:corpus={tmp_path}/none,glue={tmp_path}").runs()
    assert missing_data([run]) == f"{tmp_path}/none/manifest.json, which does not exist"
    (squad,) = {missing_data([run]) for run in load_table("tables/table3").runs() if run.name.startswith("squad2/")}
    assert "or a checkpoint, set with large=; squad:version=2.0, in a folder set with squad2=" in squad
    without = load_table(f"tables/table5:glue={tmp_path}").runs()
    assert all("set with corpus=" in missing_data([run]) for run in without if "sst2" in run.name)


@every_scale
def test_interrupted_pretraining_keeps_the_checkpoints_of_figure_5(scale):
    scale = scales.get_scale(scale)
    every, keep = (int(override.partition("=")[2]) for override in scale.figure5_overrides)
    rng = np.random.default_rng(0)
    stops = {int(step) for step in rng.integers(1, scale.figure5_steps[-1], 40)}
    saved: list[int] = []
    for step in sorted({*range(every, scale.figure5_steps[-1] + 1, every), *stops}):
        saved.append(step)
        preserved = KeepBestAndPeriodic(keep, every, {}).should_preserve(
            [SimpleNamespace(step=step) for step in saved], context=None
        )
        saved = [step for step, is_preserved in zip(saved, preserved, strict=True) if is_preserved]
    assert {*scale.figure5_steps} <= {*saved} and len(saved) <= keep


@pytest.mark.parametrize(("arguments", "task"), [("", "sst2"), (":task=mnli", ""), (":scale=paper", "")])
def test_figure_5_states_if_its_task_differs_from_the_paper(arguments, task, tmp_path):
    text = as_markdown(format_table(load_table(f"tables/figure5{arguments}"), load_results([str(tmp_path)])))
    assert text.startswith("**Figure 5: Pre-training steps")
    assert (f"the paper fine-tunes on mnli; these runs fine-tune on {task}" in text) == bool(task)
