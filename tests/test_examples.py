"""Examples of extensions: each trains a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command_runs import read_metrics

from bertjax.cli import main as cli

pytestmark = pytest.mark.ci

EXAMPLES = Path(__file__).parents[1] / "examples"
FIELDS = {
    "data.seq_len": 16,
    "data.batch_size": 8,
    "data.eval_rows": 8,
    "log_every": 2,
    "eval_every": 2,
    "model.num_attention_heads": 2,
    "mesh.data": 1,
    "model.dtype": "float32",
}


def train(experiment: str, workdir: Path, *flags: str) -> dict:
    """Trains an experiment of pre-training for two steps and returns the logged metrics of training."""
    fields = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    cli.main(["train", "--config", experiment, *fields, *flags, "--workdir", str(workdir)])
    return next(line for line in read_metrics(workdir) if "loss" in line)


@pytest.mark.parametrize(("name", "metric"), [("custom_metric", "mlm_top5"), ("custom_objective", "z_loss")])
def test_custom_metric_and_objective_are_logged(name, metric, corpus, tmp_path):
    line = train(f"{EXAMPLES / name}.py:corpus={corpus},size=L1_H16,steps=2", tmp_path)
    assert line["mlm_accuracy"] <= line.get("mlm_top5", 1)
    losses = [line[loss] for loss in ("mlm_loss", "z_loss") if loss in line]
    if metric == "z_loss":
        assert 0 < line[metric] < 0.1 and line["loss"] == pytest.approx(sum(losses), rel=1e-5)


def test_custom_attention_replaces_that_of_the_model(corpus, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    experiment = f"pretrain:corpus={corpus},size=L1_H16,quick=true"
    flags = ["--config.steps=2", "--config.model.attention_probs_dropout_prob=0.0"]
    losses = []
    for window in (0, 64):
        monkeypatch.setattr("custom_attention.WINDOW", window)
        flag = "--config.model.attention=custom_attention.local_attention"
        losses.append(train(experiment, tmp_path / str(window), *flags, flag)["loss"])
    losses.append(train(experiment, tmp_path / "xla", *flags)["loss"])
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
    assert abs(losses[0] - losses[2]) > 1e-6


def test_custom_task_trains_and_predicts(letters, tmp_path, capfd):
    paragraphs = ["a start\nmore of it\nthe end", "a start\nthe end"]
    for split, count in (("train", 8), ("dev", 2)):
        (tmp_path / f"{split}.txt").write_text("\n\n".join(paragraphs * count))
    fields = {"epochs": 4, "data.vocabulary": letters, "data.batch_size": 8, "optimizer.learning_rate": 3e-3}
    flags = [f"--config.{name}={value}" for name, value in {**fields, "model.dtype": "float32"}.items()]
    config = f"{EXAMPLES}/custom_task.py:path={tmp_path},size=L1_H16"
    cli.main(["train", "--config", config, *flags, "--workdir", str(tmp_path / "run")])
    capfd.readouterr()
    cli.main(["predict", "--checkpoint", str(tmp_path / "run"), "--json", "a start"])
    assert json.loads(capfd.readouterr().out)["prediction"] in ("first", "between", "last")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["accuracy"] >= results["baseline"]["accuracy"]
