"""How a process ends: asked to, by a failure, or in a crash; and what of libraries is seen then."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NOISE = """
import ctypes, logging, threading, warnings
os.write(2, b"noise of C++\\n")
logging.getLogger("absl").error("noise of a log")
warnings.warn("noise of a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Noisy:
    def __del__(self):
        raise RuntimeError("noise of a finaliser")
Noisy()
sys.excepthook(ValueError, ValueError("noise of a callback"), None)
"""
# As JAX says it before it aborts the process, here as there in a thread without the interpreter.
GONE = """
import ctypes
os.write(2, b"F1121 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
    b"See the other logs. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\\n"
    b"1\\n2\\nThe tasks have crashed.\\n\\nRPC: x\\n")
threading = __import__("threading")
thread = threading.Thread(target=ctypes.CDLL(None).abort)
thread.start()
thread.join()
"""


def start(body: str, folder: Path, debug: bool = False) -> subprocess.Popen:
    """A process that runs `body` as a command."""
    (folder / "command.py").write_text(
        "import os, sys, time\nfrom bertjax import process, temporary\n"
        f"def command():\n    exec(compile({body!r}, 'command', 'exec'), globals())\nprocess.run(command, {debug})\n"
    )
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "GLIBC_TUNABLES": ""}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, folder / "command.py"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str, folder: Path, debug: bool = False) -> tuple[int, str]:
    """Exit code and standard error."""
    process = start(body, folder, debug)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def wait_for_handlers(process: subprocess.Popen) -> None:
    """Until signals are blocked or handled; before, it is Python that starts."""
    while process.poll() is None:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        if (int(status["SigBlk"], 16) | int(status["SigCgt"], 16)) >> (signal.SIGHUP - 1) & 1:
            return
        time.sleep(0.001)


def test_noise_of_libraries_is_held_back_and_shown_with_debug(tmp_path):
    assert run(NOISE, tmp_path) == (0, "")
    failing = NOISE + "print('bertjax: our line', file=sys.stderr)\nsys.exit(2)"
    assert run(failing, tmp_path) == (2, "bertjax: our line\n")
    code, error = run(NOISE, tmp_path, debug=True)
    assert code == 0
    for kind in ("C++", "a log", "a warning", "a finaliser", "a callback"):
        assert f"noise of {kind}" in error
    assert "ZeroDivisionError" in error


def test_the_text_that_a_module_ends_the_program_with_is_shown(tmp_path):
    assert run("sys.exit('no table for you')", tmp_path) == (1, "bertjax: no table for you\n")


def test_a_crash_is_told_with_what_was_said_last(tmp_path):
    code, error = run("import faulthandler\nos.write(2, b'the cause\\n')\nfaulthandler._sigsegv()", tmp_path)
    assert code == -signal.SIGSEGV
    assert "the cause\nFatal Python error: Segmentation fault" in error
    assert error.splitlines()[-1].startswith("bertjax: a library crashed")


def test_of_what_was_said_before_an_end_only_the_reason_of_a_library_is_shown(tmp_path):
    noise = "os.write(2, b'W0000 00:00:17 a warning\\nF0000 00:00:17 parse.cc:234] Unknown flag\\na trace\\n')\n"
    code, error = run(noise + "os.kill(os.getpid(), 9)", tmp_path)
    assert code == -signal.SIGKILL
    assert error == "F0000 00:00:17 parse.cc:234] Unknown flag\nbertjax: ended by a library; above is why\n"


def test_a_kill_is_told_and_leaves_no_temporary_folder(tmp_path):
    code, error = run(
        "os.write(2, b'noise\\n')\nwith temporary.temporary_folder():\n    os.kill(os.getpid(), 9)", tmp_path
    )
    assert code == -signal.SIGKILL
    assert error.startswith("bertjax: ended from outside") and error.count("\n") == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_lost_processes_are_named_in_one_line_and_their_end_is_no_abort(tmp_path):
    code, error = run(GONE, tmp_path)
    assert code == 43
    assert error.startswith("bertjax: another process of this run is gone (process 1, 2: UNAVAILABLE: The following")
    assert error.count("\n") == 1


def test_a_lost_coordinator_is_process_0(tmp_path):
    code, error = run(GONE.replace("(stopped sending heartbeats):\\n", "Socket closed\\n"), tmp_path)
    assert code == 43
    assert error.startswith("bertjax: another process of this run is gone (process 0, which coordinates the others: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_cleans_up_and_ends_with_130(tmp_path, number):
    body = "with temporary.temporary_folder() as folder:\n    print(folder, flush=True)\n    time.sleep(60)"
    process = start(body, tmp_path)
    assert Path(process.stdout.readline().strip()).is_dir()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("requests", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_a_request_ends_a_process_that_a_library_does_not_give_back(tmp_path, requests):
    # The second lock waits for ever, whatever signals come.
    body = (
        "import ctypes\nprocess._GRACE_SECONDS = 0.1\nlock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "mutex = (ctypes.c_long * 8)()\nlock(mutex)\nprint('there', flush=True)\nlock(mutex)"
    )
    process = start(body, tmp_path)
    process.stdout.readline()
    for number in requests:
        process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")


def test_a_request_that_a_library_keeps_to_itself_ends_the_process(tmp_path):
    body = (
        "process._GRACE_SECONDS = process._CLEAN_UP_SECONDS = 0.1\nprint('there', flush=True)\n"
        "while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass"
    )
    process = start(body, tmp_path)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")


def test_an_abrupt_end_leaves_nothing_of_what_was_being_made(tmp_path):
    body = (
        "from pathlib import Path\nfrom bertjax.utils.atomic_dir import staged\nprocess._GRACE_SECONDS = 0.1\n"
        "import ctypes\nlock, mutex = ctypes.CDLL(None).pthread_mutex_lock, (ctypes.c_long * 8)()\nlock(mutex)\n"
        f"with staged(Path({str(tmp_path / 'out')!r}), False, 'corpus', lambda path: True) as folder:\n"
        "    (folder / 'half').write_text('')\n    print('there', flush=True)\n    lock(mutex)"
    )
    process = start(body, tmp_path)
    process.stdout.readline()
    assert list(tmp_path.glob(".out-*"))
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")
    assert not list(tmp_path.glob("*out*"))


def test_what_libraries_leave_in_temporary_files_is_removed_and_what_runs_share_is_not(tmp_path):
    body = (
        "import tempfile\ntempfile.NamedTemporaryFile(delete=False).close()\n"
        "(temporary.shared_place() / 'kept').write_text('')\nsys.exit(1)"
    )
    assert run(body, tmp_path) == (1, "")
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["kept"]


@pytest.mark.parametrize(
    "become", ["raise ImportError('initialization failed')", "print('bertjax: x', file=sys.stderr)"]
)
def test_an_interruption_of_which_a_library_makes_something_else_is_one(tmp_path, become):
    body = f"try:\n    print('there', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    {become}"
    process = start(body + "\nsys.exit(1)", tmp_path)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_process_without_standard_streams_does_its_work(tmp_path, closed):
    script = "import sys, time; from bertjax import process; process.run(lambda: open(sys.argv[1], 'w').close(), False)"
    code = (
        f"import os, sys\nfor fd in {closed}: os.close(fd)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", code, "-c", script, tmp_path / "done"], timeout=60)
    assert done.returncode == 0 and (tmp_path / "done").exists()


def test_nohup_is_respected(tmp_path):
    body = "import signal\nassert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(body, tmp_path) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_ctrl_c_twice_ends_with_130_and_no_traceback_at_any_gap(tmp_path):
    rng = random.Random(0)
    body = (
        "import threading\n"
        "with temporary.temporary_folder() as folder:\n"
        "    for index in range(50):\n"
        "        (folder / str(index)).write_text('')\n"
        "    time.sleep(0.02)\n"
        "    import email.message, unittest.mock\n"
    )
    ended = []
    for _ in range(12):
        process = start(body, tmp_path)
        wait_for_handlers(process)
        for _ in range(2):
            time.sleep(rng.uniform(0, 0.12))
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        # 0 was done before the first.
        assert process.returncode in (0, 130), error
        assert error == ("bertjax: interrupted\n" if process.returncode == 130 else ""), error
        assert list((tmp_path / "tmp").iterdir()) == []
        ended.append(process.returncode)
    assert 130 in ended


def test_two_threads_that_end_the_process_leave_nothing_half_cleared(tmp_path):
    body = f"""
from pathlib import Path
from bertjax.utils.atomic_dir import staged
output = Path({str(tmp_path / "output")!r})
with staged(output, False, "corpus", lambda path: False) as folder:
    for number in range(3000):
        (folder / str(number)).touch()
    import threading
    threading.Thread(target=process.end_at_once, args=(43,)).start()
    process.end_at_once(43)
"""
    assert run(body, tmp_path)[0] == 43
    assert sorted(path.name for path in tmp_path.iterdir()) == ["command.py", "tmp"]


def test_what_a_library_goes_on_writing_after_a_request_to_end_is_cleared_too(tmp_path):
    body = f"""
import threading
from pathlib import Path
from bertjax.utils.atomic_dir import staged
with staged(Path({str(tmp_path / "output")!r}), False, "corpus", lambda path: False) as folder:
    def write():
        for number in range(60):
            (folder / "sub").mkdir(parents=True, exist_ok=True)
            (folder / "sub" / str(number)).touch()
            time.sleep(0.01)
    threading.Thread(target=write, daemon=True).start()
    time.sleep(0.1)
    print("writing", flush=True)
    time.sleep(60)
"""
    process = start(body, tmp_path)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "bertjax: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["command.py", "tmp"]


@pytest.mark.parametrize("ends_all", [True, False])
def test_others_are_waited_for_where_an_error_is_that_of_all(tmp_path, ends_all):
    """What waits for them is called as the interpreter would call it at its end."""
    body = f"""
import atexit, sys
from bertjax.errors import BertjaxError, UsageError
atexit.register(print, "waited", file=sys.stderr)
try:
    try:
        error = UsageError("of all")
        error.ends_all = {ends_all}
        raise error
    except UsageError as error:
        raise BertjaxError("told otherwise") from error
except BertjaxError:
    sys.exit(1)
"""
    assert run(body, tmp_path) == (1, "waited\n" if ends_all else "")
