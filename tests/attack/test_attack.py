"""A short attack on the program, of each kind a little, and whether the attack finds what is planted for it."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import damage
import kills
import pytest
import sandbox as sandboxes
from invocations import Invocation, invocations
from oracle import Outcome, faults_of
from run import Case, tried
from sandbox import Sandbox
from zygote import Started, output_files

SEED = 0
INVOCATIONS, DAMAGES = 22, 11
# Pieces of the sandbox that are runs of their own.
COSTLY = ("glue2", "ner", "squad", "swag", "text", "swept", "predictions", "reproduced", "converted")
# What is damaged where runs have to be made first, or to go on to notice it.
TRAINED, MADE_BY_RUNS = ("checkpoint of a run that goes on", "numbers of a run"), ("results that are kept",)
KILLED = ("train", "prepare", "convert to huggingface", "predict")


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox()
    yield made
    made.close()


def attack(sandbox: Sandbox, cases: Sequence[Case]) -> None:
    """Tries cases, as many at a time as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        findings = list(pool.map(lambda case: tried(case, sandbox, sandbox.zygote), cases))
    faults = [
        f"{case.name} ({found.row}): {'; '.join(found.faults)} | {found.detail} | bertjax {' '.join(found.command)}"[
            :2000
        ]
        for case, found in zip(cases, findings, strict=True)
        if found.faults
    ]
    assert not faults, "\n".join(faults)


def by_turns(cases: Sequence[Case], count: int) -> list[Case]:
    """The first of each row, then the second of each."""
    seen: dict[str, int] = {}
    turn = {}
    for case in cases:
        seen[case.row] = turn[case.name] = seen.get(case.row, 0) + 1
    return sorted(cases, key=lambda case: turn[case.name])[:count]


def test_wrong_invocations_end_with_one_line(sandbox):
    cases = [case for case in invocations(SEED) if not case.endless]
    assert len(cases) >= 300
    cheap_first = sorted(cases, key=lambda case: sum(f"{{{name}}}" in " ".join(case.argv) for name in COSTLY))
    chosen = by_turns(cheap_first, INVOCATIONS)
    assert {case.row for case in chosen} == {case.row for case in cases}
    attack(sandbox, chosen)


@pytest.mark.parametrize("count", [DAMAGES, pytest.param(len(damage.TARGETS), marks=pytest.mark.slow)])
def test_damaged_files_are_noticed_or_make_no_difference(sandbox, count):
    cases = damage.damages(1000, SEED, damage.References())
    # Training has a turn where nothing else reads what is damaged.
    if count == DAMAGES:
        cases = [case for case in cases if case.reader[0] != "train" and case.row not in MADE_BY_RUNS]
    quick = [case for case in cases if case.reader[0] != "train" or case.row in TRAINED]
    chosen = by_turns(quick, count)
    assert len({case.row for case in chosen}) == count
    attack(sandbox, chosen)


def test_killed_commands_lose_nothing_and_leave_nothing(sandbox):
    attack(sandbox, kills.kills(len(KILLED), SEED, kills.References(), KILLED, most=1))


class Scripted:
    """In place of the program: a script, which gets the arguments."""

    deaf_seconds = 0.0

    def __init__(self, script: str) -> None:
        self.script = script

    def start(self, argv, folder, env):
        out, err = output_files(folder)
        command = [sys.executable, "-S", "-c", self.script, *argv]
        # Until the script has handlers of its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, kills.SIGNALS[1:])
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=stdout, stderr=stderr, start_new_session=True
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Started(process)


SAYS = "import sys, os, time; sys.stderr.write({text!r}); sys.exit({code})"


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (SAYS.format(text="bertjax: no\n", code=2), None),
        (SAYS.format(text="step 1\nbertjax: no\n", code=1), None),
        ("raise ValueError('no')", "traceback"),
        ("import time; time.sleep(60)", "hang"),
        (SAYS.format(text="", code=2), "lost line"),
        (SAYS.format(text="bertjax: no\nbertjax: no\n", code=2), "lost line"),
        (SAYS.format(text="bertjax: no\nsomething else\n", code=2), "lost line"),
        (SAYS.format(text="bertjax: no\n", code=3), "exit 3"),
        (SAYS.format(text="stopped\n", code=42), "exit 42"),
        (SAYS.format(text="bertjax: it (unexpected; run again)\n", code=1), "unexpected"),
        (SAYS.format(text="bertjax: " + 3000 * "x" + "\n", code=1), "long line"),
        (SAYS.format(text="bertjax: \x1b[31m\n", code=1), "control characters"),
        (SAYS.format(text="WARNING:absl: something\nbertjax: no\n", code=1), "noise"),
        ("open('out', 'w'); " + SAYS.format(text="bertjax: no\n", code=2), "left behind"),
        ("open('locked', 'w').write('x'); " + SAYS.format(text="", code=0), "planted file changed"),
        ("import os; open(os.environ['TMPDIR'] + '/x', 'w')", "temporary file left"),
    ],
)
def test_what_goes_against_the_promise_of_one_line_is_found(monkeypatch, script, fault):
    monkeypatch.setattr(sandboxes, "LIMIT_SECONDS", 0.5 if fault == "hang" else 20.0)
    sandbox = Sandbox()
    try:
        finding = Invocation("planted", "planted", ("planted",)).run(sandbox, Scripted(script))
    finally:
        sandbox.close()
    assert finding.faults[:1] == ((fault,) if fault else ())


def test_a_run_that_stops_has_to_say_how_it_goes_on():
    said = "stopped; the same command goes on from here\n"
    assert faults_of(Outcome(("train",), 42, "", said, 0.1), (42,)) == []
    assert faults_of(Outcome(("train",), 42, "", "stopped\n", 0.1), (42,)) == ["lost line"]


def test_a_wrong_use_that_is_taken_is_found():
    assert faults_of(Outcome(("describe",), 0, "", "", 0.1), (2,)) == ["exit 0"]


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("print('answer')", "same"),
        ("print('another answer')", "silent"),
        ("import sys; print('another answer'); print('1.jsonl is damaged', file=sys.stderr)", "told"),
        ("open('out', 'w').write('answer'); print('answer')", "silent"),
    ],
)
def test_another_answer_from_damaged_files_is_found(monkeypatch, script, outcome):
    monkeypatch.setitem(sandboxes.PIECES, "planted", lambda _, folder: (folder / "1.jsonl").write_text("{}\n"))
    monkeypatch.setitem(damage.TARGETS, "planted", damage.Target("planted", ("*",), (("planted",),)))
    references = damage.References()
    monkeypatch.setattr(references, "of", lambda *_: ("answer\n", {}))
    sandbox = Sandbox()
    try:
        finding = damage.Damage("planted", "planted", "a flipped bit", ("planted",), "0", references).run(
            sandbox, Scripted(script)
        )
    finally:
        sandbox.close()
    assert (finding.outcome, bool(finding.faults)) == (outcome, outcome == "silent")


# Writes a file under a temporary name, and renames it. What is left of the script is what differs between tests.
STEADY = """
import os, signal, sys, time
def stop(*_):
    sys.stderr.write('bertjax: interrupted\\n')
    sys.exit(130)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    file = open('.out.partial', 'w')
    file.write('wh')
    file.flush()
    time.sleep(0.2)
    file.write('ole')
    file.close()
    os.rename(file.name, 'out')
finally:
    if os.path.exists('.out.partial'):
        os.unlink('.out.partial')
# As the program, which does not leave its end to the interpreter.
os._exit(0)
"""


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (STEADY, ""),
        (STEADY.replace("'w'", "'a'"), "silent"),
        (STEADY.replace("os.unlink('.out.partial')", "pass"), "left beside"),
        (STEADY.replace("130", "5"), "exit 5"),
        (STEADY.replace("sys.exit(130)", "raise ValueError"), "traceback"),
        ("import os; os.fork() or os.closerange(0, 3) or __import__('time').sleep(60)\n" + STEADY, "processes left"),
    ],
)
def test_what_a_kill_loses_or_leaves_is_found(monkeypatch, script, fault):
    monkeypatch.setitem(kills.SCENES, "planted", kills.Scene(("planted",)))
    monkeypatch.setattr(kills, "_WAIT_FOR_GROUP_SECONDS", 0.1)
    references = kills.References()
    whole = {"out": "5d5766cf2d787016"}
    monkeypatch.setattr(references, "of", lambda *_: (whole, 0.2))
    sandbox = Sandbox()
    cases = [kills.Kills(f"planted-{seed}", "planted", str(seed), 3, references) for seed in range(12)]
    try:
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            found = list(pool.map(lambda case: case.run(sandbox, Scripted(script)), cases))
    finally:
        sandbox.close()
    faults = [text for finding in found for text in finding.faults]
    assert any(text.startswith(fault) for text in faults) if fault else not faults, [
        finding for finding in found if finding.faults
    ]


def test_a_forked_child_gets_signals_and_exit_codes_as_the_program_does(sandbox):
    case = sandbox.case("signals")
    command = [sandbox.filled(item) for item in ("bench", "input", *sandboxes.config("pretrain"), "--seconds=600")]
    running, _ = sandbox.start(sandbox.zygote, case, command)
    assert running.wait(0.1) is None
    running.send(signal.SIGKILL)
    assert running.wait(20) == -signal.SIGKILL
    assert (
        sandbox.execute(sandbox.zygote, case, ["--version"]).out
        == sandbox.execute(sandbox.program, case, ["--version"]).out
    )
    assert sandbox.execute(sandbox.zygote, case, ["nosuch"]).code == 2
