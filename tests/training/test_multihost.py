"""Processes of a run: connection, exchange of values and errors, signals, and the end of processes that hang."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import jax
import pytest
from processes import WORKER, start_processes, train_command

from bertjax.config.mesh import ClusterConfig
from bertjax.errors import LOST, BertjaxError
from bertjax.training import multihost
from bertjax.training.multihost import stop_requests, watchdog

# Both processes run this script.
PRIMITIVES = """
import os
import jax
from bertjax.config.mesh import ClusterConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.training.multihost import (
    assert_same_run, broadcast_from_host0, initialize_distributed, is_collective_error, raise_on_all_hosts
)

initialize_distributed(ClusterConfig())
index = jax.process_index()

def fail(error):
    raise error

def raised(function):
    try:
        function()
    except BertjaxError as error:
        assert error.on_all_hosts
        return type(error), str(error)

assert broadcast_from_host0(lambda: {"index": index, "text": "\u00e9" * 100}) == {"index": 0, "text": "\u00e9" * 100}
assert raised(lambda: broadcast_from_host0(lambda: fail(UsageError("no file")))) == (UsageError, "process 0: no file")
assert raised(lambda: raise_on_all_hosts(lambda: None)) is None
assert raised(lambda: raise_on_all_hosts(lambda: index == 1 and fail(UsageError("bad flag")))) == (
    UsageError, "process 1: bad flag"
)
assert raised(lambda: raise_on_all_hosts(lambda: fail(BertjaxError(f"damaged {index}")))) == (
    BertjaxError, "process 0: damaged 0"
)
assert_same_run({"config": {"steps": 3, "data": {"corpus": f"/disk{index}"}, "hang_seconds": index}})
kind, text = raised(lambda: assert_same_run({"config": {"steps": 3 + index}}))
assert kind is UsageError and "process 1: config or data differ from those of process 0: config.steps: 3 -> 4" in text
assert is_collective_error(RuntimeError("Gloo AllGather failed")) and not is_collective_error(RuntimeError("no disk"))
"""

STUCK = """
import time
from bertjax.training.multihost import watchdog

def wait_for_host():
    time.sleep(60)

with watchdog(2) as heartbeat:
    for _ in range(6):
        time.sleep(0.5)
        heartbeat()
    print("alive", flush=True)
    wait_for_host()
"""


def outputs_of(processes) -> list[str]:
    return [process.communicate(timeout=180)[1].decode() for process in processes]


def test_values_and_errors_reach_all_processes():
    processes = start_processes([sys.executable, "-c", PRIMITIVES], processes=2, devices=1)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_argument", "message"),
    [
        ("--config.optimizer.learning_rate=0.5", "config.optimizer.learning_rate: 0.0001 -> 0.5"),
        ("--workdir=elsewhere", "workdir is not shared between hosts"),
    ],
)
def test_different_commands_end_all_processes_with_the_same_error(corpus, tmp_path, own_argument, message):
    command = train_command(corpus, tmp_path / "run")[3:]
    # The last value of a flag counts.
    other = [*command, own_argument.replace("elsewhere", str(tmp_path / "elsewhere"))]
    program = f"from bertjax.training import multihost; multihost._VISIBLE_SECONDS = 1.0; {WORKER}".replace(
        "json.loads(sys.argv[1])", "json.loads(sys.argv[1])[int(os.environ['JAX_PROCESS_ID'])]"
    )
    commands = json.dumps([[command], [other]])
    processes = start_processes([sys.executable, "-c", program, commands], processes=2, devices=1)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    errors = [output.splitlines()[-1] for output in outputs]
    assert errors[0] == errors[1] and errors[0].startswith("bertjax: process 1: ") and message in errors[0], outputs
    assert not [*tmp_path.rglob("checkpoints")] and not [*tmp_path.rglob(".shared-*")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 3])
def test_other_processes_exit_for_a_restart_if_one_is_killed(corpus, tmp_path, killed):
    schedule = ("--config.steps=100000", "--config.log_every=2", "--config.eval_every=100000")
    timeout = "--config.cluster.heartbeat_timeout_seconds=10"
    command = train_command(corpus, tmp_path, "--distributed", *schedule, timeout)
    processes = start_processes(command, processes=2 if killed < 2 else 4, devices=1)
    for line in processes[0].stderr:
        if line.startswith(b"step 2/"):
            processes[killed].kill()
            break
    outputs = outputs_of(processes)
    for process in processes[:killed] + processes[killed + 1 :]:
        # JAX's coordination service aborts the process if it detects the lost process first.
        assert process.returncode in (LOST, -signal.SIGABRT), outputs


@pytest.mark.slow
def test_process_exits_for_a_restart_if_initialization_times_out(corpus, tmp_path):
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
    initialize.assert_called_once_with(initialization_timeout=7, heartbeat_timeout_seconds=11)
    assert os.environ.get("JAX_COORDINATOR_PORT") == expected


@pytest.mark.parametrize("values", [["a:1", "2"], ["localhost", "2", "0"], ["a:1", "x", "0"], ["a:1", "2", "2"], []])
def test_incomplete_or_invalid_environment_is_refused(environment, values):
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
    assert last.startswith("bertjax: process 0 made no progress for 2 s, more than config.hang_seconds")


def test_disabled_or_closed_watchdog_does_not_end_the_process():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(1):
        pass
    time.sleep(1.5)


def test_second_interrupt_raises_ignored_signals_stay_ignored_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop_requested:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) != before and not stop_requested(1)
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_requested(1)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert signal.getsignal(signal.SIGTERM) == before
