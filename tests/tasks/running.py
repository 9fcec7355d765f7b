"""Helpers that run commands on one-layer models."""

import json
from pathlib import Path

import pytest

from bertjax.cli import main as cli

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODEL = {
    "model.hidden_dropout_prob": 0.0,
    "model.attention_probs_dropout_prob": 0.0,
    "optimizer.learning_rate": 3e-3,
    # So narrow a model starts too close to zero with 0.02.
    "model.initializer_range": 0.2,
    "mesh.data": 1,
    "mesh.fsdp": -1,
}


def overrides(letters: Path | None, **fields) -> list[str]:
    given = {**MODEL, **{name.replace("__", "."): value for name, value in fields.items()}}
    if letters:
        given["data.vocabulary"] = letters
    return [f"--config.{name}={value}" for name, value in given.items()]


def train(experiment: str, workdir: Path, letters: Path, *arguments: str, **fields) -> dict:
    if steps := fields.get("steps"):
        # Once an epoch would be at every step of so small data.
        fields = {"eval_every": steps, "checkpoint_every": steps, **fields}
    cli.main(
        [
            "train",
            f"--config={EXPERIMENTS}/{experiment},size=L1_H16,quick=true",
            f"--workdir={workdir}",
            *overrides(letters, **fields),
            *arguments,
        ]
    )
    return json.loads((workdir / "results.json").read_text())


def predict(capfd, checkpoint: Path, output: Path, *arguments: str) -> list[Path]:
    capfd.readouterr()
    cli.main(["predict", f"--checkpoint={checkpoint}", f"--output={output}", *arguments])
    return [Path(line) for line in capfd.readouterr().out.split()]


def records(path: Path) -> list[dict]:
    """Reads a JSON Lines file of predictions and checks that probabilities sum to 1."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for record in found:
        for told in record["probabilities"] if "words" in record else [record.get("probabilities")]:
            if told is not None:
                values = list(told.values()) if isinstance(told, dict) else told
                assert sum(values) == pytest.approx(1, abs=1e-4)
    return found


def refused(capfd, *arguments: str) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    assert end.value.code == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("bertjax: ")
    return error
