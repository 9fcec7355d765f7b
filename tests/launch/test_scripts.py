"""Launchers: slurm.sh requeues runs that can resume; queued_resource.sh requests VMs that run the command."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flags import check_command

LAUNCH = Path(__file__).parents[2] / "launch"
# Runs three processes and exits with the highest status, as srun does.
SRUN = """
trap : TERM
while [ "${1#--}" != "$1" ]; do shift; done
worst=0
for SLURM_PROCID in 0 1 2; do export SLURM_PROCID; "$@" || { code=$?; [ $code -le $worst ] || worst=$code; }; done
exit $worst
"""


class Programs:
    """A folder of stand-ins for programs, first in PATH; each appends its arguments to NAME.calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}

    def add(self, name: str, body: str = "") -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" >> {self.folder / name}.calls\n{body}\n")
        file.chmod(0o755)

    def arguments(self, name: str) -> list[str]:
        file = self.folder / f"{name}.calls"
        return file.read_text().splitlines() if file.exists() else []

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess:
        environment = self.environment | variables
        return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)


@pytest.fixture
def programs(tmp_path) -> Programs:
    programs = Programs(tmp_path)
    programs.add("srun", SRUN)
    programs.add("scontrol")
    programs.add("squeue", "echo ${JOB_STATE:-RUNNING}")
    return programs


@pytest.mark.parametrize(
    ("statuses", "variables", "expected_status", "is_requeued"),
    [
        ((0, 0, 0), {}, 0, False),
        ((42, 42, 42), {"SLURM_RESTART_COUNT": "99"}, 42, True),
        ((42, 42, 42), {"JOB_STATE": "COMPLETING"}, 42, False),
        ((43, 137, 43), {}, 137, True),
        ((43, 43, 43), {"SLURM_RESTART_COUNT": "20"}, 43, False),
        ((43, 1, 43), {}, 1, False),
        ((2, 2, 2), {}, 2, False),
        ((130, 130, 130), {}, 130, True),
        ((3, 3, 3), {}, 3, False),
    ],
)
def test_slurm_requeues_runs_that_can_resume(programs, statuses, variables, expected_status, is_requeued):
    command = f"set -- {' '.join(map(str, statuses))}; shift $SLURM_PROCID; exit $1"
    process = programs.run(LAUNCH / "slurm.sh", "bash", "-c", command, **variables)
    assert process.returncode == expected_status, process.stderr
    assert programs.arguments("scontrol") == (["requeue", "7"] if is_requeued else [])


def test_slurm_waits_for_the_save_after_sigterm(programs):
    programs.add("srun", SRUN.replace("0 1 2", "0"))
    process = subprocess.Popen(
        [LAUNCH / "slurm.sh", "bash", "-c", "trap 'echo saved; exit 42' TERM; echo ready; sleep 30 & wait $!"],
        stdout=subprocess.PIPE,
        text=True,
        env=programs.environment,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 42 and output.startswith("saved\n") and programs.arguments("scontrol")


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda file: file.name)
def test_shellcheck_passes(script):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck is not installed; pip install -e '.[dev]'"
    process = subprocess.run([checker, script], capture_output=True, text=True, cwd=LAUNCH.parent)
    assert process.returncode == 0, process.stdout


def test_slurm_options_exist():
    text = (LAUNCH / "slurm.sh").read_text()
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            check_command(["sbatch", *line.split()[1:]])
    check_command(["srun", "--label", "--kill-on-bad-exit=0", "bash"])
    check_command(["squeue", "--noheader", "--jobs=7", "--format=%T"])


def test_queued_resource_runs_command_under_systemd(programs):
    programs.add("gcloud", f'last="${{@: -1}}"; cp "${{last#*startup-script=}}" {programs.folder}/startup')
    options = ["--zone=us-west4-a", "--accelerator-type=v5litepod-16", "--spot"]
    image, command = "us-docker.pkg.dev/p/bertjax/tpu", ["bertjax", "train", "--config", 'pretrain:a="b c",d=$HOME']
    process = programs.run(LAUNCH / "queued_resource.sh", "bert", image, *options, "--", *command)
    assert process.returncode == 0, process.stderr
    arguments = programs.arguments("gcloud")
    check_command(["gcloud", *arguments])
    assert arguments[:5] == ["compute", "tpus", "queued-resources", "create", "bert"]
    assert {*options, "--node-id=bert"} <= {*arguments}
    # Run the startup script with stand-ins for the programs that it calls.
    programs.add("curl", 'echo \'{"access_token": "secret"}\'')
    programs.add("docker", "[ $1 != login ] || cat > ${0%docker}token")
    programs.add("systemd-run")
    process = programs.run("bash", programs.folder / "startup")
    assert process.returncode == 0, process.stderr
    assert (programs.folder / "token").read_text() == "secret\n"
    assert programs.arguments("docker")[-3:] == ["pull", "--quiet", image]
    unit = programs.arguments("systemd-run")
    assert unit[-len(command) - 1 :] == [image, *command]
    assert {"--property=Restart=on-failure", "--property=RestartPreventExitStatus=1 2"} <= {*unit}


def test_queued_resource_of_several_slices_names_nodes_by_prefix(programs):
    programs.add("gcloud")
    options = ["--node-count=2", "--node-prefix=bert", "--zone=us-west4-a"]
    process = programs.run(LAUNCH / "queued_resource.sh", "bert", "image", *options, "--", "true")
    assert process.returncode == 0 and "--node-id=bert" not in programs.arguments("gcloud")


@pytest.mark.parametrize("arguments", [[], ["bert"], ["bert", "image", "--spot"], ["bert", "--spot", "--", "true"]])
def test_queued_resource_prints_usage(programs, arguments):
    process = programs.run(LAUNCH / "queued_resource.sh", *arguments)
    assert process.returncode == 2 and "usage: launch/queued_resource.sh NAME IMAGE" in process.stderr
