"""Checkpoint selection, early stopping and class reports."""

import json
import shutil

import numpy as np
import pytest
from helpers.command_runs import EXPERIMENTS, load_task, overrides, read_metrics, refused, train_command

from bertjax.cli import main as cli
from bertjax.metrics.metric import Metric
from bertjax.training import train as loop
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint
from bertjax.training.results import EvaluationHistory
from bertjax.training.step import metric_means
from bertjax.training.sweep import summarize

F1 = Metric("f1")


@pytest.mark.parametrize(
    "scores, patience, expected",
    [
        ([1.0, 0.5, 0.5], 2, True),
        ([1.0, 0.5, 1.0], 2, True),
        ([1.0, 0.5, 1.1], 2, False),
        ([1.0, 0.5], 2, False),
        ([1.0, 0.5, 2.0, 1.9], 2, False),
        ([None, None], 1, True),
        ([None, 0.1], 1, False),
        ([float("nan"), "nan"], 1, True),
        ([1.0] * 9, 0, False),
    ],
)
def test_patience_counts_evaluations_since_the_best_score(scores, patience, expected):
    evaluations = {step: {"f1": value} for step, value in enumerate(scores)}
    assert EvaluationHistory(F1, patience, evaluations).is_out_of_patience() == expected


def test_step_is_best_only_if_its_score_is_the_highest_so_far():
    # Step 0 has no checkpoint, so it is never the best step.
    scores = (0.9, None, 0.5, 0.5, 0.6, None)
    evaluations = list(enumerate({"f1": score} for score in scores))
    for step, expected in list(enumerate((None, False, True, False, True, False)))[1:]:
        assert EvaluationHistory(F1, 0, dict(evaluations[: step + 1])).is_best_at(step) == expected
    assert not EvaluationHistory(F1, 0, dict(evaluations[:4])).is_best_at(7)  # Step 7 is not evaluated.


def test_sweep_selects_the_lowest_loss():
    outcomes = [
        {"trial": {"a": a, "seed": seed}, "score": value, "score_name": "loss", "lower_is_better": True}
        for a, seed, value in ((1, 0, 0.5), (1, 1, 0.3), (2, 0, 0.9), (2, 1, 0.1))
    ]
    by_loss = summarize(outcomes)
    assert by_loss["best"]["score"] == 0.1
    assert [(row["setting"], row["best"]) for row in by_loss["settings"]] == [("a=1", 0.3), ("a=2", 0.1)]
    assert summarize([{**outcome, "lower_is_better": False} for outcome in outcomes])["best"]["score"] == 0.9


def make_task(glue, letters, **fields):
    # With this learning rate, no evaluation improves on the first.
    defaults = {"steps": 30, "log_every": 4, "eval_every": 2, "checkpoint_every": 2, "optimizer__learning_rate": 1e-12}
    fields = {**defaults, "keep_checkpoints": 9, "patience": 2, **fields}
    return load_task(f"glue.py:task=cola,path={glue}", letters, **fields)


@pytest.mark.ci
def test_resumed_run_stops_early_at_the_same_step(glue, letters, tmp_path, log_lines):
    task = make_task(glue, letters)
    result = loop.train(task, str(tmp_path / "whole"))
    assert (result["step"], result["stopped"]) == (6, False)
    assert "stopped early at step 6 of 30: matthews has not improved in 2 evaluations" in log_lines
    assert any(line.startswith("done: 6 steps") for line in log_lines)
    lines = read_metrics(tmp_path / "whole")
    assert [line["step"] for line in lines if "eval_matthews" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "loss" in line] == [4, 6]
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["last_step"] == 6
    continued = shutil.copytree(tmp_path / "whole", tmp_path / "continued")
    assert loop.train(make_task(glue, letters, steps=40), str(continued))["step"] == 6
    assert "the run has stopped early; raise config.patience to continue it" in log_lines
    assert loop.train(make_task(glue, letters, steps=40, patience=4), str(continued))["step"] == 10

    def killed_before(step):
        """Copies the workdir without results and without the checkpoints of `step` and later."""
        folder = tmp_path / f"killed{step}"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "results.json").unlink()
        for child in (folder / "checkpoints").iterdir():
            if int(child.name) >= step:
                shutil.rmtree(child)
        return folder

    for folder in (killed_before(6), killed_before(7)):
        assert loop.train(task, str(folder))["step"] == 6
        assert (folder / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
        last, expected = (find_checkpoint(path / "checkpoints" / "6") for path in (folder, tmp_path / "whole"))
        assert saved_fingerprint(last) == saved_fingerprint(expected)
        assert json.loads((folder / "results.json").read_text()) == results


@pytest.mark.ci
@pytest.mark.parametrize("checkpoint_every", [2, 14])
def test_best_checkpoint_follows_select_by(glue, letters, tmp_path, checkpoint_every):
    # With this learning rate, the loss rises and falls, so the last checkpoint is not the best.
    fields = {"patience": 0, "select_by": "loss", "steps": 14, "optimizer__learning_rate": 0.05}
    task = make_task(glue, letters, **fields, checkpoint_every=checkpoint_every)
    loop.train(task, str(tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    lines = read_metrics(tmp_path / "run")
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert results["selected_by"] == "loss" and results["loss"] == min(losses.values()) < max(losses.values())
    assert losses[results["step"]] == results["loss"] and min(losses, key=losses.get) != max(losses)
    assert find_checkpoint(tmp_path / "run").name == str(results["step"])


def test_invalid_selection_settings_are_an_error_before_training(glue, letters, tmp_path, capfd):
    def error(experiment, *arguments):
        return refused(capfd, *train_command(experiment, tmp_path / "run", letters, *arguments))

    for arguments, message in (
        (["--config.select_by=f1"], "unknown metric: config.select_by='f1'; use one of accuracy, "),
        (["--config.patience=2", "--config.data.eval_split=none"], "config.patience=2 needs a dev set"),
        (["--config.select_by=loss", "--config.data.eval_split=none"], "config.select_by='loss' needs a dev set"),
        (["--config.data.eval_split=test"], "CoLA/test.tsv contains no labels, so there are no metrics"),
    ):
        assert message in error(f"glue.py:task=cola,path={glue}", *arguments)
    config = f"--config={EXPERIMENTS}/glue.py:task=cola,path={glue},size=L1_H16,quick=true,grid=one"
    sweep = ["sweep", config, f"--workdir={tmp_path}/run", *overrides(letters, data__eval_split="none")]
    assert "no dev set to select the best trial" in refused(capfd, *sweep)
    assert "accuracy_mismatched" in error(f"glue.py:task=mnli,path={glue}", "--config.select_by=f1")
    assert not (tmp_path / "run").exists()


def test_class_reports_are_saved_and_printed(cola, capfd):
    results = json.loads((cola / "results.json").read_text())
    assert (cola / "confusion.png").read_bytes().startswith(b"\x89PNG")
    num_correct = sum(row.get(name, 0) for name, row in results["confusion"].items())
    assert num_correct / 21 == pytest.approx(results["accuracy"])
    assert {name: row["support"] for name, row in results["per_class"].items()} == {"0": 11, "1": 10}
    assert results["evaluated_on"].endswith("CoLA/dev.tsv")
    capfd.readouterr()
    cli.main(["evaluate", f"--checkpoint={cola}"])
    log = capfd.readouterr().err
    assert "metrics by class:" in log and "label / predicted" in log


def test_metrics_without_a_loss_have_no_total_loss():
    sums = {"accuracy": np.array([1.0, 2.0]), "cross_entropy": np.array([0.0, 0.0])}
    assert metric_means(sums, {"cross_entropy": 1.0}) == {"accuracy": 0.5}
    sums["cross_entropy"] = np.array([1.5, 3.0])
    assert metric_means(sums, {"cross_entropy": 2.0}) == {"accuracy": 0.5, "cross_entropy": 0.5, "loss": 1.0}
