"""Several processes: values, errors, signals and hangs; training and sweeps compared with one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers.command_runs import EXPERIMENTS, read_metrics
from helpers.processes import WORKER, run_commands, start_processes, train_command
from helpers.small_run import config_arguments
from jax.experimental import multihost_utils

from bertjax.cli import main as cli
from bertjax.config.mesh import ClusterConfig
from bertjax.convert.convert import convert
from bertjax.errors import LOST, BertjaxError
from bertjax.training import multihost
from bertjax.training.preemption import stop_requests, watchdog
from bertjax.training.sweep import SWEEP

# Both processes run this script.
PRIMITIVES = """
import contextlib
import jax
from etils import epath
from bertjax.config.mesh import ClusterConfig
from bertjax.errors import BertjaxError, UnavailableError, UsageError
from bertjax.training.checkpoint import read_on_all_hosts
from bertjax.training.multihost import (
    assert_same_run, broadcast_from_host0, initialize_distributed, is_collective_error, raise_on_all_hosts
)

initialize_distributed(ClusterConfig())
index = jax.process_index()

def fail(error):
    raise error

def raised(function, context=contextlib.nullcontext()):
    try:
        with context:
            function()
    except BertjaxError as error:
        assert error.on_all_hosts
        return type(error), str(error)

assert broadcast_from_host0(lambda: {"index": index, "text": "\u00e9" * 100}) == {"index": 0, "text": "\u00e9" * 100}
assert raised(lambda: broadcast_from_host0(lambda: fail(UsageError("no file")))) == (UsageError, "process 0: no file")
assert raised(lambda: None, raise_on_all_hosts()) is None
assert raised(lambda: index == 1 and fail(UsageError("bad flag")), raise_on_all_hosts()) == (
    UsageError, "process 1: bad flag"
)
assert raised(lambda: fail(BertjaxError(f"damaged {index}")), raise_on_all_hosts()) == (
    BertjaxError, "process 0: damaged 0"
)
# A file that only one host cannot read is damaged for all hosts, or for none.
for error, kind in ((FileNotFoundError("no file"), BertjaxError), (PermissionError(13, "no access"), UnavailableError)):
    kind_of_host, text = raised(lambda: index == 1 and fail(error), read_on_all_hosts(epath.Path(".")))
    assert kind_of_host is kind and "process 1: " in text and str(error.strerror or error) in text
assert_same_run({"config": {"steps": 3, "data": {"corpus": f"/disk{index}"}, "hang_seconds": index}})
kind, text = raised(lambda: assert_same_run({"config": {"steps": 3 + index}}))
assert kind is UsageError and "process 1: config or data differ from those of process 0: config.steps: 3 -> 4" in text
assert is_collective_error(RuntimeError("Gloo AllGather failed")) and not is_collective_error(RuntimeError("no disk"))
"""

STUCK = """
import time
from bertjax.training.preemption import watchdog

def wait_for_host():
    time.sleep(60)

with watchdog(2) as heartbeat:
    for _ in range(6):
        time.sleep(0.5)
        heartbeat()
    print("alive", flush=True)
    wait_for_host()
"""

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


def outputs_of(processes) -> list[str]:
    return [process.communicate(timeout=180)[1].decode() for process in processes]


@pytest.mark.ci
def test_values_and_errors_reach_all_processes():
    processes = start_processes([sys.executable, "-c", PRIMITIVES], processes=2, devices=1)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs


@pytest.mark.slow
def test_different_workdirs_end_all_processes_with_the_same_error(corpus, tmp_path):
    command, other = (train_command(corpus, tmp_path / name)[3:] for name in ("run", "elsewhere"))
    program = f"from bertjax.training import multihost; multihost._VISIBLE_SECONDS = 1.0; {WORKER}".replace(
        "json.loads(sys.argv[1])", "json.loads(sys.argv[1])[int(os.environ['JAX_PROCESS_ID'])]"
    )
    commands = json.dumps([[command], [other]])
    processes = start_processes([sys.executable, "-c", program, commands], processes=2, devices=1)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    errors = [output.splitlines()[-1] for output in outputs]
    assert errors[0] == errors[1] and errors[0].startswith("bertjax: process 1: "), outputs
    assert "workdir is not shared between hosts" in errors[0]
    assert not [*tmp_path.rglob("checkpoints")] and not [*tmp_path.rglob(".shared-*")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_other_process_exits_with_the_code_for_a_restart_if_one_is_killed(corpus, tmp_path, killed):
    schedule = ("--config.steps=100000", "--config.log_every=2", "--config.eval_every=100000")
    timeout = "--config.cluster.heartbeat_timeout_seconds=10"
    command = train_command(corpus, tmp_path, "--distributed", *schedule, timeout)
    processes = start_processes(command, processes=2, devices=1)
    for line in processes[0].stderr:
        if line.startswith(b"step 2/"):
            processes[killed].kill()
            break
    outputs = outputs_of(processes)
    # JAX's coordination service aborts the process if it detects the lost process first.
    assert processes[1 - killed].returncode in (LOST, -signal.SIGABRT), outputs


@pytest.mark.slow
def test_process_exits_with_the_code_for_a_restart_if_initialization_times_out(corpus, tmp_path):
    command = train_command(corpus, tmp_path, "--config.cluster.initialization_timeout_seconds=3")
    first, second = start_processes(command, processes=2, devices=1)
    second.kill()
    outputs = outputs_of([first, second])
    assert first.returncode in (LOST, -signal.SIGABRT), outputs


@pytest.fixture
def environment(monkeypatch) -> pytest.MonkeyPatch:
    """Removes the environment variables that describe several processes; returns `monkeypatch`."""
    for name in [*os.environ]:
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM", "JAX_PROCESS", "TPU_", "MEGASCALE_", "SLURM_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "is_multihost"),
    [
        ("", False),
        ("JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1", True),
        # These variables are incomplete, so initialize_distributed rejects them.
        ("JAX_COORDINATOR_ADDRESS=a:1", True),
        ("TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0", False),
        ("TPU_WORKER_HOSTNAMES=a,b TPU_WORKER_ID=0", True),
        ("TPU_PROCESS_ADDRESSES=a:8476,b:8476", True),
        ("MEGASCALE_NUM_SLICES=2 MEGASCALE_SLICE_ID=1", True),
        # The process is in a Slurm allocation, but `srun` did not start it.
        ("SLURM_JOB_ID=7 SLURM_NTASKS=8", False),
        ("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0", True),
        ("SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_PROCID=0", False),
    ],
)
def test_environment_variables_of_multihost_runs_are_recognized(environment, variables, is_multihost):
    for variable in variables.split():
        environment.setenv(*variable.split("="))
    assert multihost.is_multihost_environment() == is_multihost


@pytest.mark.parametrize(("slurm", "port", "expected"), [(False, 0, "8476"), (True, 9000, "9000"), (True, 0, None)])
def test_timeouts_and_port_are_passed_to_jax_distributed(environment, slurm, port, expected):
    initialize = Mock()
    environment.setattr(jax.distributed, "initialize", initialize)
    # Set and delete the variable with monkeypatch, so that a value set by the code is removed after the test.
    environment.setenv("JAX_COORDINATOR_PORT", "")
    environment.delenv("JAX_COORDINATOR_PORT")
    if slurm:
        environment.setenv("SLURM_JOB_ID", "7")
    multihost.initialize_distributed(ClusterConfig(port, 7, 11))
    assert initialize.call_args.kwargs == {
        "initialization_timeout": 7,
        "heartbeat_timeout_seconds": 11,
        "shutdown_timeout_seconds": 3600,
    }
    assert os.environ.get("JAX_COORDINATOR_PORT") == expected


@pytest.mark.parametrize("values", [["a:1", "2"], ["localhost", "2", "0"], ["a:1", "x", "0"], ["a:1", "2", "2"], []])
def test_incomplete_or_invalid_environment_is_rejected(environment, values):
    for name, value in zip(multihost._PROCESS_VARIABLES, values, strict=False):
        environment.setenv(name, value)
    with pytest.raises(BertjaxError, match="could not connect the processes: .* JAX_COORDINATOR_ADDRESS="):
        multihost.initialize_distributed(ClusterConfig())


@pytest.mark.ci
def test_process_without_heartbeat_prints_stacks_and_exits_with_43(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    process = subprocess.run([sys.executable, tmp_path / "stuck.py"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 43 and process.stdout == "alive\n"
    *stacks, last = process.stderr.splitlines()
    assert any(line.endswith("in wait_for_host") for line in stacks)
    assert last.startswith("bertjax: process 0 made no progress for 2 s, the value of config.hang_seconds")


def test_disabled_or_closed_watchdog_does_not_end_the_process():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(1):
        pass
    time.sleep(1.5)


def test_a_second_interrupt_raises_and_ignored_signals_stay_ignored_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop_requested:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) != before and not stop_requested()
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_requested()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert signal.getsignal(signal.SIGTERM) == before


def test_nested_contexts_share_their_signals(capfd):
    with stop_requests() as outer_requested:
        with stop_requests() as inner_requested:
            os.kill(os.getpid(), signal.SIGINT)
            assert inner_requested() and outer_requested()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        # The outer context is still open, and a run that starts now stops after its first step.
        with stop_requests() as next_requested:
            assert outer_requested() and next_requested()
    assert capfd.readouterr().err.count("stop requested") == 1


def test_runs_of_a_process_continue_the_sync_points_of_the_preemption_service(monkeypatch):
    numbers: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda number: numbers.append(number))
    for _ in range(2):
        with stop_requests() as stop_requested:
            stop_requested()
            stop_requested()
    assert numbers == [1, 2, 3, 4]  # JAX stops at number 1 if the signal arrives before the first call.


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
