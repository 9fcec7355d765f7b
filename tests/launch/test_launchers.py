"""The launchers against stand-ins: what they ask for, what they do when it fails, and what they leave behind."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from standin import FLAGS, Refused, parse

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
HERE = Path(__file__).parent
PROGRAMS = ("gcloud", "kubectl", "sbatch", "squeue", "scancel", "scontrol")

TPU = "--zone us-west4-a --type v5litepod-16 --runtime v2-alpha-tpuv5-lite --image us-docker.pkg.dev/p/bertjax/tpu"
GROUP = "--project p --zone us-east5-a --machine-type ct6e-standard-4t --topology 4x4 --image us-docker.pkg.dev/p/b/tpu"
GKE = "--accelerator tpu-v5-lite-podslice --topology 4x4 --image us-docker.pkg.dev/p/bertjax/tpu"
COMMAND = "bertjax train --distributed --config pretrain:size=base,corpus=gs://b/corpus --workdir gs://b/runs/base"
VMS = [("queued_resource.sh", TPU, "requests"), ("instance_group.sh", GROUP, "groups")]
both_vms = pytest.mark.parametrize(("script", "options", "kind"), VMS, ids=[script for script, _, _ in VMS])


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


@pytest.fixture
def pretended(tmp_path) -> Pretended:
    return Pretended(tmp_path)


def told(done: subprocess.CompletedProcess, what: str, paid: bool) -> None:
    """Holds an ending: its message, and whether it says what is left and how to delete it."""
    assert what in done.stderr, done.stderr
    assert ("is paid for until it is deleted" in done.stderr) == paid, done.stderr
    assert "Traceback" not in done.stderr and "unbound variable" not in done.stderr


# What is common.


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
        ("queued_resource.sh create bert --zone us-west4-a --image i -- true", "needs --type and --runtime"),
        ("instance_group.sh create bert --zone us-east5-a -- true", "needs --project and --zone"),
        (f"instance_group.sh create bert {GROUP} --topology 4by4 -- true", "needs --topology"),
        (f"instance_group.sh create bert {GROUP} --topology 3x3 -- true", "3x3 is 9 chips, which hosts of 4"),
        (f"instance_group.sh create bert {GROUP} --machine-type n2-standard -- true", "needs --machine-type"),
        (f"gke.sh create Bert {GKE} -- true", "needs a NAME"),
        (f"gke.sh create bert {GKE} --chips 3 -- true", "4x4 is 16 chips, which hosts of 3"),
        (f"gke.sh create bert {GKE} --slices x -- true", "x is not a number"),
        ("gke.sh create bert -- true", "needs --accelerator"),
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


# TPU VMs.


@both_vms
def test_create_asks_waits_and_says_what_it_costs(pretended, script, options, kind):
    pretended.fail(
        states=[["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"] if kind == "requests" else ["PENDING", "RUNNING"]]
    )
    done = pretended.run(f"{script} create bert {options} --spot -- {COMMAND}")
    assert done.returncode == 0, done.stderr
    told(done, "set themselves up", paid=True)
    cloud = pretended.cloud()
    startup = (cloud["requests"] if kind == "requests" else cloud["templates"])["bert"]["startup"]
    assert f"bertjax_command=({COMMAND.replace(',', chr(92) + ',')})" in startup
    assert "systemctl restart bertjax" in startup


@both_vms
def test_quota_that_is_refused_is_said_and_nothing_is_left(pretended, script, options, kind):
    pretended.fail(quota=True, states=[["NONE"]], error="QUOTA_EXCEEDED: Quota 'TPU_V6E' exceeded.")
    done = pretended.run(f"{script} create bert {options} -- {COMMAND}")
    assert done.returncode == 1
    if kind == "requests":
        told(done, "the request for bert was refused", paid=False)
        assert "Quota limit" in done.stderr and not pretended.cloud().get("requests")
    else:
        # A group is created whatever the quota; its VMs are not.
        told(done, "the quota does not allow bert", paid=True)


def test_a_group_that_is_refused_leaves_nothing_paid(pretended):
    pretended.fail(refused=True)
    done = pretended.run(f"instance_group.sh create bert {GROUP} -- {COMMAND}")
    assert done.returncode == 1
    told(done, "the group bert was refused", paid=False)
    # The second time the template of the first is in the way, and the way out is said.
    done = pretended.run(f"instance_group.sh create bert {GROUP} -- {COMMAND}")
    assert done.returncode == 1
    told(done, "instance_group.sh delete bert", paid=False)


@both_vms
def test_keep_creates_anew_what_is_lost_until_the_command_has_ended(pretended, script, options, kind):
    if kind == "requests":
        states = [["ACTIVE", "ACTIVE", "SUSPENDED"], ["PROVISIONING", "FAILED"], ["PROVISIONING", "ACTIVE"]]
        running = 1
    else:
        # The third look finds a VM that was stopped, and of the second group none. Each look asks four VMs.
        states = [["RUNNING", "RUNNING", "TERMINATED"], ["RUNNING", "RUNNING", "NONE"], ["STAGING", "RUNNING"]]
        running = 8
    pretended.fail(states=states, job=["running"] * running + ["ended 0"] * 4)
    done = pretended.run(f"{script} keep bert {options} --delete -- {COMMAND}")
    assert done.returncode == 0, done.stderr
    told(done, "the command is finished", paid=False)
    for verb in ("create", "delete"):
        calls = [call for call in pretended.calls(verb, "bert") if call[3] in ("queued-resources", "managed")]
        assert len(calls) == 3
    assert not any(pretended.cloud().get(kind) for kind in ("requests", "groups", "templates", "policies"))


@both_vms
def test_keep_ends_on_a_failure_that_would_come_again(pretended, script, options, kind):
    status = 1 if kind == "requests" else 2
    pretended.fail(job=["running", f"ended {status}", "running"])
    done = pretended.run(f"{script} keep bert {options} -- {COMMAND}")
    assert done.returncode == 1
    told(done, f"the command ended with {status} on bert; see: launch/{script} log bert", paid=True)
    assert pretended.cloud()[kind]


def test_keep_gives_up_what_is_never_allocated(pretended):
    pretended.fail(states=[["FAILED"]] * 5, why="There is no more capacity in the zone")
    done = pretended.run(f"queued_resource.sh keep bert {TPU} -- {COMMAND}")
    assert done.returncode == 1
    told(done, "bert failed 3 times without having run", paid=False)
    assert "why: There is no more capacity" in done.stderr and not pretended.cloud()["requests"]


def test_keep_sees_a_preemption_that_only_the_node_tells(pretended):
    pretended.fail(ssh_broken=[["all"], []], node_state=["PREEMPTED"], job="ended 0")
    done = pretended.run(f"queued_resource.sh keep bert {TPU} --delete -- {COMMAND}")
    assert done.returncode == 0, done.stderr
    told(done, "bert is PREEMPTED", paid=False)
    assert len(pretended.calls("queued-resources", "create")) == 2


@both_vms
def test_one_worker_that_was_never_reached_is_named_and_nothing_is_deleted(pretended, script, options, kind):
    pretended.fail(ssh_broken="bert/2" if kind == "requests" else "bert-2")
    done = pretended.run(f"{script} keep bert {options} -- {COMMAND}")
    assert done.returncode == 1
    told(done, "bert worker 2" if kind == "requests" else "in a row, to bert-2", paid=True)
    assert "worker 1" not in done.stderr and "bert-1" not in done.stderr and not pretended.calls("delete")


@both_vms
def test_a_new_command_is_tried_again_and_then_names_who_does_not_have_it(pretended, script, options, kind):
    pretended.run(f"{script} create bert {options} -- true")
    where = "--zone us-west4-a" if kind == "requests" else "--project p --zone us-east5-a"
    line = f"{script} run bert {where} --image us-docker.pkg.dev/p/b/tpu -- {COMMAND}"
    pretended.fail(ssh_broken=[["all"]])
    done = pretended.run(line)
    assert done.returncode == 0 and "once more" in done.stderr, done.stderr
    command = next(word for word in pretended.calls("ssh")[-1] if word.startswith("--command="))
    assert "bertjax_replace=yes" in command
    pretended.fail(ssh_broken="bert/3" if kind == "requests" else "bert-3")
    done = pretended.run(line)
    assert done.returncode == 1
    told(done, "the command did not reach bert worker 3" if kind == "requests" else "did not reach bert-3;", paid=True)


@both_vms
def test_a_deletion_that_is_stuck_is_said(pretended, script, options, kind):
    pretended.run(f"{script} create bert {options} -- true")
    pretended.fail(stuck=True)
    where = "--zone us-west4-a" if kind == "requests" else "--project p --zone us-east5-a"
    done = pretended.run(f"{script} delete bert {where}")
    assert done.returncode == 1
    told(done, "it is stuck", paid=True)
    pretended.fail()
    done = pretended.run(f"{script} delete bert {where}")
    assert done.returncode == 0
    told(done, "bert is deleted", paid=False)


@both_vms
def test_a_network_that_fails_a_while_is_borne_and_one_that_stays_away_is_not(pretended, script, options, kind):
    pretended.fail(network=[None] * (1 if kind == "requests" else 3) + [True])
    done = pretended.run(f"{script} create bert {options} -- true")
    assert done.returncode == 0 and "auth tokens" in done.stderr, done.stderr
    pretended.fail(network=True)
    where = "--zone us-west4-a" if kind == "requests" else "--project p --zone us-east5-a"
    done = pretended.run(f"{script} delete bert {where}")
    assert done.returncode == 1
    told(done, "no answer, 2 times in a row", paid=True)


@both_vms
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_says_what_is_left(pretended, script, options, kind, number):
    pretended.fail(states=[["WAITING_FOR_RESOURCES" if kind == "requests" else "PENDING"]])
    process = subprocess.Popen(
        [LAUNCH / script, "create", "bert", *options.split(), "--", "true"],
        stderr=subprocess.PIPE,
        text=True,
        env={**pretended.environment, "LAUNCH_POLL_SECONDS": "60"},
        start_new_session=True,
    )
    while "is WAITING" not in process.stderr.readline():
        pass
    os.killpg(process.pid, number)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    deletion = next(line for line in rest.splitlines() if line.startswith("  gcloud "))
    program, *arguments = shlex.split(deletion)
    parse(program, arguments)
    assert "bert" in arguments and "delete" in arguments


def test_several_slices_are_one_request(pretended):
    done = pretended.run(f"queued_resource.sh create bert {TPU} --slices 4 --reserved -- true")
    assert done.returncode == 0, done.stderr
    (call,) = pretended.calls("create")
    assert {"--node-count=4", "--node-prefix=bert", "--reserved"} <= {*call}
    assert not [word for word in call if word.startswith("--node-id")]


def test_one_host_is_no_slice(pretended):
    done = pretended.run(f"instance_group.sh create bert {GROUP} --topology 2x2 -- true")
    assert done.returncode == 0, done.stderr
    assert not pretended.calls("workload-policy")
    assert "--size=1" in pretended.calls("managed", "create")[0]


def vm(pretended: Pretended, line: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs what a VM runs at boot, on stand-ins for what it changes."""
    for program in ("docker", "systemctl", "apt-get"):
        reads = '[ "$1" != login ] || cat > /dev/null'
        pretended.program(program, f'{reads}; echo {program} "$@" >> "$STANDIN/vm"')
    pretended.program("curl", 'echo \'{"access_token": "secret"}\'')
    (pretended.folder / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (pretended.folder / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    (pretended.folder / "run").mkdir(exist_ok=True)
    done = run_on_vm(pretended, line, **environment)
    assert done.returncode == 0, done.stderr
    return done


def run_on_vm(pretended: Pretended, line: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", (LAUNCH / "vm_startup.sh").read_text().replace("set -euo", f"{line}\nset -euo", 1)],
        capture_output=True,
        text=True,
        env={**pretended.environment, "BERTJAX_ROOT": str(pretended.folder), **environment},
    )


def test_a_vm_keeps_the_command_alive_but_for_what_would_fail_again(pretended):
    image = "us-docker.pkg.dev/p/bertjax/tpu"
    vm(pretended, f"bertjax_image={image} bertjax_command=(bertjax train --config 'a:b=1,c=$HOME d')")
    did = (pretended.folder / "vm").read_text()
    assert "docker login --username oauth2accesstoken --password-stdin https://us-docker.pkg.dev" in did
    assert f"docker pull --quiet {image}" in did and did.endswith("systemctl restart bertjax\n")
    unit = (pretended.folder / "etc/systemd/system/bertjax.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert settings["Restart"] == "on-failure" and settings["RestartPreventExitStatus"] == "1 2"
    assert int(settings["TimeoutStopSec"]) > 180 and "stop -t 180 bertjax" in settings["ExecStop"]
    # A container that is gone when the command has ended is no failure of the unit.
    assert settings["ExecStop"].startswith("-") and settings["StartLimitIntervalSec"] == "0"
    (pretended.folder / "vm").unlink()
    subprocess.run([pretended.folder / "usr/local/bin/bertjax-run"], env=pretended.environment, check=True)
    ran = (pretended.folder / "vm").read_text()
    assert ran.startswith("docker run --rm --name bertjax --privileged --network host")
    assert "--env BERTJAX_STAGING=/scratch" in ran and ran.endswith(f"{image} bertjax train --config a:b=1,c=$HOME d\n")


def test_a_boot_starts_what_was_there_and_a_new_command_replaces_it(pretended):
    vm(pretended, "bertjax_image=i bertjax_command=(first)")
    vm(pretended, "bertjax_image=i bertjax_command=(second)")
    run = pretended.folder / "usr/local/bin/bertjax-run"
    assert "first" in run.read_text()
    vm(pretended, "bertjax_image=i bertjax_command=(second) bertjax_replace=yes")
    assert "second" in run.read_text()


@pytest.mark.parametrize(
    ("started", "active", "status", "says"),
    [
        ("''", "inactive", "0", "setting up"),
        ("0", "inactive", "0", "setting up"),
        ("5", "active", "0", "running"),
        ("5", "activating", "43", "running"),
        ("5", "inactive", "0", "ended 0"),
        ("5", "failed", "1", "ended 1"),
    ],
)
def test_a_vm_says_how_the_command_is(pretended, started, active, status, says):
    vm(pretended, "bertjax_image=i bertjax_command=(true)")
    pretended.program(
        "systemctl",
        f'case "$*" in is-active*) echo {active} ;; *Timestamp*) echo {started} ;; *) echo {status} ;; esac',
    )
    state = pretended.folder / "usr/local/bin/bertjax-state"
    done = subprocess.run([state], capture_output=True, text=True, env=pretended.environment, check=True)
    assert done.stdout == f"bertjax: {says}\n"


def test_a_set_up_that_fails_is_said_and_ends_keep(pretended):
    vm(pretended, "bertjax_image=i bertjax_command=(true)")
    pretended.program("docker", '[ "$1" != pull ]')
    line = "bertjax_image=i bertjax_command=(true) bertjax_replace=yes"
    done = run_on_vm(pretended, line, BERTJAX_PULL_SECONDS="0")
    assert done.returncode == 1 and done.stderr.count("cannot pull i") == 5
    state = pretended.folder / "usr/local/bin/bertjax-state"
    said = subprocess.run([state], capture_output=True, text=True, env=pretended.environment, check=True).stdout
    assert said == "bertjax: set-up failed\n"
    pretended.fail(job=said.removeprefix("bertjax: ").strip())
    done = pretended.run(f"queued_resource.sh keep bert {TPU} -- true")
    assert done.returncode == 1
    told(done, "the command ended with a failed set-up on bert", paid=True)


# GKE.


def test_gke_applies_follows_and_deletes(pretended):
    done = pretended.run(f"gke.sh create bert {GKE} --slices 2 -- {COMMAND}")
    assert done.returncode == 0, done.stderr
    assert "bert: 2 slices of 4 hosts" in done.stderr and "replicas: 2" in pretended.cloud()["applied"]
    pretended.fail(no_pods=[True], terminal=["", "", "Completed"])
    done = pretended.run("gke.sh log bert --slice 1")
    assert done.returncode == 0 and done.stdout == "step 1\n" and "no log yet" in done.stderr, done.stderr
    first, second = pretended.calls("logs")
    assert any("jobset.sigs.k8s.io/job-index=1" in word for word in first) and "--tail=-1" in first
    assert any(word.startswith("--since-time=") for word in second)
    done = pretended.run("gke.sh delete bert")
    assert done.returncode == 0 and "node pools are paid for" in done.stderr


def test_gke_tells_of_a_job_that_failed_and_of_one_that_is_not_there(pretended):
    done = pretended.run("gke.sh log bert")
    assert done.returncode == 1 and "there is no JobSet bert" in done.stderr
    pretended.run(f"gke.sh create bert {GKE} -- true")
    pretended.fail(terminal="Failed")
    done = pretended.run("gke.sh log bert")
    assert done.returncode == 1 and "the JobSet bert is Failed" in done.stderr


def test_gke_says_what_is_left_when_a_change_or_a_deletion_is_refused(pretended):
    pretended.fail(refused=True)
    done = pretended.run(f"gke.sh create bert {GKE} -- true")
    assert done.returncode == 1
    told(done, "the JobSet bert was refused", paid=False)
    pretended.fail()
    pretended.run(f"gke.sh create bert {GKE} -- true")
    pretended.fail(refused=True)
    done = pretended.run(f"gke.sh create bert {GKE} --slices 2 -- true")
    assert done.returncode == 1
    told(done, "deleted and created anew", paid=True)
    pretended.fail(stuck=True)
    done = pretended.run("gke.sh delete bert")
    assert done.returncode == 1
    told(done, "bert is not gone", paid=True)


# Slurm.


def test_slurm_gets_one_process_a_gpu(pretended):
    done = pretended.run(f"slurm.sh create bert --nodes 4 --gpus 8 --time 24:00:00 --partition a -- {COMMAND}")
    assert done.returncode == 0, done.stderr
    (call,) = pretended.calls("sbatch")
    assert {"--nodes=4", "--ntasks-per-node=8", "--gres=gpu:8", "--requeue", "--time=24:00:00", "--partition=a"} <= {
        *call
    }
    assert "--open-mode=append" in call and "--signal=TERM@180" in call
    assert not [word for word in call if word.startswith("--gpus")] and call[-7:] == COMMAND.split()


def test_slurm_that_refuses_leaves_nothing(pretended):
    pretended.fail(refused=True)
    done = pretended.run("slurm.sh create bert --nodes 4 --gpus 8 -- true")
    assert done.returncode == 1 and "Invalid account" in done.stderr and "nothing is queued" in done.stderr


# As srun: runs all processes, and ends with the highest exit status.
SRUN = """
trap : TERM
while [ "${1#--}" != "$1" ]; do shift; done
worst=0
for SLURM_PROCID in 0 1 2; do export SLURM_PROCID; "$@" || { code=$?; [ $code -le $worst ] || worst=$code; }; done
exit $worst
"""


@pytest.mark.parametrize(
    ("statuses", "restarts", "ends", "again"),
    [
        ((0, 0, 0), 0, 0, False),
        ((42, 42, 42), 99, 42, True),
        ((43, 137, 43), 0, 137, True),
        ((43, 43, 43), 20, 43, False),
        ((43, 1, 43), 0, 1, False),
        ((2, 2, 2), 0, 2, False),
        ((1, 139, 43), 0, 1, False),
        ((130, 130, 130), 0, 130, False),
        ((3, 3, 3), 0, 3, False),
    ],
)
def test_slurm_queues_again_what_can_go_on(pretended, statuses, restarts, ends, again):
    pretended.program("srun", SRUN)
    command = f"set -- {' '.join(map(str, statuses))}; shift $SLURM_PROCID; exit $1"
    done = subprocess.run(
        [LAUNCH / "slurm" / "job.sh", "bash", "-c", command],
        capture_output=True,
        text=True,
        env={**pretended.environment, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)},
    )
    assert done.returncode == ends, done.stderr
    assert (pretended.calls("scontrol", "requeue", "7") != []) == again


@pytest.mark.parametrize(("state", "again"), [("RUNNING", True), ("COMPLETING", False), ("CANCELLED", False)])
def test_slurm_leaves_a_job_cancelled(pretended, state, again):
    pretended.program("srun", SRUN)
    pretended.fail(job_state=state)
    done = subprocess.run(
        [LAUNCH / "slurm" / "job.sh", "bash", "-c", "exit 42"],
        capture_output=True,
        text=True,
        env={**pretended.environment, "SLURM_JOB_ID": "7"},
    )
    assert done.returncode == 42 and (state in done.stdout) != again
    assert (pretended.calls("scontrol") != []) == again


def test_slurm_waits_for_a_save(pretended):
    """SIGTERM reaches every process of a job, the shells around the command included."""
    pretended.program("srun", SRUN.replace("0 1 2", "0"))
    process = subprocess.Popen(
        [LAUNCH / "slurm" / "job.sh", "bash", "-c", "trap 'echo saved; exit 42' TERM; echo there; sleep 30 & wait $!"],
        stdout=subprocess.PIPE,
        text=True,
        env={**pretended.environment, "SLURM_JOB_ID": "7"},
        start_new_session=True,
    )
    assert process.stdout.readline() == "there\n"
    os.killpg(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 42 and rest.startswith("saved\n") and pretended.calls("scontrol", "requeue", "7")


# What documents print.


def test_the_flags_are_of_named_programs():
    assert {name.split()[0] for name in FLAGS} >= {*PROGRAMS, "srun", "xpk"}
