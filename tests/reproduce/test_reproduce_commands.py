"""`bertjax reproduce` and `bertjax table` on a table of tiny runs."""

import json
import shlex
import shutil
import statistics
from pathlib import Path

import pytest
from helpers.checkpoints import edit_json
from helpers.command_runs import EXPERIMENTS, refused
from helpers.commanding import printed
from helpers.processes import run_commands

from bertjax.cli import main as cli
from bertjax.reproduce import runner
from bertjax.reproduce.results import load_results


@pytest.fixture(scope="module")
def results(table, tmp_path_factory):
    """Returns the results folder of the finished table; tests must not change it."""
    folder = tmp_path_factory.mktemp("results")
    cli.main(["reproduce", f"--config={table}", f"--results={folder}"])
    return folder


@pytest.fixture(scope="module")
def all_results(table, tmp_path_factory):
    """Returns a results folder with an ensemble and fine-tuning from an intermediate checkpoint; read-only."""
    folder = tmp_path_factory.mktemp("all_results")
    cli.main(["reproduce", f"--config={table}:all", f"--results={folder}"])
    return folder


def test_plan_lists_runs_in_order_with_times_and_commands(table, tmp_path, capfd):
    out = printed(capfd, "reproduce", f"--config={table}:all", f"--results={tmp_path}/r", "--plan")
    assert not (tmp_path / "r").exists()
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:-1:2]] == [
        *("pretrain/first", "cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "cola/both")
    ]
    assert all("about 0:00:" in line for line in lines[:-1:2])
    assert all(line.startswith("      bertjax ") for line in lines[1:-1:2])
    assert lines[-1].startswith("6 of 6 runs to do, about 0:00:") and "35% of measured " in lines[-1]


def test_plan_skips_runs_without_data(table, tmp_path, capfd):
    out = printed(capfd, "reproduce", f"--config={table}:glue=,all", f"--results={tmp_path}", "--plan")
    assert "cola/both" in out and out.count("skipped: needs CoLA, in a folder given with glue=") == 5
    assert "1 of 6 runs to do" in out
    out = printed(capfd, "table", "5", f"--results={tmp_path}")
    # `reproduce --plan` does not record the file of the table, so `table 5` prints the packaged table instead.
    assert "experiments" not in out


def test_finished_runs_are_not_repeated(table, results, capfd):
    assert sorted(json.loads((results / "reproduce.json").read_text())["seconds"]) == ["cola/first", "pretrain/first"]
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.json") if path.name != "reproduce.json"}
    assert len(before) > 10
    out = printed(capfd, "reproduce", f"--config={table}", f"--results={results}")
    assert out.count(" done\n") == 2 and "0 of 2 runs to do" in out and "speed of 2 finished runs" in out
    assert json.loads(out.splitlines()[-1])["done"] == ["cola/first", "pretrain/first"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_table_shows_mean_and_standard_deviation_over_seeds(results, capfd):
    out = printed(capfd, "table", "5", f"--results={results}")
    seeds = [
        trial["metrics"]["accuracy"] for trial in json.loads((results / "cola/first/sweep.json").read_text())["trials"]
    ]
    perplexity = json.loads((results / "pretrain/first/results.json").read_text())["perplexity"]
    text = f"{100 * statistics.mean(seeds):.1f} ±{100 * statistics.stdev(seeds):.1f}"
    row = next(line for line in out.splitlines() if line.startswith("BERT BASE"))
    mean = statistics.mean([perplexity, 100 * statistics.mean(seeds)])
    assert f" 92.7  {text} " in row and row.split()[-2:] == [f"{perplexity:.1f}", f"{mean:.1f}"]
    assert "missing runs" not in out
    markdown = printed(capfd, "table", "5", f"--results={results}", "--markdown")
    assert f"| 92.7 | {text} |" in markdown and markdown.startswith("**Table 5: ")


def test_results_file_gives_the_same_table_as_the_results_folder(results, tmp_path, capfd):
    saved, text = tmp_path / "saved.json", tmp_path / "text.txt"
    from_folder = printed(capfd, "table", "5", f"--results={results}", f"--keep={saved}")
    from_file = printed(capfd, "table", "5", f"--results={saved}")
    assert from_folder.split() == [*from_file.split(), *f"wrote 2 runs to {saved}".split()]
    content = json.loads(saved.read_text())
    assert {name: len(run["metrics"]) for name, run in content["runs"].items()} == {
        "cola/first": 2, "pretrain/first": 1
    }  # fmt: skip
    text.write_text("mine")
    for keep, source, message in (
        (text, results, "is not a results file"),
        (saved, tmp_path / "none", "would remove 2 runs from this file, such as cola/first"),
    ):
        assert message in refused(capfd, "table", "5", f"--results={source}", f"--keep={keep}")
    assert text.read_text() == "mine" and json.loads(saved.read_text()) == content
    content["runs"]["pretrain/first"]["settings"][-1] += "0"
    for changed, message in (
        (content, "contains pretrain/first with settings that differ"),
        ({}, "not a results file"),
    ):
        saved.write_text(json.dumps(changed))
        assert message in refused(capfd, "table", "5", f"--results={saved}")


def test_results_of_several_sources_are_combined(results, tmp_path, capfd):
    alone = printed(capfd, "table", "5", f"--results={results}", f"--keep={tmp_path}/all.json")
    content = json.loads((tmp_path / "all.json").read_text())
    for name in content["runs"]:
        part = {**content, "runs": {name: content["runs"][name]}}
        (tmp_path / f"{Path(name).parts[0]}.json").write_text(json.dumps(part))
    pretrain, cola = f"--results={tmp_path}/pretrain.json", f"--results={tmp_path}/cola.json"
    for source in (pretrain, cola):
        half = printed(capfd, "table", "5", source)
        assert "missing runs" in half and "--workdir RESULTS/" in half and ".json/" not in half
        half = printed(capfd, "table", "5", source, f"--results={tmp_path}/folder")
        assert f"--workdir {tmp_path}/folder/" in half
    for sources in ((pretrain, cola), (cola, pretrain)):
        out = printed(capfd, "table", "5", *sources, f"--keep={tmp_path}/again.json")
        assert out.splitlines()[:-1] == alone.splitlines()[:-1]
        assert json.loads((tmp_path / "again.json").read_text()) == content
    # If several sources contain the same run, `table` uses the first source. It fails if fine-tuning started from a
    # different pre-training run.
    other = {**content, "runs": {"pretrain/first": {**content["runs"]["pretrain/first"], "fingerprint": "another"}}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    out = printed(capfd, "table", "5", pretrain, f"--results={tmp_path}/other.json", cola)
    assert out.splitlines() == alone.splitlines()[:-1]
    error = refused(capfd, "table", "5", f"--results={tmp_path}/other.json", pretrain, cola, code=1)
    assert f"{tmp_path}/cola.json/cola/first did not start from the parameters of pretrain/first" in error


@pytest.mark.slow
def test_printed_commands_fill_the_table(table, all_results, tmp_path, capfd):
    cli.main(["reproduce", f"--config={table}:glue=,all", f"--results={tmp_path}/new"])
    out = printed(capfd, "table", "5", f"--results={tmp_path}/new")
    assert "- no data for SST-2: needs CoLA" in out
    commands = [line for line in out.splitlines() if line.startswith("    bertjax ")]
    assert len(commands) == 5 and "path=GLUE" in commands[0]
    runs = runner.load_table(f"{table}:all").runs()
    for run in runs:
        if run.name != "pretrain/first":
            cli.main(shlex.split(run.command(f"{tmp_path}/new"))[1:])
    capfd.readouterr()
    old, new = load_results([str(all_results)]), load_results([f"{tmp_path}/new"])
    for run in runs:
        assert new.outcome(run).metrics == old.outcome(run).metrics, run.name
    ensemble = json.loads((all_results / "cola/both/results.json").read_text())
    out = printed(capfd, "table", "5", f"--results={all_results}")
    assert f"{100 * ensemble['accuracy']:.1f}" in next(line for line in out.splitlines() if line.startswith("ours"))
    assert "missing runs" not in out
    shutil.rmtree(tmp_path / "new/cola/both")
    cli.main([*shlex.split(runs[-1].command(f"{tmp_path}/new"))[1:], "--config.data.seq_len=8"])
    error = refused(capfd, "reproduce", f"--config={table}:all", f"--results={tmp_path}/new", "--plan")
    assert "cola/both differ from the table's: data.seq_len" in error


def test_results_that_do_not_match_the_table_are_rejected(table, results, tmp_path, capfd):
    command = ["table", "5", f"--results={tmp_path}/r"]
    # Pre-training is finished, and the data of fine-tuning are missing, so this command starts no run.
    shutil.copytree(results / "pretrain", tmp_path / "r/pretrain")
    cli.main(["reproduce", f"--config={table}:glue=", f"--results={tmp_path}/r"])
    shutil.copytree(results / "cola/first", tmp_path / "r/cola/first")
    trials = sorted((tmp_path / "r/cola/first/trials").iterdir())
    edit_json(trials[0] / "results.json", started_from="0" * 16)
    assert "cola/first has trials that started from different" in refused(capfd, *command, code=1)
    edit_json(trials[1] / "results.json", started_from="0" * 16)
    assert "cola/first did not start from the parameters of pretrain/first" in refused(capfd, *command, code=1)
    edit_json(tmp_path / "r/cola/first/sweep.json", left=1)
    assert "missing runs" in printed(capfd, *command)
    edit_json(tmp_path / "r/cola/first/sweep.json", left=0)
    shutil.rmtree(trials[0])
    assert "missing runs" in printed(capfd, *command)
    assert "kept.json is not a results file" in refused(capfd, "table", "5", f"--results={tmp_path}/r/kept.json")
    assert "--plot draws figure5, not 5" in refused(capfd, *command, "--plot=a.png")
    (tmp_path / "r/pretrain/first/results.json").write_text("{")
    assert f"cannot read {tmp_path}/r/pretrain/first/results.json" in refused(capfd, *command, code=1)
    error = refused(capfd, "reproduce", f"--config={table}:steps=3", f"--results={results}", "--plan")
    assert "differ from the table's: steps: 3 -> 2" in error


def test_recorded_table_config_does_not_depend_on_the_working_directory(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    assert runner._portable_config("table.py:steps=3") == f"{table}:steps=3"
    for packaged in ("tables/table5", f"{EXPERIMENTS}/tables/table5.py"):
        assert runner._portable_config(f"{packaged}:scale=small") == "tables/table5:scale=small"


@pytest.mark.parametrize("content", ["x = 1", "def get_table(text):\n    return 1"])
def test_invalid_table_files_and_arguments_are_rejected(content, tmp_path, capfd):
    (tmp_path / "table.py").write_text(content)
    results = f"--results={tmp_path}/r"
    command = ("reproduce", f"--config={tmp_path}/table.py", results)
    assert "table.py needs a function get_table that returns a" in refused(capfd, *command)
    assert "unknown argument --config.seed=3" in refused(capfd, *command, "--config.seed=3")
    for scaled, message in (("5:scale=big", "use one of paper, small, medium"), ("9", "not found: tables/table9")):
        assert message in refused(capfd, "reproduce", f"--config=tables/table{scaled}", results)


@pytest.mark.slow
def test_table_filled_by_two_processes_equals_that_of_one_process(table, all_results, tmp_path):
    command = ["reproduce", f"--config={table}:all", f"--results={tmp_path}"]
    run_commands([command, command], processes=2, devices=4)
    old, new = load_results([str(all_results)]), load_results([str(tmp_path)])
    runs = runner.load_table(f"{table}:all").runs()
    assert sorted(new.seconds) == sorted(run.name for run in runs)
    for run in runs:
        for seed, other in zip(old.outcome(run).metrics, new.outcome(run).metrics, strict=True):
            assert seed == pytest.approx(other, rel=1e-3, abs=1e-3), run.name
