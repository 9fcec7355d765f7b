"""A folder of stand-ins for the programs that launchers call, and what the launchers' tests share."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
HERE = Path(__file__).parent
PROGRAMS = ("gcloud", "kubectl", "sbatch", "squeue", "scancel", "scontrol")

TPU = "--zone us-west4-a --type v5litepod-16 --runtime v2-alpha-tpuv5-lite --image us-docker.pkg.dev/p/bertjax/tpu"
GROUP = "--project p --zone us-east5-a --machine-type ct6e-standard-4t --topology 4x4 --image us-docker.pkg.dev/p/b/tpu"
GKE = "--accelerator tpu-v5-lite-podslice --topology 4x4 --image us-docker.pkg.dev/p/bertjax/tpu"
COMMAND = "bertjax train --distributed --config pretrain:size=base,corpus=gs://b/corpus --workdir gs://b/runs/base"


class Pretended:
    """A folder of stand-ins, first in the PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "STANDIN": str(folder),
            "LAUNCH_POLL_SECONDS": "0",
            "LAUNCH_PATIENCE": "2",
        }
        self.environment.pop("CLOUDSDK_COMPUTE_ZONE", None)
        self.environment.pop("CLOUDSDK_CORE_PROJECT", None)
        (folder / "bin").mkdir()
        for program in PROGRAMS:
            # Imported, and not run as a file, so that it is compiled once.
            start = f"import sys; sys.path[0] = {str(HERE)!r}; from standin import main; sys.exit(main(*sys.argv[1:]))"
            self.program(program, f'exec {shlex.quote(sys.executable)} -E -S -c {shlex.quote(start)} {program} "$@"')

    def program(self, name: str, body: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def fail(self, **faults: object) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def run(self, line: str, **environment: str) -> subprocess.CompletedProcess:
        words = shlex.split(line)
        return subprocess.run(
            [LAUNCH / words[0], *words[1:]],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=self.folder,
            env={**self.environment, **environment},
        )

    def calls(self, *words: str) -> list[list[str]]:
        file = self.folder / "calls.jsonl"
        made = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call for call in made if {*words} <= {*call}]

    def cloud(self) -> dict:
        return json.loads((self.folder / "cloud.json").read_text())


def told(done: subprocess.CompletedProcess, what: str, paid: bool) -> None:
    """Holds an ending: its message, and whether it says what is left and how to delete it."""
    assert what in done.stderr, done.stderr
    assert ("is paid for until it is deleted" in done.stderr) == paid, done.stderr
    assert "Traceback" not in done.stderr and "unbound variable" not in done.stderr
