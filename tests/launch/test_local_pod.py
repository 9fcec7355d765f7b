"""launch/local_pod.sh starts processes, forwards output and signals, and chooses the exit status."""

import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "local_pod.sh"


def run_pod(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def test_processes_get_their_index_and_output_lines_have_a_prefix():
    command = "echo $JAX_PROCESS_ID $JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS ${XLA_FLAGS##*=}; echo error >&2"
    process = run_pod("-n", "3", "-d", "2", "--", "bash", "-c", command)
    assert process.returncode == 0
    lines = sorted(line.split() for line in process.stdout.splitlines())
    assert [line[:3] for line in lines] == [[f"[{index}]", str(index), "3"] for index in range(3)]
    assert len({line[3] for line in lines}) == 1 and all(line[4] == "2" for line in lines)
    assert sorted(process.stderr.splitlines()) == [f"[{index}] error" for index in range(3)]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((0, 0), 0), ((42, 0), 42), ((43, 42), 43), ((42, 134), 43), ((43, 2), 2), ((0, 1), 1)],
)
def test_pod_exits_with_the_most_severe_process_status(statuses, expected):
    process = run_pod("--", "bash", "-c", f"set -- {statuses[0]} {statuses[1]}; shift $JAX_PROCESS_ID; exit $1")
    assert process.returncode == expected


@pytest.mark.parametrize("arguments", [["-n", "x", "--", "true"], ["-n", "0", "--", "true"], ["-q", "--", "true"], []])
def test_wrong_usage_prints_usage(arguments):
    process = run_pod(*arguments)
    assert process.returncode == 2 and "launch/local_pod.sh -n 4 -d 2" in process.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_all_processes_as_sigterm(number):
    command = "trap 'kill $!; echo saved; exit 42' TERM; echo ready; sleep 60 & wait $!"
    command = [SCRIPT, "-n", "2", "--", "bash", "-c", command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 42 and sorted(output.splitlines()) == ["[0] saved", "[1] saved"]


@pytest.mark.ci
def test_failed_process_ends_processes_that_wait_for_it():
    process = run_pod("-n", "3", "--", "bash", "-c", "((JAX_PROCESS_ID == 1)) && exit 5; exec sleep 100")
    assert process.returncode == 5
