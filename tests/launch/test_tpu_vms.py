"""The launchers of TPU VMs: what they ask for, what they do when it fails, and what they leave behind."""

import os
import shlex
import signal
import subprocess

import pytest
from pretending import COMMAND, GROUP, LAUNCH, TPU, told
from standin import parse

VMS = [("queued_resource.sh", TPU, "requests"), ("instance_group.sh", GROUP, "groups")]
both_vms = pytest.mark.parametrize(("script", "options", "kind"), VMS, ids=[script for script, _, _ in VMS])


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
