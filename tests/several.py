"""Distributed runs of several processes on this machine."""

import os
import socket
import subprocess

# Runs several commands one after another in processes that are connected once.
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


def started(command: list[str], processes: int, devices: int) -> list[subprocess.Popen]:
    """Starts the processes of a distributed run with the same command."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        # XLA uses the last of two equal flags.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
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
