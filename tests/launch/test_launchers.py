"""What all launchers have in common: shellcheck, wrong use, the usage, dry runs; and what the stand-ins refuse."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pretending import COMMAND, GKE, GROUP, LAUNCH, PROGRAMS, ROOT, TPU
from standin import FLAGS, Refused, parse


@pytest.mark.parametrize("script", sorted(LAUNCH.rglob("*.sh")), ids=lambda file: str(file.relative_to(LAUNCH)))
def test_shellcheck_has_nothing_to_say(script):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck is not installed; pip install -e '.[dev]'"
    done = subprocess.run([checker, "--external-sources", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("queued_resource.sh create bert --type v2-8 -- true", "needs --zone"),
        (f"queued_resource.sh create {TPU} -- true", "needs a NAME"),
        (f"queued_resource.sh create bert {TPU}", "needs -- COMMAND"),
        (f"queued_resource.sh create bert {TPU} --slices none -- true", "--slices none"),
        (f"queued_resource.sh create bert {TPU} --best-effort -- true", "unknown argument --best-effort"),
        (f"queued_resource.sh start bert {TPU} -- true", "unknown verb start"),
        ("queued_resource.sh create bert --zone", "--zone needs a value"),
        ("queued_resource.sh delete bert --zone --dry-run", "--zone needs a value"),
        (f"gke.sh create bert {GKE} --topology 0x4 -- true", "needs --topology"),
        (f"gke.sh create bert {GKE} --chips 08 -- true", "08 is not a number"),
        (f"gke.sh create bert {GKE} --queue 'q z' -- true", "is no name of Kubernetes"),
        (f"gke.sh create bert {GKE} --accelerator 'x: y #' -- true", "is no name of Kubernetes"),
        ("queued_resource.sh create bert --zone us-west4-a --image i -- true", "needs --type and --runtime"),
        ("instance_group.sh create bert --zone us-east5-a -- true", "needs --project and --zone"),
        (f"instance_group.sh create bert {GROUP} --topology 4by4 -- true", "needs --topology"),
        (f"instance_group.sh create bert {GROUP} --topology 3x3 -- true", "3x3 is 9 chips, which hosts of 4"),
        (f"instance_group.sh create bert {GROUP} --machine-type n2-standard -- true", "needs --machine-type"),
        (f"gke.sh create Bert {GKE} -- true", "needs a NAME"),
        (f"gke.sh create bert {GKE} --chips 3 -- true", "4x4 is 16 chips, which hosts of 3"),
        (f"gke.sh create bert {GKE} --slices x -- true", "x is not a number"),
        ("gke.sh create bert -- true", "needs --accelerator"),
        (f"gke.sh create bert {GKE} --image 'a\tb' -- true", "a control character in: $'a\\tb'"),
        (f"gke.sh create bert {GKE} -- 'a\tb'", "a control character in: $'a\\tb'"),
        ("slurm.sh create bert --nodes 2 -- true", "needs --nodes and --gpus"),
        ("slurm.sh create bert --nodes 2 --gpus 8", "needs -- COMMAND"),
    ],
)
def test_wrong_use_is_one_line_and_calls_nothing(pretended, line, says):
    done = pretended.run(line)
    script = line.split()[0]
    assert done.returncode == 2 and not pretended.calls()
    assert done.stderr.startswith(f"{script}: ") and says in done.stderr
    assert done.stderr.endswith(f"see launch/{script} --help\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["queued_resource.sh", "instance_group.sh", "gke.sh", "slurm.sh"])
def test_the_example_of_the_usage_works(pretended, script):
    usage = pretended.run(f"{script} --help")
    assert usage.returncode == 0 and not usage.stderr
    (example,) = [part for part in usage.stdout.split("\n\n") if part.startswith(f"  launch/{script}")]
    line = example.replace("\\\n", " ").strip().removeprefix("launch/").replace(" -- ", " --dry-run -- ")
    done = pretended.run(line)
    assert done.returncode == 0 and "bertjax train" in done.stdout.replace('", "', " "), done.stderr


@pytest.mark.parametrize(
    "line",
    [
        *(f"queued_resource.sh {verb} bert {TPU} --spot --slices 2 -- {COMMAND}" for verb in ("create", "keep", "run")),
        *(f"instance_group.sh {verb} bert {GROUP} --spot -- {COMMAND}" for verb in ("create", "keep", "run")),
        *(f"queued_resource.sh {verb} bert --zone us-west4-a" for verb in ("status", "log", "list", "delete")),
        *(
            f"instance_group.sh {verb} bert --project p --zone us-east5-a"
            for verb in ("status", "log", "list", "delete")
        ),
        f"gke.sh create bert {GKE} -- {COMMAND}",
        *(f"gke.sh {verb} bert" for verb in ("status", "log", "list", "delete")),
        f"slurm.sh create bert --nodes 2 --gpus 8 -- {COMMAND}",
        *(f"slurm.sh {verb} bert" for verb in ("status", "log", "list", "delete")),
    ],
)
def test_a_dry_run_prints_commands_that_the_programs_take_and_runs_none(pretended, line):
    done = pretended.run(line.replace(" bert ", " bert --dry-run ") if " bert " in line else f"{line} --dry-run")
    assert done.returncode == 0 and not done.stderr and not pretended.calls(), done.stderr
    # Files of the run that are gone when somebody reads this.
    assert not re.search(r"/tmp\.\w+/", done.stdout)
    # A manifest, where one is printed, ends before the commands.
    commands = [line for line in done.stdout.splitlines() if line.startswith((*PROGRAMS, "env ", "tail "))]
    assert commands
    for words in (shlex.split(command, comments=True) for command in commands):
        if words[0] == "env":
            words = words[2:]
        if words[0] != "tail":
            parse(words[0], words[1:])


@pytest.mark.parametrize(
    "words",
    [
        "gcloud compute tpus queued-resources create a --best-effort",
        "gcloud compute tpus queued-resource create a",
        "gcloud compute instance-templates create a --provisioning-model=CHEAP",
        "gcloud compute instance-groups managed delete a --zone",
        "gcloud compute ssh a --quiet=perhaps",
        "kubectl apply --file=a",
        "sbatch --gpus-per-nod=8 job.sh",
    ],
)
def test_the_stand_ins_refuse_what_the_programs_would(words):
    program, *arguments = words.split()
    with pytest.raises(Refused, match="ERROR"):
        parse(program, arguments)


def test_the_flags_are_of_named_programs():
    assert {name.split()[0] for name in FLAGS} >= {*PROGRAMS, "srun", "xpk"}
