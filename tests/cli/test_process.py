"""The command as a process: signals, exit codes, tracebacks and closed pipes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertjax.errors import INTERRUPTED


def start(body: str, folder: Path, **changes: str | None) -> subprocess.Popen:
    """Starts `bertjax convert a b`, with the Python code `body` in place of the conversion.

    `changes` sets environment variables, or unsets those that are None.
    """
    (folder / "command.py").write_text(
        "import sys, tempfile, time\nfrom bertjax.cli import main\n"
        f"def command(args):\n    exec(compile({body!r}, 'command', 'exec'), globals())\n"
        "main.COMMANDS['convert'] = main.COMMANDS['convert']._replace(run=command)\n"
        "sys.argv[1:] = ['convert', 'a', 'b']\nmain.main()\n"
    )
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **changes}
    command, env = [sys.executable, folder / "command.py"], {k: v for k, v in environment.items() if v is not None}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_temporary_files_and_exits_with_130(tmp_path, number):
    body = "with tempfile.TemporaryDirectory() as path:\n    print(path, flush=True)\n    time.sleep(60)"
    process = start(body, tmp_path)
    assert Path(process.stdout.readline().strip()).is_dir()
    # Wait for pending finalizers, in which Python would ignore the exception that the signal handler raises.
    time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (INTERRUPTED, "bertjax: interrupted\n")
    assert list((tmp_path / "tmp").iterdir()) == []


NO_DEVICES = "bertjax: JAX finds no devices for JAX_PLATFORMS='cuda'; use a platform.*\n"
# After a failed read, finalizers of Orbax raise errors, which must not be printed.
FINALIZER = "class Read:\n    def __del__(self):\n        raise ValueError('abandoned')\nRead()\nopen('nosuch')"
CONVERT = "from bertjax.convert.convert import convert as run\nrun('a', 'b', 'bertjax', False)"
DESCRIBE = "main.main(['describe', '--config=pretrain:size=tiny'])"
CRASH = "Fatal Python error: Segmentation fault(?s:.*)in command(?s:.*)"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("body", "platforms", "code", "pattern"),
    [
        (FINALIZER, "cpu", 1, "bertjax: nosuch: No such file or directory\n"),
        ("1 / 0", "cpu", 1, "Traceback (?s:.*)\nZeroDivisionError: division by zero\n"),
        ("import faulthandler\nfaulthandler._sigsegv()", "cpu", -signal.SIGSEGV, CRASH),
        (CONVERT, "cuda", 2, NO_DEVICES),
        (DESCRIBE, "cuda", 2, NO_DEVICES),
        # On a machine without a TPU, libtpu prints nothing.
        ("import jax; jax.devices()", None, 0, ""),
    ],
)
def test_expected_errors_are_one_line_and_others_show_the_python_stack(tmp_path, body, platforms, code, pattern):
    # If another process has loaded libtpu, libtpu prints its messages only with this variable.
    process = start(body, tmp_path, JAX_PLATFORMS=platforms, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and re.fullmatch(pattern, error), error


def test_closed_output_pipe_prints_no_error(tmp_path):
    process = start("for _ in range(10_000):\n    print('x' * 1000)", tmp_path)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(("platforms", "tunables"), [("cpu", "glibc.malloc.hugetlb=1"), ("cuda", None)])
def test_malloc_uses_huge_pages_without_an_accelerator(tmp_path, platforms, tunables):
    body = "import os\nprint(os.environ.get('GLIBC_TUNABLES'))"
    process = start(body, tmp_path, JAX_PLATFORMS=platforms, GLIBC_TUNABLES=None)
    assert process.communicate(timeout=60)[0] == f"{tunables}\n"
