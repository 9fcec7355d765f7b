"""Helpers that run commands on one-layer models."""

import functools
import json
from pathlib import Path

import pytest

from bertjax.cli import main as cli
from bertjax.tasks.build import build_task
from bertjax.tasks.task import Task
from bertjax.training.checkpoint_config import experiment_config
from helpers.commanding import printed
from helpers.commanding import refused as refused_command

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODEL = {
    # The default is bfloat16 on some processors.
    "model.dtype": "float32",
    "model.hidden_dropout_prob": 0.0,
    "model.attention_probs_dropout_prob": 0.0,
    "optimizer.learning_rate": 3e-3,
    # The default, 0.02, is too small for a model of hidden size 16.
    "model.initializer_range": 0.2,
    "mesh.data": 1,
    "mesh.fsdp": -1,
}

# Commands that read data or results may print log lines before their error.
refused = functools.partial(refused_command, logs=True)


def overrides(vocabulary: Path | None, **fields) -> list[str]:
    """Returns `--config` flags for a small model, a vocabulary (None: the checkpoint's) and further fields."""
    values = {**MODEL, **{name.replace("__", "."): value for name, value in fields.items()}}
    if vocabulary:
        values["data.vocabulary"] = vocabulary
    return [f"--config.{name}={value}" for name, value in values.items()]


def load_task(experiment: str, vocabulary: Path | None, *arguments: str, train: bool = True, **fields) -> Task:
    """Builds the task of an experiment; `train` selects whether to read training data."""
    flags = [*overrides(vocabulary, **fields), *arguments]
    config = experiment_config(f"{EXPERIMENTS}/{experiment},size=L1_H16,quick=true", flags)
    return build_task(config, train)


def train_command(experiment: str, workdir: Path, vocabulary: Path | None, *arguments: str, **fields) -> list[str]:
    """Returns a `bertjax train` command. With `steps`, the run evaluates and saves only at its end."""
    if steps := fields.get("steps"):
        # An epoch of the test data takes one or two steps.
        fields = {"eval_every": steps, "checkpoint_every": steps, **fields}
    config = f"--config={EXPERIMENTS}/{experiment},size=L1_H16,quick=true"
    return ["train", config, f"--workdir={workdir}", *overrides(vocabulary, **fields), *arguments]


def train(experiment: str, workdir: Path, vocabulary: Path | None, *arguments: str, **fields) -> dict:
    """Runs `train_command` and returns the content of `results.json`."""
    cli.main(train_command(experiment, workdir, vocabulary, *arguments, **fields))
    return json.loads((workdir / "results.json").read_text())


def evaluate(capfd, checkpoint: Path, *arguments: str) -> dict:
    """Runs `bertjax evaluate` and returns the metrics that it prints."""
    return json.loads(printed(capfd, "evaluate", f"--checkpoint={checkpoint}", *arguments))


def predict(capfd, checkpoint: Path, output: Path, *arguments: str) -> list[Path]:
    """Runs `bertjax predict` and returns the files that it wrote."""
    out = printed(capfd, "predict", f"--checkpoint={checkpoint}", f"--output={output}", *arguments)
    return [Path(line) for line in out.split()]


def read_metrics(workdir: Path) -> list[dict]:
    """Returns the lines of a run's `metrics.jsonl`. Unlike the package's reader, it fails on a damaged line."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def records(path: Path) -> list[dict]:
    """Reads a JSON Lines file of predictions and checks that probabilities sum to 1."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines:
        for probabilities in record["probabilities"] if "words" in record else [record.get("probabilities")]:
            if probabilities is not None:
                values = list(probabilities.values()) if isinstance(probabilities, dict) else probabilities
                assert sum(values) == pytest.approx(1, abs=1e-4)
    return lines
