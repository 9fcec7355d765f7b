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


def start(body: str, folder: Path) -> subprocess.Popen:
    """Starts `bertjax convert a b`, with the Python code `body` in place of the conversion."""
    (folder / "command.py").write_text(
        "import sys, tempfile, time\nfrom bertjax.cli import main\n"
        f"def command(args):\n    exec(compile({body!r}, 'command', 'exec'), globals())\n"
        "main.COMMANDS['convert'] = main.COMMANDS['convert']._replace(run=command)\n"
        "sys.argv[1:] = ['convert', 'a', 'b']\nmain.main()\n"
    )
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, folder / "command.py"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str, folder: Path) -> tuple[int, str]:
    """Returns the exit code and standard error."""
    process = start(body, folder)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


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


@pytest.mark.parametrize(
    ("body", "code", "pattern"),
    [
        ("from bertjax.errors import UsageError\nraise UsageError('no such thing')", 2, "bertjax: no such thing\n"),
        ("open('nosuch')", 1, "bertjax: nosuch: No such file or directory\n"),
        # After a failed read, finalizers of Orbax raise errors, which must not be printed.
        (
            "class Read:\n    def __del__(self):\n        raise ValueError('abandoned')\nRead()\nopen('nosuch')",
            1,
            "bertjax: nosuch: .*\n",
        ),
        ("1 / 0", 1, "Traceback (?s:.*)\nZeroDivisionError: division by zero\n"),
        (
            "import faulthandler\nfaulthandler._sigsegv()",
            -signal.SIGSEGV,
            "Fatal Python error: Segmentation fault(?s:.*)in command(?s:.*)",
        ),
    ],
)
def test_expected_errors_are_one_line_and_others_show_the_python_stack(tmp_path, body, code, pattern):
    returned, error = run(body, tmp_path)
    assert returned == code and re.fullmatch(pattern, error), error


def test_libtpu_prints_nothing_on_a_machine_without_a_tpu(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    # If another process has loaded libtpu, libtpu prints its messages only with this variable.
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    assert run("import jax; jax.devices()", tmp_path) == (0, "")


def test_platform_without_devices_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    convert = "from bertjax.convert.convert import convert as run\nrun('a', 'b', 'bertjax', False)"
    describe = "main.main(['describe', '--config=pretrain:size=tiny'])"
    for body in (convert, describe):
        code, error = run(body, tmp_path)
        assert code == 2 and error.startswith("bertjax: JAX finds no devices for JAX_PLATFORMS='cuda'; use a platform")
        assert error.count("\n") == 1


def test_closed_output_pipe_prints_no_error(tmp_path):
    process = start("for _ in range(10_000):\n    print('x' * 1000)", tmp_path)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(("platforms", "tunables"), [("cpu", "glibc.malloc.hugetlb=1"), ("cuda", None)])
def test_malloc_uses_huge_pages_without_an_accelerator(tmp_path, monkeypatch, platforms, tunables):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    process = start("import os\nprint(os.environ.get('GLIBC_TUNABLES'))", tmp_path)
    assert process.communicate(timeout=60)[0] == f"{tunables}\n"
