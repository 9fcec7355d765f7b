"""Several processes on this machine, as on a pod."""

import os
import socket
import subprocess

# Runs each of several commands in turn, the processes being started and connected once.
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
    """The processes of a run, each with the same command."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        # The last of two equal flags holds; the others make compilation quick.
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
