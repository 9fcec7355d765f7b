"""Tests that training on several processes gives the metrics of one process, for every mesh."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_runs import read_metrics
from processes import WORKER, start_processes

from bertjax.cli import main as cli

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"


def train_commands(corpus: Path, folder: Path, meshes: dict[str, dict[str, int]]) -> list[list[str]]:
    """Returns a `train` command of six steps for each mesh; its workdir has the name of the mesh."""
    return [
        [
            "train",
            f"--config={EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true",
            *("--config.steps=6", "--config.log_every=2", "--config.eval_every=3", "--config.data.seq_len=16"),
            *("--config.data.eval_rows=30", "--config.model.hidden_dropout_prob=0.1"),
            # With two heads, each of two tensor shards has one.
            "--config.model.num_attention_heads=2",
            *(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()),
            f"--workdir={folder / name}",
        ]
        for name, mesh in meshes.items()
    ]


@pytest.fixture(scope="module")
def single_process_metrics(corpus, tmp_path_factory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("single")
    (command,) = train_commands(corpus, folder, {"run": {"data": -1}})
    cli.main(command)
    metrics = read_metrics(folder / "run")
    assert [line["step"] for line in metrics] == [0, 2, 3, 4, 6, 6]
    return metrics


def check_meshes(corpus, folder, expected_metrics, processes, devices, meshes) -> None:
    """Trains on each mesh with `processes` processes of `devices` devices and compares the metrics."""
    commands = train_commands(corpus, folder, meshes)
    for process in start_processes([sys.executable, "-c", WORKER, json.dumps(commands)], processes, devices):
        _, output = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()[-2000:]
    for mesh in meshes:
        metrics = read_metrics(folder / mesh)
        assert [line.keys() for line in metrics] == [line.keys() for line in expected_metrics], mesh
        for line, expected in zip(metrics, expected_metrics, strict=True):
            values = [line[name] for name in expected]
            np.testing.assert_allclose(values, list(expected.values()), rtol=2e-6, atol=1e-7, err_msg=mesh)


def test_tensor_shards_on_two_processes_match_one_process(corpus, tmp_path, single_process_metrics):
    check_meshes(corpus, tmp_path, single_process_metrics, 2, 1, {"tensor": {"data": 1, "tensor": 2}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "meshes"),
    [
        (2, 1, {"data": {"data": 2}, "fsdp": {"data": 1, "fsdp": 2}}),
        (2, 2, {"tensor": {"data": 1, "tensor": 4}, "both": {"data": 1, "fsdp": 2, "tensor": 2}, "fsdp": {"fsdp": 4}}),
        (4, 1, {"both": {"data": 2, "tensor": 2}, "inner": {"data": 1, "fsdp": 2, "tensor": 2}}),
    ],
)
def test_meshes_across_processes_match_one_process(
    corpus, tmp_path, single_process_metrics, processes, devices, meshes
):
    check_meshes(corpus, tmp_path, single_process_metrics, processes, devices, meshes)
