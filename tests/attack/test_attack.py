"""A short attack on all commands, and faults that the attack must detect."""

import hashlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import damage
import kills
import pytest
import sandbox as sandboxes
from invocations import invocations, invoke

# Placeholders for outputs of slow commands, in full or as a prefix: `{glue` matches `{glue}` and `{glue2}`. The test
# skips invocations that contain one of them.
SLOW = ("{glue", "{swept}", "{predictions}", "{reproduced}", "{huggingface}")
ROWS = ("checkpoint", "gz", "glue data", "squad data", "prepare")


@pytest.mark.ci
def test_short_attack_finds_no_faults():
    cases = [case for case in invocations(0) if not any(piece in str(case.attack.keywords) for piece in SLOW)]
    # The dictionary below keeps only the last case of each row and kind of attack. Sort by descending number of killed
    # processes, so that it keeps the case with the fewest.
    kill_cases = sorted(kills.kills(100, 0), key=lambda case: -case.attack.keywords["most"])
    cases += [case for case in (*damage.damages(300, 0), *kill_cases) if case.row in ROWS]
    names = [case.name for case in {(case.row, case.attack.func): case for case in cases}.values()]
    # Share the compilation cache of all tests. Kills cannot damage it, because `prepare`, the only command in `ROWS`
    # that is killed, compiles nothing.
    compiled = f"--compiled={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    command = [sys.executable, Path(__file__).with_name("run.py"), compiled, "--only", *names]
    result = subprocess.run(command, text=True, capture_output=True)
    assert f"\n{len(names)} cases, 0 with faults" in result.stdout, result.stdout + result.stderr


@pytest.fixture
def sandbox_of(tmp_path, monkeypatch):
    # `sandbox_of(script)` returns a sandbox that runs the Python script instead of every bertjax command.
    def start(script, argv, cwd, env, out, err):
        # The script unblocks the signals when it has installed its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, sandboxes.HANDLED_SIGNALS)
        command = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{script}"]
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, process_group=0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, sandboxes.HANDLED_SIGNALS)
        return process.pid, process.poll

    sandbox = sandboxes.Sandbox(tmp_path)
    sandbox.piece("files")
    return lambda script: monkeypatch.setattr(sandboxes, "start_fork", partial(start, script)) or sandbox


@pytest.mark.parametrize(
    ("script", "faults"),
    [
        ("sys.exit(print('bertjax: no', file=sys.stderr) or 3)", "exit 3"),
        ("sys.exit(2)", "not one line"),
        ("print('bertjax: a\\nbertjax: b', file=sys.stderr); sys.exit(1)", "not one line"),
        ("print('bertjax: a\\nmore', file=sys.stderr); sys.exit(1)", "not one line"),
        ("print('step 1\\nbertjax: a', file=sys.stderr); sys.exit(1)", ""),
        ("print('\\033[31m')", "control characters"),
        ("print('run the same command to resume', file=sys.stderr); sys.exit(42)", "exit 42"),
        ("sys.exit(42)", "exit 42, not one line"),
        ("raise ValueError", "traceback, not one line"),
        ("time.sleep(60)", "hang"),
        ("open('x', 'w'); print('bertjax: a', file=sys.stderr); sys.exit(2)", "left x"),
        ("open('junk.bin', 'w')", "changed a file"),
        ("open(os.environ['TMPDIR'] + '/x', 'w')", "left x"),
        ("open('../../../pieces/files/text.txt', 'w')", "changed files/text.txt"),
    ],
)
def test_attack_detects_each_kind_of_fault_of_a_command(sandbox_of, monkeypatch, script, faults):
    monkeypatch.setattr(sandboxes, "LIMIT_SECONDS", 1.0 if faults == "hang" else 20.0)
    case = sandboxes.Case("case", "row", partial(invoke, argv=("describe",), codes=(0, 1, 2)))
    assert ", ".join(case.run(sandbox_of(script)).faults) == faults


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("print('answer')", "exit 0"),
        ("print('other')", "silent"),
        ("print('other: vocab.txt is damaged')", "reported"),
        ("print('answer'); open('out', 'w').write('x')", "silent"),
    ],
)
def test_silent_wrong_answer_from_a_damaged_file_is_a_fault(sandbox_of, monkeypatch, script, result):
    monkeypatch.setattr(damage, "undamaged_answer", lambda *_: {"stdout": "answer\n"})
    sandbox = sandbox_of(script)
    report = damage.damage(sandbox, sandbox.case("case"), "vocabulary", "zeros", "vocab", "0")
    assert (report.result, bool(report.faults)) == (result, result == "silent")


# Script that writes a temporary file and renames it. On SIGTERM or SIGINT, it removes the file.
SCRIPT = """
def stop(*_):
    os.path.exists('out-tmp') and os.unlink('out-tmp')
    os._exit(print('bertjax: interrupted', file=sys.stderr, flush=True) or 130)
signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGINT, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
with open('out-tmp', 'w') as file:
    print('first', file=file, flush=True)
    time.sleep(0.3)
    print('second', file=file)
os.rename('out-tmp', 'out')
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [("None", "None", ""), ("'w'", "'a'", "lost"), ("os.unlink", "len", "left out-tmp"), ("130", "5", "exit 5")],
)
def test_attack_detects_faults_of_a_killed_command(sandbox_of, monkeypatch, old, new, fault):
    expected = {"out": hashlib.sha256(b"first\nsecond\n").hexdigest()}
    monkeypatch.setattr(kills, "undisturbed", lambda *_: (expected, 0.3))
    monkeypatch.setitem(kills.SCENES, "planted", ())
    sandbox = sandbox_of(SCRIPT.replace(old, new))
    reports = [kills.kill(sandbox, sandbox.case("case"), "planted", 3, str(seed)) for seed in range(5)]
    faults = [text for report in reports for text in report.faults]
    assert any(text.startswith(fault) for text in faults) if fault else not faults, reports
