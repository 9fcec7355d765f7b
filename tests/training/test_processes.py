"""Several processes, as on a pod, compute what one does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"


def run(processes: int, corpus: Path, workdir: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-c", "from bertjax.cli import main; main()", "train", "--distributed"),
        *("--config", f"{EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true"),
        *("--config.steps=6", "--config.log_every=2", "--config.eval_every=3", "--config.data.seq_len=16"),
        *("--workdir", str(workdir)),
    ]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    running = [
        subprocess.Popen(
            command, env=environment | {"JAX_PROCESS_ID": str(index)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for index in range(processes)
    ]
    for process in running:
        _, said = process.communicate(timeout=180)
        assert process.returncode == 0, said.decode()[-2000:]


@pytest.mark.slow
def test_two_processes_leave_the_metric_lines_of_one(corpus, tmp_path):
    run(1, corpus, tmp_path / "one")
    run(2, corpus, tmp_path / "two")
    one, two = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two"))
    assert len(one.splitlines()) == 6
    assert one == two
