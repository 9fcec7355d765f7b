"""Tests that training on several processes gives the metrics of one process, for every mesh."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_runs import read_metrics
from processes import WORKER, start_processes
from small_run import config_arguments


def train_commands(corpus: Path, folder: Path, meshes: dict[str, dict[str, int]]) -> list[list[str]]:
    """Returns a `train` command of the run of `small_run` for each mesh; its workdir has the name of the mesh."""
    commands = []
    for name, mesh in meshes.items():
        sizes = {f"mesh__{axis}": size for axis, size in mesh.items()}
        experiment, *overrides = config_arguments(corpus, **sizes)
        commands.append(["train", f"--config={experiment}", *overrides, f"--workdir={folder / name}"])
    return commands


def check_meshes(corpus, folder, whole, processes, devices, meshes) -> None:
    """Trains on each mesh with `processes` processes of `devices` devices and compares the metrics."""
    commands = train_commands(corpus, folder, meshes)
    for process in start_processes([sys.executable, "-c", WORKER, json.dumps(commands)], processes, devices):
        _, output = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()[-2000:]
    expected_metrics = read_metrics(whole)
    for mesh in meshes:
        metrics = read_metrics(folder / mesh)
        assert [line.keys() for line in metrics] == [line.keys() for line in expected_metrics], mesh
        for line, expected in zip(metrics, expected_metrics, strict=True):
            values = [line[name] for name in expected]
            np.testing.assert_allclose(values, list(expected.values()), rtol=2e-6, atol=1e-7, err_msg=mesh)


@pytest.mark.ci
def test_tensor_parallel_run_on_two_processes_matches_one_process(corpus, tmp_path, whole):
    check_meshes(corpus, tmp_path, whole, 2, 1, {"tensor": {"data": 1, "tensor": 2}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "meshes"),
    [
        (2, 1, {"data": {"data": 2}, "fsdp": {"data": 1, "fsdp": 2}}),
        (2, 2, {"tensor": {"data": 1, "tensor": 4}, "both": {"data": 1, "fsdp": 2, "tensor": 2}, "fsdp": {"fsdp": 4}}),
        (4, 1, {"both": {"data": 2, "tensor": 2}, "inner": {"data": 1, "fsdp": 2, "tensor": 2}}),
    ],
)
def test_runs_on_meshes_across_processes_match_one_process(corpus, tmp_path, whole, processes, devices, meshes):
    check_meshes(corpus, tmp_path, whole, processes, devices, meshes)
