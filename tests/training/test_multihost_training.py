"""Training, fine-tuning and sweeps on several processes, compared with one process."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_runs import read_metrics
from processes import run_commands, start_processes
from small_run import config_arguments

from bertjax.cli import main as cli
from bertjax.convert.convert import convert
from bertjax.training.sweep import SWEEP

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
# In every trial, only process 1 fails.
FAILING_ON_ONE_HOST = """
import jax
from bertjax.cli import main as cli
from bertjax.training import train

train_all = train.train

def fail_on_process1(*args):
    if jax.process_index():
        raise OSError("no such disk")
    return train_all(*args)

train.train = fail_on_process1
cli.main()
"""


@pytest.fixture(scope="module")
def config_flag(tmp_path_factory) -> str:
    """Returns the --config flag for fine-tuning on texts of two classes."""
    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("train", 32), ("dev", 16)):
        rows = [f"a b c d{' e' * (index % 5)}\t{index % 2}\n" for index in range(count)]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    return f"--config={EXPERIMENTS}/text.py:train={folder}/train.tsv,dev={folder}/dev.tsv"


def metrics(workdir: Path) -> list[float]:
    lines = read_metrics(workdir)
    return [line[name] for line in lines for name in sorted(line)]


def meshes_on(processes: int, devices: int, *meshes: dict[str, int], mark=pytest.mark.slow):
    return pytest.param(processes, devices, meshes, marks=mark)


@pytest.mark.parametrize(
    ("processes", "devices", "meshes"),
    [
        meshes_on(2, 1, {"data": 1, "tensor": 2}, mark=pytest.mark.ci),
        meshes_on(2, 1, {"data": 2}, {"data": 1, "fsdp": 2}),
        meshes_on(2, 2, {"data": 1, "tensor": 4}, {"data": 1, "fsdp": 2, "tensor": 2}, {"fsdp": 4}),
        meshes_on(4, 1, {"data": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}),
    ],
)
def test_runs_on_meshes_across_processes_match_one_process(corpus, tmp_path, trained, processes, devices, meshes):
    commands = []
    for index, mesh in enumerate(meshes):
        experiment, *overrides = config_arguments(corpus, **{f"mesh__{axis}": size for axis, size in mesh.items()})
        commands.append(["train", f"--config={experiment}", *overrides, f"--workdir={tmp_path}/{index}"])
    run_commands(commands, processes, devices)
    for index, mesh in enumerate(meshes):
        values = metrics(tmp_path / str(index))
        np.testing.assert_allclose(values, metrics(trained), rtol=2e-6, atol=1e-7, err_msg=str(mesh))


def command(name: str, config_flag: str, init_from: Path, workdir: Path, *options: str) -> list[str]:
    fields = ("steps=4", "data.batch_size=8", "data.seq_len=16", "model.dtype=float32")
    overrides = [f"--config.{field}" for field in fields]
    return [name, config_flag, *overrides, f"--init_from={init_from}", f"--workdir={workdir}", *options]


@pytest.mark.slow
def test_two_processes_start_from_checkpoints_and_continue_a_sweep_after_a_failed_trial(trained, config_flag, tmp_path):
    convert(str(trained), str(tmp_path / "foreign"), "huggingface", False)
    checkpoints = {"bertjax": trained, "huggingface": tmp_path / "foreign"}
    cli.main(command("train", config_flag, trained, tmp_path / "single"))
    commands = [command("train", config_flag, path, tmp_path / name) for name, path in checkpoints.items()]
    # With the first learning rate the loss is not finite.
    grid = ("--grid", "optimizer.learning_rate=1e30,1e-4")
    commands.append(command("sweep", config_flag, trained, tmp_path / "sweep", *grid))
    assert "trial failed: " in run_commands(commands, processes=2, devices=1)
    expected = metrics(tmp_path / "single")
    for name in checkpoints:
        np.testing.assert_allclose(metrics(tmp_path / name), expected, rtol=2e-5, atol=1e-6, err_msg=name)
    trials = json.loads((tmp_path / "sweep" / SWEEP).read_text())["trials"]
    assert ["error" in trial for trial in trials] == [True, False]


@pytest.mark.slow
def test_sweep_ends_if_trial_fails_on_one_process(trained, config_flag, tmp_path):
    arguments = command("sweep", config_flag, trained, tmp_path / "sweep", "--distributed")
    processes = start_processes([sys.executable, "-c", FAILING_ON_ONE_HOST, *arguments], processes=2, devices=1)
    texts = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [43, 1], texts
    assert "no such disk" in texts[1]
