"""Tests that training on several processes gives the metrics of one process, for every mesh."""

import numpy as np
import pytest
from command_runs import read_metrics
from processes import run_commands
from small_run import config_arguments


@pytest.mark.parametrize(
    ("processes", "devices", "meshes"),
    [
        pytest.param(2, 1, [{"data": 1, "tensor": 2}], marks=pytest.mark.ci),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in [
                (2, 1, [{"data": 2}, {"data": 1, "fsdp": 2}]),
                (2, 2, [{"data": 1, "tensor": 4}, {"data": 1, "fsdp": 2, "tensor": 2}, {"fsdp": 4}]),
                (4, 1, [{"data": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}]),
            ]
        ),
    ],
)
def test_runs_on_meshes_across_processes_match_one_process(corpus, tmp_path, whole, processes, devices, meshes):
    commands = []
    for index, mesh in enumerate(meshes):
        experiment, *overrides = config_arguments(corpus, **{f"mesh__{axis}": size for axis, size in mesh.items()})
        commands.append(["train", f"--config={experiment}", *overrides, f"--workdir={tmp_path}/{index}"])
    run_commands(commands, processes, devices)
    expected_metrics = read_metrics(whole)
    for index, mesh in enumerate(meshes):
        metrics = read_metrics(tmp_path / str(index))
        assert [line.keys() for line in metrics] == [line.keys() for line in expected_metrics], mesh
        for line, expected in zip(metrics, expected_metrics, strict=True):
            values = [line[name] for name in expected]
            np.testing.assert_allclose(values, list(expected.values()), rtol=2e-6, atol=1e-7, err_msg=str(mesh))
