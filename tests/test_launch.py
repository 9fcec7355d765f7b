"""A pod on this machine: who its processes are told to be, how it ends, and what it passes on."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

POD = Path(__file__).parents[1] / "launch" / "local_pod.sh"


def pod(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([POD, *arguments], capture_output=True, text=True, timeout=60)


def test_each_process_knows_its_place_and_its_lines_are_told_apart():
    said = "echo $JAX_PROCESS_ID $JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS ${XLA_FLAGS##*=}; echo error >&2"
    done = pod("-n", "3", "-d", "2", "--", "bash", "-c", said)
    assert done.returncode == 0
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:3] for line in lines] == [[f"[{index}]", str(index), "3"] for index in range(3)]
    assert len({line[3] for line in lines}) == 1 and all(line[4] == "2" for line in lines)
    assert sorted(done.stderr.splitlines()) == [f"[{index}] error" for index in range(3)]


def test_it_ends_with_the_worst_exit_code_when_all_have_ended():
    done = pod("-n", "3", "--", "bash", "-c", "sleep 0.$JAX_PROCESS_ID; echo done; exit $((JAX_PROCESS_ID * 2 % 3))")
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("wrong", [["-n", "x", "--", "true"], ["-n", "0", "--", "true"], ["-q", "--", "true"], []])
def test_wrong_use_is_told(wrong):
    done = pod(*wrong)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("usage: launch/local_pod.sh")


def test_a_request_to_stop_reaches_all_and_their_answer_counts():
    command = "trap 'kill $!; echo saved; exit 3' TERM; echo there; sleep 60 & wait $!"
    process = subprocess.Popen(
        [POD, "-n", "2", "--", "bash", "-c", command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
        start_new_session=True,
    )
    there = sorted(process.stdout.readline() for _ in range(2))
    assert there == ["[0] there\n", "[1] there\n"]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 3 and sorted(rest.splitlines()) == ["[0] saved", "[1] saved"]


def test_one_that_fails_ends_those_that_wait_for_it():
    done = pod("-n", "3", "--", "bash", "-c", "((JAX_PROCESS_ID == 1)) && exit 5; exec sleep 100")
    assert done.returncode == 5
