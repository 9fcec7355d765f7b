"""A pod on this machine: what is left of it goes on as another one, and the curve is that of a run alone."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
POD = ROOT / "launch" / "local_pod.sh"
STEPS = 60


def command(corpus: Path, workdir: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "bertjax", "train", f"--workdir={workdir}"),
        f"--config={ROOT / 'experiments' / 'pretrain.py'}:size=L1_H16,corpus={corpus},quick=true",
        *(f"--config.steps={STEPS}", "--config.log_every=1", "--config.eval_every=10", "--config.checkpoint_every=10"),
        *("--config.data.seq_len=16", "--config.data.batch_size=16", "--config.model.num_attention_heads=2", *more),
    ]


def started(processes: int, devices: int, arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [POD, "-n", str(processes), "-d", str(devices), "--", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # The last of two equal flags holds.
        env=os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")},
        start_new_session=True,
    )


def said_until(pod: subprocess.Popen, text: str) -> list[str]:
    said = []
    for line in pod.stderr:
        said.append(line)
        if text in line:
            return said
    raise AssertionError("".join(said))


def process_of(pod: subprocess.Popen, index: int) -> int:
    """The process with that number, which is a child of the pod's script's, or that child's."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_process(folder, pod.pid, index):
            return int(folder.name)
    raise AssertionError(f"no process {index}")


def _is_process(folder: Path, session: int, index: int) -> bool:
    try:
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        parent = Path("/proc", stat[1])
        return (
            int(stat[3]) == session
            and f"JAX_PROCESS_ID={index}" in (folder / "environ").read_text().split("\0")
            and "bertjax" in (folder / "cmdline").read_text()
            # What it has forked looks the same but for its parent.
            and "bash" in os.readlink(parent / "exe")
            and "python" in os.readlink(folder / "exe")
        )
    except OSError:
        return False


def curve(workdir: Path) -> dict[tuple[int, bool, str], float]:
    """Every number of `metrics.jsonl`, of evaluations or not; each step's once."""
    found: dict[tuple[int, bool, str], float] = {}
    for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            key = line["step"], "eval_loss" in line, name
            assert key not in found
            found[key] = value
    return found


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory) -> dict[tuple[int, bool, str], float]:
    workdir = tmp_path_factory.mktemp("alone") / "run"
    subprocess.run(command(corpus, workdir), check=True, capture_output=True, env=os.environ)
    return curve(workdir)


def assert_same(found: dict[tuple[int, bool, str], float], alone: dict[tuple[int, bool, str], float]) -> None:
    assert found.keys() == alone.keys()
    assert {step for step, _, name in alone if name == "loss"} == {*range(1, STEPS + 1)}
    np.testing.assert_allclose([found[key] for key in alone], [*alone.values()], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_a_pod_that_loses_a_process_goes_on_as_another_with_the_curve_of_a_run_alone(corpus, tmp_path, alone):
    workdir = tmp_path / "run"
    pod = started(4, 2, command(corpus, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=4"))
    said = said_until(pod, "step 25/")
    os.kill(process_of(pod, 2), signal.SIGKILL)
    _, rest = pod.communicate(timeout=120)
    lost = re.findall(r"^\[(\d)\] bertjax: another process of this run is gone \(process (\d)", rest, re.MULTILINE)
    assert sorted(lost) == [("0", "2"), ("1", "2"), ("3", "2")], "".join(said) + rest
    assert pod.returncode == 128 + signal.SIGKILL
    # Half as many processes, and devices of one that lie across processes of the other.
    pod = started(2, 2, command(corpus, workdir, "--config.mesh.data=2", "--config.mesh.tensor=2"))
    _, said = pod.communicate(timeout=300)
    assert pod.returncode == 0, said
    assert re.search(r"going on from step 20 ", said)
    assert_same(curve(workdir), alone)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["first step after", "evaluation", "step 15/"])
def test_a_request_to_one_process_has_all_save_the_same_step_and_end_to_be_started_again(
    corpus, tmp_path, alone, moment
):
    workdir = tmp_path / "run"
    # Evaluations that take their time.
    more = ["--config.mesh.data=2", "--config.data.eval_rows=0"] if moment == "evaluation" else ["--config.mesh.data=2"]
    pod = started(2, 1, command(corpus, workdir, *more))
    said = said_until(pod, {"evaluation": "step 0 held out", "first step after": "device(s)"}.get(moment, moment))
    os.kill(process_of(pod, 1), signal.SIGTERM)
    _, rest = pod.communicate(timeout=120)
    assert pod.returncode == 42, "".join(said) + rest
    (step,) = re.findall(r"stopped by a signal at step (\d+); saved", rest)
    assert (workdir / "checkpoints" / step).is_dir()
    pod = started(2, 1, command(corpus, workdir, *more))
    _, said = pod.communicate(timeout=300)
    assert pod.returncode == 0 and f"going on from step {step} " in said, said
    if moment != "evaluation":
        assert_same(curve(workdir), alone)
