"""Order, resumption and failures of `bertjax reproduce`, and results that do not match a table; runs are stubs."""

import dataclasses
import json
import os
import signal

import pytest
from etils import epath
from helpers.command_runs import EXPERIMENTS
from helpers.commanding import refused

from bertjax.cli import main as cli
from bertjax.errors import BertjaxError, UsageError
from bertjax.reproduce import results, runner
from bertjax.reproduce.formatting import cell_values, format_table
from bertjax.reproduce.results import Outcome, Results, load_results
from bertjax.reproduce.table import Cell, Run, Table, missing_data
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.sweep import trial_name

NAMES = ["cola/both", "cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "pretrain/first"]


@pytest.fixture
def executed(monkeypatch):
    """Stubs runs; returns the executed runs, and the sets of runs that `stop`, `fail` or have `other_settings`."""
    calls, done, ends = [], {}, {"stop": set(), "signal": set(), "fail": set(), "other_settings": set()}

    def execute(run, results):
        calls.append(run.name)
        assert all((results, each.name) in done for each in run.dependencies)
        if run.name in ends["fail"]:
            raise BertjaxError("the loss is not finite")
        if run.name in ends["stop"]:
            return {"stopped": True}
        if run.name in ends["signal"]:
            os.kill(os.getpid(), signal.SIGTERM)
        done[results, run.name] = Outcome([], [{}])
        return {"stopped": False}

    def outcome(results, run):
        if run.name in ends["other_settings"] and run.name in calls:
            raise UsageError(f"{run.name} has results of other settings")
        return done.get((results.sources[0][0], run.name))

    monkeypatch.setattr(runner, "_execute", execute)
    monkeypatch.setattr(Results, "outcome", outcome)
    return calls, ends


def test_stopped_table_resumes_without_repeating_finished_runs(table, tmp_path, capfd, executed):
    calls, ends = executed
    command = ["reproduce", f"--config={table}:all", f"--results={tmp_path}"]
    ends["stop"] = {"cola/first"}
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 42 and calls == ["pretrain/first", "cola/first"]
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result == {"stopped": True, "done": ["pretrain/first"], "failed": {}}
    (tmp_path / "cola/first").mkdir(parents=True)
    ends["stop"], ends["signal"] = set(), {"cola/first"}
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    # The run finished, although the signal arrived during it.
    assert end.value.code == 42 and calls[2:] == ["cola/first"]
    cli.main(command)
    assert calls[2:] == ["cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "cola/both"]
    # Durations of resumed runs are ignored in time estimates.
    assert {*json.loads((tmp_path / "reproduce.json").read_text())["seconds"]} == {*NAMES} - {"cola/first"}


@pytest.mark.parametrize(
    ("end", "run", "failed"),
    [
        ("fail", "cola/seed0", {"cola/seed0": "the loss is not finite", "cola/both": "cola/seed0 failed"}),
        ("other_settings", "cola/first", {"cola/first": "cola/first has results of other settings"}),
    ],
)
def test_failed_run_does_not_stop_independent_runs(table, tmp_path, capfd, executed, end, run, failed):
    calls, ends = executed
    ends[end] = {run}
    with pytest.raises(SystemExit) as exit_:
        cli.main(["reproduce", f"--config={table}:all", f"--results={tmp_path}"])
    assert exit_.value.code == 1
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["failed"] == failed and result["done"] == sorted(set(NAMES) - failed.keys())
    assert ("cola/both" in calls) == ("cola/both" not in failed)


def test_concurrent_tables_are_all_recorded_in_reproduce_json(table, tmp_path, executed, monkeypatch):
    calls, _ = executed
    other = tmp_path / "other.py"
    other.write_text(table.read_text().replace('Table("5"', 'Table("mine"'))
    execute = runner._execute

    def execute_with_other_table(run, results):
        if not calls:
            calls.append("other table")
            cli.main(["reproduce", f"--config={other}", f"--results={tmp_path}/r"])
        return execute(run, results)

    monkeypatch.setattr(runner, "_execute", execute_with_other_table)
    cli.main(["reproduce", f"--config={table}", f"--results={tmp_path}/r"])
    index = json.loads((tmp_path / "r/reproduce.json").read_text())
    assert index["tables"] == {"5": str(table), "mine": str(other)}
    assert index["seconds"].keys() == {"pretrain/first", "cola/first"}


def test_table_without_any_data_is_rejected(tmp_path, capfd):
    for arguments, needed in (
        ("", "a corpus from `bertjax prepare`"),
        (f":corpus={tmp_path}/none", f"{tmp_path}/none/manifest"),
    ):
        error = refused(capfd, "reproduce", f"--config=tables/table5{arguments}", f"--results={tmp_path}/r")
        assert f"no run of tables/table5{arguments} can start; the first run needs {needed}" in error
    assert not (tmp_path / "r").exists()


def test_mean_of_columns_shows_the_number_of_finished_runs(tmp_path, monkeypatch):
    runs = [Run(f"cola/{n}") for n in range(3)]
    monkeypatch.setattr(Results, "outcome", lambda _, run: Outcome([], [{"accuracy": 0.5}]) if run != runs[2] else None)
    cells = (
        Cell("row", "CoLA", (runs[0],), "accuracy"),
        Cell("row", "SST-2", (runs[1], runs[2]), "accuracy"),
        Cell("row", "mean", (), "", mean_of=("CoLA", "SST-2")),
    )
    formatted = format_table(Table("mine", "", "tiny", cells), load_results([str(tmp_path)]))
    assert [*formatted.columns.values()] == [("50.0",), ("50.0 (1 of 2)",), ("50.0 (1 of 2)",)]


def test_finished_runs_do_not_need_their_data(executed, tmp_path):
    start = Run("pretrain/first", missing_data="a corpus")
    tuned, other = Run("cola/first", init_from=start), Run("sst2/first", init_from=start, missing_data="SST-2")
    table = Table("mine", "", "tiny", (Cell("row", "CoLA", (tuned, other), "accuracy"),))
    none = load_results([str(tmp_path)])

    def note():
        return format_table(table, none).notes[-1]

    plan = runner.plan_table(table, none)
    assert plan.pending == [] and missing_data([other]) == plan.missing_data[other.name] == "a corpus; SST-2"
    assert note() == "no data for CoLA: needs a corpus; SST-2"
    runner._execute(start, str(tmp_path))
    plan = runner.plan_table(table, none)
    assert plan.pending == [tuned] and plan.missing_data == {other.name: "SST-2"}
    assert note() == "no data for CoLA: needs SST-2"
    assert len(format_table(table, none).commands) == 2


@pytest.mark.parametrize(("members", "accepted"), [("ab", True), ("ac", False), ("abc", False), ("a", False)])
def test_ensemble_with_other_members_is_rejected(members, accepted):
    first, second = Run("first", "glue"), Run("second", "glue")
    both = Run("both", members=(first, second))
    saved = {
        "first": Outcome(["glue"], [{}], fingerprint="a"),
        "second": Outcome(["glue"], [{}], fingerprint="b"),
        "both": Outcome([""], [{}], members=tuple(members)),
    }
    own = Results((("path", saved),))
    if accepted:
        assert own.outcome(both) == saved["both"]
        return
    with pytest.raises(BertjaxError, match="path/both has other ensemble members"):
        own.outcome(both)


def test_override_of_zero_is_compared_with_saved_results():
    config = f"{EXPERIMENTS}/glue.py:task=cola,path=glue,quick=true"
    saved = dataclasses.asdict(experiment_config(config, ["--config.model.hidden_dropout_prob=0.1"]))
    run = Run("cola", config, ("--config.model.hidden_dropout_prob=0",), init_from=Run("first", "pretrain"))
    with pytest.raises(UsageError, match="model.hidden_dropout_prob: 0.0 -> 0.1"):
        results._check_config(run, "cola", saved, {})


@pytest.mark.parametrize(("started_from", "accepted"), [("a", True), ("b", False), ("", False)])
def test_fine_tuning_must_start_from_the_intermediate_checkpoint(tmp_path, monkeypatch, started_from, accepted):
    first = Run("first", "pretrain")
    second = Run("second", "glue", init_from=first, init_step=7)
    outcomes = {
        "first": Outcome(["pretrain"], [{}], fingerprint="end"),
        "second": Outcome(["glue"], [{}], started_from),
    }
    monkeypatch.setattr(results, "read_outcome", lambda folder, run: outcomes[run.name])
    monkeypatch.setattr(results, "saved_fingerprint", {tmp_path / "first/checkpoints/7": "a"}.__getitem__)
    own = Results(((str(tmp_path), None),))
    # A deleted checkpoint has no fingerprint to compare, so the result is accepted, but no run can start from it.
    assert own.outcome(second) == outcomes["second"]
    with pytest.raises(BertjaxError, match="first lacks step 7"):
        runner._execute(second, str(tmp_path))
    (tmp_path / "first/checkpoints/7").mkdir(parents=True)
    if accepted:
        assert own.outcome(second) == outcomes["second"]
        return
    with pytest.raises(BertjaxError, match="second did not start from the parameters of first"):
        own.outcome(second)


@pytest.mark.parametrize(
    ("other", "is_done"),
    [({"score": 0.1}, True), ({"error": "NaN", "diverged": True}, True), ({"error": "disk", "diverged": False}, False)],
)
def test_sweep_with_a_failed_trial_that_did_not_diverge_is_unfinished(other, is_done, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_check_config", lambda *arguments: None)
    trials = [{"trial": {"seed": 0, "steps": 1}, "score": 0.5}, {"trial": {"seed": 0, "steps": 2}, **other}]
    for trial in trials:
        folder = tmp_path / "trials" / trial_name(trial["trial"])
        folder.mkdir(parents=True)
        config = {"task": "glue", "data": {}, "model": {}}
        (folder / "results.json").write_text(json.dumps({"config": config, "data_sha256": "", "f1": 0.5}))
    sweep = {"left": 0, "best": trials[0], "trials": trials, "settings": [{"setting": "steps=1"}]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    outcome = results.read_outcome(epath.Path(tmp_path), Run("run", "glue", seeds=1))
    assert (outcome and outcome.metrics) == ([{"f1": 0.5}] if is_done else None)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(BertjaxError, match="sweep.json is damaged"):
        results.read_outcome(epath.Path(tmp_path), Run("run", "glue", seeds=1))


def test_cells_format_values_and_count_runs_with_a_value():
    runs = tuple(Run(f"run{seed}", "glue", flops=3e12) for seed in range(3))
    outcomes = {run.name: Outcome(["glue"], [{"loss": 2.0}]) for run in runs[:2]}
    own = Results((("path", outcomes),), seconds={"run0": 61.5, "run2": 5.0})
    cells = (
        Cell("row", "TFLOPs", runs[:1], "flops", 1e-12),
        Cell("row", "seconds", runs, "seconds", 1.0, digits=0),
        Cell("row", "loss", runs, "loss", 1.0, digits=3),
    )
    texts = {column: value.text for (_, column), value in cell_values(Table("own", "", "", cells), own).items()}
    assert texts == {"TFLOPs": "3.0", "seconds": "62 (1 of 3)", "loss": "2.000 ±0.000 (2 of 3)"}
    with pytest.raises(UsageError, match="run0 lack the metric f1; use one of flops, loss, seconds"):
        cell_values(Table("own", "", "", (Cell("row", "F1", runs, "f1"),)), own)


def test_guide_vectors_are_added_before_training(tmp_path, monkeypatch):
    tasks = []
    monkeypatch.setattr(runner, "experiment_config", lambda *args: None)
    monkeypatch.setattr(runner, "build_task", lambda *args, **kwargs: "task")
    monkeypatch.setattr(runner, "add_cached_features", lambda *args: None)
    monkeypatch.setattr(runner, "add_guide_vectors", tasks.append)
    monkeypatch.setattr(runner.loop, "train", lambda task, *args: {"tasks": [*tasks]})
    assert runner._execute(Run("embed", "embed"), str(tmp_path)) == {"tasks": ["task"]}
