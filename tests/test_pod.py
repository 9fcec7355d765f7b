"""Runs of launch/local_pod.sh: training resumes on fewer processes, and its metrics equal those of one process."""

import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.command_runs import read_metrics
from helpers.processes import train_command

ROOT = Path(__file__).parents[1]
STEPS = 60
# Values by (step, whether the line is an evaluation, name of the metric).
Metrics = dict[tuple[int, bool, str], float]


def train(corpus: Path, workdir: Path, *overrides: str) -> list[str]:
    schedule = (f"--config.steps={STEPS}", "--config.log_every=1", "--config.eval_every=10")
    return train_command(corpus, workdir, *schedule, "--config.cluster.heartbeat_timeout_seconds=10", *overrides)


def start_pod(processes: int, devices: int, command: list[str]) -> subprocess.Popen:
    pod = [ROOT / "launch" / "local_pod.sh", "-n", str(processes), "-d", str(devices), "--", *command]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(pod, **pipes, start_new_session=True)


def read_until(pod: subprocess.Popen, text: str) -> None:
    """Reads standard error up to the line that contains the text."""
    assert any(text in line for line in pod.stderr)


def pid_of(pod: subprocess.Popen, index: int) -> int:
    """Returns the PID of the pod's process whose JAX_PROCESS_ID is `index`."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_process(folder, pod.pid, index):
            return int(folder.name)
    raise AssertionError(f"no process {index}")


def _is_process(folder: Path, session: int, index: int) -> bool:
    try:
        _, parent, _, process_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        return (
            int(process_session) == session
            and f"JAX_PROCESS_ID={index}" in (folder / "environ").read_text().split("\0")
            and "python" in os.readlink(folder / "exe")
            # Child processes of bertjax inherit JAX_PROCESS_ID, but only bertjax itself has bash as its parent.
            and "bash" in os.readlink(f"/proc/{parent}/exe")
        )
    except OSError:
        return False


def metrics_of(workdir: Path) -> Metrics:
    metrics: Metrics = {}
    for line in read_metrics(workdir):
        for name, value in line.items():
            key = line["step"], "eval_loss" in line, name
            assert key not in metrics
            metrics[key] = value
    return metrics


@pytest.fixture(scope="module")
def single_process_metrics(corpus, tmp_path_factory) -> Metrics:
    workdir = tmp_path_factory.mktemp("single") / "run"
    subprocess.run(train(corpus, workdir), check=True, capture_output=True)
    return metrics_of(workdir)


def assert_same_metrics(metrics: Metrics, expected: Metrics) -> None:
    assert metrics.keys() == expected.keys()
    assert {step for step, _, name in expected if name == "loss"} == {*range(1, STEPS + 1)}
    np.testing.assert_allclose([metrics[key] for key in expected], [*expected.values()], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_run_resumes_on_fewer_processes_and_another_mesh_after_a_kill(corpus, tmp_path, single_process_metrics):
    workdir = tmp_path / "run"
    pod = start_pod(4, 2, train(corpus, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=4"))
    read_until(pod, "step 25/")
    os.kill(pid_of(pod, 2), signal.SIGKILL)
    pod.communicate(timeout=120)
    assert pod.returncode == 128 + signal.SIGKILL
    # Resume with half as many processes and with another mesh.
    pod = start_pod(2, 2, train(corpus, workdir, "--config.mesh.data=2", "--config.mesh.tensor=2"))
    _, text = pod.communicate(timeout=300)
    assert pod.returncode == 0, text
    assert "resumed " in text and " at step 20" in text
    assert_same_metrics(metrics_of(workdir), single_process_metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "overrides"),
    [
        ("device(s)", []),
        # Evaluate all held-out rows, so that the signal arrives during the evaluation.
        ("eval step 0:", ["--config.data.eval_rows=0"]),
        ("step 15/", []),
    ],
    ids=["compilation", "evaluation", "step"],
)
def test_sigterm_to_one_process_saves_the_same_step_on_all(corpus, tmp_path, single_process_metrics, moment, overrides):
    workdir = tmp_path / "run"
    command = train(corpus, workdir, "--config.mesh.data=2", *overrides)
    pod = start_pod(2, 1, command)
    read_until(pod, moment)
    os.kill(pid_of(pod, 1), signal.SIGTERM)
    _, text = pod.communicate(timeout=120)
    assert pod.returncode == 42, text
    (step,) = re.findall(r"stopped by a signal; saved step (\d+)", text)
    assert (workdir / "checkpoints" / step).is_dir()
    pod = start_pod(2, 1, command)
    _, text = pod.communicate(timeout=300)
    assert pod.returncode == 0 and f" at step {step}" in text, text
    if not overrides:
        assert_same_metrics(metrics_of(workdir), single_process_metrics)
