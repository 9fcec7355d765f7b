"""Tests that results are rejected if their settings, initial parameters or ensemble members differ from the table's."""

import dataclasses

import pytest
from command_runs import EXPERIMENTS

from bertjax.errors import BertjaxError, UsageError
from bertjax.reproduce import results, runner
from bertjax.reproduce.formatting import cell_values
from bertjax.reproduce.results import Outcome, Results, Source
from bertjax.reproduce.table import Cell, Run, Table
from bertjax.training.checkpoint_config import experiment_config


@pytest.mark.parametrize(("members", "accepted"), [("ab", True), ("ac", False), ("abc", False), ("a", False)])
def test_ensemble_with_other_members_is_rejected(members, accepted):
    first, second = Run("first", "glue"), Run("second", "glue")
    both = Run("both", members=(first, second))
    saved = {
        "first": Outcome(["glue"], [{}], fingerprint="a"),
        "second": Outcome(["glue"], [{}], fingerprint="b"),
        "both": Outcome([""], [{}], members=tuple(members)),
    }
    found = Results((Source("path", outcomes=saved),))
    if accepted:
        assert found.outcome(both) == saved["both"]
        return
    with pytest.raises(BertjaxError, match="path/both has other ensemble members"):
        found.outcome(both)


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
    found = Results((Source(str(tmp_path)),))
    # A deleted checkpoint has no fingerprint to compare, so the result is accepted, but no run can start from it.
    assert found.outcome(second) == outcomes["second"]
    with pytest.raises(BertjaxError, match="first lacks step 7"):
        runner._execute(second, str(tmp_path))
    (tmp_path / "first/checkpoints/7").mkdir(parents=True)
    if accepted:
        assert found.outcome(second) == outcomes["second"]
        return
    with pytest.raises(BertjaxError, match="second did not start from the parameters of first"):
        found.outcome(second)


def test_cells_show_flops_and_known_durations_with_their_digits():
    runs = tuple(Run(f"run{seed}", "glue", flops=3e12) for seed in range(3))
    outcomes = {run.name: Outcome(["glue"], [{"loss": 2.0}]) for run in runs[:2]}
    found = Results((Source("path", seconds={"run0": 61.5, "run2": 5.0}, outcomes=outcomes),))
    cells = (
        Cell("row", "TFLOPs", runs[:1], "flops", 1e-12),
        Cell("row", "seconds", runs, "seconds", 1.0, digits=0),
        Cell("row", "loss", runs, "loss", 1.0, digits=3),
    )
    texts = {column: value.text for (_, column), value in cell_values(Table("own", "", "", cells), found).items()}
    assert texts == {"TFLOPs": "3.0", "seconds": "62 (1 of 3)", "loss": "2.000 ±0.000 (2 of 3)"}
    with pytest.raises(UsageError, match="run0 lack the metric f1; use one of flops, loss, seconds"):
        cell_values(Table("own", "", "", (Cell("row", "F1", runs, "f1"),)), found)
