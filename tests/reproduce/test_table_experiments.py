"""The tables' own experiments: at every scale their commands can be run, in the order in which they are given."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.cli.main import build_parser
from bertjax.config.load import load_config
from bertjax.config.trials import load_trials
from bertjax.data.corpus.store import MANIFEST
from bertjax.metrics.entities import entity_scores
from bertjax.metrics.squad import score_v1, score_v2
from bertjax.model.feature_head import LAST, FeatureHead
from bertjax.presets import trials_of
from bertjax.reproduce import results as outcomes
from bertjax.reproduce import runs, scales
from bertjax.reproduce.formatting import as_markdown, shown
from bertjax.reproduce.paper import paper_table, table_names
from bertjax.reproduce.runner import load_table
from bertjax.tasks.build import parse_config
from bertjax.tasks.finetuning.glue_data import SPECS
from bertjax.training.checkpoint import KeepPeriodic

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments/tables").glob("*.py"))
KEPT = ROOT / "experiments/tables/small.json"
GIVEN = {name: f"/data/{name}" for name in ("corpus", "glue", "squad", "squad2", "swag", "ner", "triviaqa")}
every_table = pytest.mark.parametrize("scale", [scales.PAPER, scales.SMALL])


def table(file: Path, scale: str):
    text = file.read_text()
    given = ",".join(f"{name}={path}" for name, path in GIVEN.items() if f"{name}=" in text)
    return load_table(f"{file}:scale={scale},{given}")


def test_every_table_of_the_paper_has_an_experiment_and_there_is_one_of_our_own():
    names = {file.stem.removeprefix("table") for file in FILES}
    assert names == {*table_names(), "figure3"}


def test_tables_in_the_documents_are_those_of_the_kept_file():
    kept, written = outcomes.read(str(KEPT)), (ROOT / "docs/results/tables.md").read_text().splitlines()
    lines = [
        line for config in kept.tables.values() for line in as_markdown(shown(load_table(config), kept)).splitlines()
    ]
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 20
    assert [line for line in tables if line not in written] == []


@every_table
def test_one_name_is_one_run_in_all_tables(scale):
    by_name = {}
    for file in FILES:
        for run in table(file, scale).runs():
            assert by_name.setdefault(run.name, run) == run, f"{run.name} of {file.name} is another one elsewhere"
    assert len(by_name) > 90


@every_table
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_commands_are_valid_and_each_comes_after_what_it_needs(file, scale):
    there = set()
    for run in table(file, scale).runs():
        assert {earlier.name for earlier in run.needs} <= there
        there.add(run.name)
        args, overrides = build_parser().parse_known_args(shlex.split(run.command("/results"))[1:])
        if run.members:
            assert args.command == "ensemble" and len(args.checkpoint) == scales.scale_of(scale).members
            continue
        parse_config(load_config(args.config, overrides))
        assert len({item.partition("=")[0] for item in overrides}) == len(overrides), "a field is given twice"
        assert run.flops > 0
        if args.command == "sweep":
            assert load_trials(args.config, trials_of) and args.seeds == scales.scale_of(scale).seeds


@every_table
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_cells_ask_for_metrics_that_their_task_gives(file, scale):
    given = {
        "squad": score_v1({}, {}),
        "squad2": score_v2({"question": []}, {"question": ""}),
        "swag": {"accuracy"},
        "ner": entity_scores([["O"]], [["O"]]),
        "pretrain": {"perplexity"},
        **{
            name: [f"{metric}{suffix}" for metric in task.metrics for suffix in task.eval_sets]
            for name, task in SPECS.items()
        },
    }
    cells = [cell for cell in table(file, scale).cells if cell.runs]
    assert cells and [cell for cell in cells if cell.metric not in given[cell.runs[0].name.partition("/")[0]]] == []


@every_table
@pytest.mark.parametrize("task", ["mnli", "qnli", "sst2", "stsb", "squad", "squad2", "triviaqa", "swag", "ner"])
@pytest.mark.parametrize("feature_head", [None, FeatureHead(LAST, 2, 128)], ids=["fine-tuned", "on features"])
def test_as_many_epochs_are_run_as_are_reckoned_with(task, feature_head, scale):
    found = scales.scale_of(scale)
    start = runs.bert(found, GIVEN)
    run = runs.fine_tuning(
        found, GIVEN, task, start, feature_head=feature_head, variant="" if feature_head is None else "features"
    )
    reckoned = found.tasks[task].epochs if feature_head is None else found.feature_epochs
    assert load_config(run.config, run.overrides).epochs == reckoned


@every_table
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_cells_are_those_of_the_paper_and_named_ones_of_our_own(file, scale):
    found = table(file, scale)
    assert found.number == file.stem.removeprefix("table")
    assert len({(cell.row, cell.column) for cell in found.cells}) == len(found.cells)
    if found.number not in table_names():
        return
    printed = paper_table(found.number)
    if found.number != "figure5":
        assert {cell.row for cell in found.cells} <= printed.rows.keys()
        # Of the paper's columns, only test sets are left out, whose labels nobody has.
        assert {cell.column for cell in found.cells} >= {name for name in printed.columns if "Test" not in name}


def test_masks_sizes_and_directions_are_what_the_rows_say():
    eight = {cell.row: cell.runs[0].start for cell in table(FILES[-1], scales.PAPER).cells if cell.runs[0].start}
    for row, start in eight.items():
        shares = parse_config(load_config(start.config, start.overrides)).data.masking
        assert [round(100 * share) for share in (shares.mask_prob, shares.keep_prob, shares.random_prob)] == [
            int(part) for part in row.split("/")
        ]
    six = {cell.row: cell.runs[0] for cell in table(FILES[-3], scales.PAPER).cells if not cell.runs[0].start}
    for row, run in six.items():
        model = load_config(run.config, run.overrides).model
        assert f"{model.num_hidden_layers}/{model.hidden_size}/{model.num_attention_heads}" == row
    five = {cell.row: cell.runs[0] for cell in table(FILES[-4], scales.SMALL).cells if cell.column == "SST-2"}
    told = {
        row: (config.data.objective, config.model.attention_direction)
        for row, run in five.items()
        for config in [load_config(run.start.config, run.start.overrides)]
    }
    left = ("lm", "left")
    assert told == {
        "BERT BASE": ("nsp", "both"), "No NSP": ("pairs", "both"), "LTR & No NSP": left, "+ BiLSTM": left
    }  # fmt: skip
    on_top = load_config(five["+ BiLSTM"].config, five["+ BiLSTM"].overrides)
    assert on_top.feature_head.lstm_layers == 1 and not on_top.feature_head.features


@every_table
def test_what_is_said_to_have_equal_flops_has(scale):
    three = {cell.row: cell.runs[0] for cell in table(FILES[0], scale).cells if not cell.runs[0].start}
    bert = three.pop("BERT").flops
    equal = [run.flops / bert for row, run in three.items() if "equal FLOPs" in row]
    assert len(equal) == 2 and all(abs(share - 1) < 0.05 for share in equal)
    assert three["Left-to-right, as wide"].flops > 1.2 * bert


def test_data_that_is_not_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/train.tsv").write_text("")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / MANIFEST).write_text("")
    found = load_table(f"tables/table5:corpus={tmp_path}/corpus,glue={tmp_path}")
    lacking = {run.name: run.lacking() for run in found.runs()}
    assert not lacking["pretrain/bert-1"] and not lacking["sst2/bert-1"]
    assert lacking["mrpc/bert-1"] == f"{tmp_path}/MRPC/train.tsv, which is not there"
    assert lacking["squad/bert-1"] == "squad:version=1.1, in a folder given with squad="
    monkeypatch.setenv("HOME", str(tmp_path))
    there = {run.name: run for run in load_table("tables/table5:corpus=~/corpus,glue=~").runs()}
    assert not there["sst2/bert-1"].lacking()
    (run, *_) = load_table(f"tables/table5:corpus={tmp_path}/none,glue={tmp_path}").runs()
    assert run.lacking() == f"{tmp_path}/none/manifest.json, which is not there"
    (lacking,) = {run.lacking() for run in load_table("tables/table3").runs() if run.name.startswith("squad2/")}
    assert "given with corpus=; squad:version=2.0, in a folder given with squad2=" in lacking
    without = load_table(f"tables/table5:glue={tmp_path}").runs()
    assert all("given with corpus=" in run.lacking() for run in without if "sst2" in run.name)


@pytest.mark.parametrize("name", [scales.PAPER, scales.SMALL])
def test_a_pre_training_that_is_stopped_anywhere_keeps_the_checkpoints_that_figure_5_takes(name):
    scale = scales.scale_of(name)
    every, keep = (int(override.partition("=")[2]) for override in scale.kept)
    rng = np.random.default_rng(0)
    stops = {int(step) for step in rng.integers(1, scale.steps_along[-1], 40)}
    there: list[int] = []
    for step in sorted({*range(every, scale.steps_along[-1] + 1, every), *stops}):
        there.append(step)
        kept = KeepPeriodic(keep, every).should_preserve([SimpleNamespace(step=step) for step in there], context=None)
        there = [step for step, is_kept in zip(there, kept, strict=True) if is_kept]
    assert {*scale.steps_along} <= {*there} and len(there) <= keep


@pytest.mark.parametrize(("arguments", "others"), [("", "sst2"), (":task=mnli", ""), (":scale=paper", "")])
def test_figure_5_says_where_its_task_is_not_the_paper_s(arguments, others, tmp_path):
    text = as_markdown(shown(load_table(f"tables/figure5{arguments}"), outcomes.read(str(tmp_path))))
    assert text.startswith("**Figure 5: Pre-training steps")
    assert (f"the paper fine-tunes on mnli, and these runs on {others}" in text) == bool(others)
