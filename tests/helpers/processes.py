"""Training commands and JAX processes on this machine, connected like the processes of a pod."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"
# Script of each process: connects to the other processes, then runs several bertjax commands one after the other.
WORKER = """
import json, os, sys
import jax
from bertjax.cli.main import main
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
)
for command in json.loads(sys.argv[1]):
    main(command)
"""


def train_command(corpus: Path, workdir: Path | str, *overrides: str) -> list[str]:
    """Returns a command that trains a small model on batches of 16 rows and saves every 10 steps."""
    return [
        *(sys.executable, "-m", "bertjax", "train", f"--workdir={workdir}"),
        f"--config={EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true",
        *("--config.data.seq_len=16", "--config.data.batch_size=16", "--config.model.num_attention_heads=2"),
        *("--config.model.dtype=float32", "--config.checkpoint_every=10", *overrides),
    ]


def environment_of(devices: int) -> dict[str, str]:
    """Returns the environment of a process with `devices` CPU devices."""
    # Keep the existing flags, which speed up compilation. If a flag occurs twice, XLA uses the last value.
    return os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"}


def start_processes(command: list[str], processes: int, devices: int) -> list[subprocess.Popen]:
    """Starts the same command in several processes with `devices` CPU devices each."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    environment = environment_of(devices) | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    return [
        subprocess.Popen(
            command, env=environment | {"JAX_PROCESS_ID": str(index)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for index in range(processes)
    ]


def run_commands(commands: list[list[str]], processes: int, devices: int) -> str:
    """Runs bertjax commands one after the other in all processes, and returns the standard error of the processes."""
    text = ""
    for process in start_processes([sys.executable, "-c", WORKER, json.dumps(commands)], processes, devices):
        text += process.communicate(timeout=500)[1].decode()
        assert process.returncode == 0, text[-3000:]
    return text
