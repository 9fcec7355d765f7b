"""GKE and Slurm: what is submitted, followed and deleted, and what is queued again."""

import os
import signal
import subprocess

import pytest
from pretending import COMMAND, GKE, LAUNCH, told


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
