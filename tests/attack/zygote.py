"""Commands in processes forked from one that has imported everything: a third of the time of starting each anew.

A child runs `bertjax.cli.main.main()` as the program does, in a process group of its own, with files for its output.
What is different from the program:

- nothing can be hit while modules are imported, since they are there already;
- glibc's huge pages are not asked for, which the program does by starting over (`process.with_huge_pages`);
- all children have one seed of Python's string hashes.

So a part of the cases is run with the program itself, `Program`, which is used in the same way.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# A file any larger is a flood; no sound case comes near.
FILE_BYTES = 256 << 20
DATA_BYTES = 8 << 30


class Running(Protocol):
    """A command under way."""

    def send(self, number: int, group: bool = True) -> None:
        """Sends a signal to the command's process group, or to its first process alone; nothing if it has ended."""

    def kill(self) -> None:
        """Ends the whole process group, if any of it is left."""

    def alive(self) -> bool:
        """Whether a process of its group is left, though it has ended itself."""

    def wait(self, seconds: float) -> int | None:
        """The exit code, minus the signal's number where one ended it; None if it has not ended by then."""


class Starter(Protocol):
    """A way to start commands.

    Attributes:
      deaf_seconds: for so long after its start a command may not have handlers of signals yet.
    """

    deaf_seconds: float

    def start(self, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Running:
        """Starts `bertjax ARGV` in `folder`, with output in its neighbours `NAME.stdout` and `NAME.stderr`."""


def output_files(folder: Path) -> tuple[Path, Path]:
    """Where the output of a command that runs in `folder` goes."""
    return folder.with_name(folder.name + ".stdout"), folder.with_name(folder.name + ".stderr")


class Program:
    """Starts the program as it is installed."""

    # Until Python runs the program's first line, on a machine that does other work, too.
    deaf_seconds = 2.0

    def start(self, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Running:
        out, err = output_files(folder)
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("bertjax"), *map(os.fsencode, argv)],
                cwd=folder,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        _bound(process.pid)
        return Started(process)


class Started:
    """A process of its own, with a group of its own."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def send(self, number: int, group: bool = True) -> None:
        if self._process.poll() is None:
            (os.killpg if group else os.kill)(self._process.pid, number)

    def kill(self) -> None:
        _kill_group(self._process.pid)
        self._process.wait()

    def alive(self) -> bool:
        return _has_group(self._process.pid)

    def wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Zygote:
    """Starts forked children; may be used by several threads."""

    deaf_seconds = 0.0

    def __init__(self, env: Mapping[str, str]) -> None:
        """Starts the process, which needs some seconds before its first child."""
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._lock = threading.Lock()
        self._children: dict[int, _Child] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> "Running":
        with self._lock:
            number = len(self._children)
            child = self._children[number] = _Child(self, number)
        self.tell({"start": number, "argv": list(argv), "folder": str(folder), "env": dict(env)})
        return child

    def tell(self, request: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """Ends the process and its children."""
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                self._children[answer["ended"]].end(answer["code"], answer["process"])
        for child in self._children.values():
            child.end(-signal.SIGKILL, 0)


class _Child:
    def __init__(self, zygote: Zygote, number: int) -> None:
        self._zygote, self._number = zygote, number
        self._code: int | None = None
        self._process = 0
        self._ended = threading.Event()

    def send(self, number: int, group: bool = True) -> None:
        # Through its parent, which knows whether the process is still there: its number may be another's by now.
        if not self._ended.is_set():
            self._zygote.tell({"signal": number, "to": self._number, "group": group})

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._ended.wait()
        if self.alive():
            _kill_group(self._process)

    def alive(self) -> bool:
        return bool(self._process) and _has_group(self._process)

    def wait(self, seconds: float) -> int | None:
        return self._code if self._ended.wait(seconds) else None

    def end(self, code: int, process: int) -> None:
        if not self._ended.is_set():
            self._code, self._process = code, process
            self._ended.set()


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _bound(process: int) -> None:
    """Sets limits of a process, lest it fill the disk or the memory; 0 is this one."""
    limits = {resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_DATA: DATA_BYTES, resource.RLIMIT_CORE: 0}
    # One that has ended by now needs none.
    with contextlib.suppress(ProcessLookupError):
        for limit, size in limits.items():
            resource.prlimit(process, limit, (size, size))


def _serve(channel: socket.socket) -> bool:
    """Forks children as told. Returns whether this is one of them, else at the end."""
    waker, awaken = os.pipe()
    os.set_blocking(awaken, False)
    signal.set_wakeup_fd(awaken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # By what the other side calls them, and by what the system does.
    process_of: dict[int, int] = {}
    number_of: dict[int, int] = {}
    received = b""
    while True:
        ready = select.select([channel, waker], [], [])[0]
        if waker in ready:
            os.read(waker, 4096)
            while number_of:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                number = number_of.pop(pid)
                del process_of[number]
                answer = {"ended": number, "code": os.waitstatus_to_exitcode(status), "process": pid}
                channel.sendall(json.dumps(answer).encode() + b"\n")
        if channel not in ready:
            continue
        data = channel.recv(1 << 20)
        if not data:
            break
        *lines, received = (received + data).split(b"\n")
        for request in map(json.loads, lines):
            if "signal" in request:
                if request["to"] in process_of:
                    (os.killpg if request["group"] else os.kill)(process_of[request["to"]], request["signal"])
                continue
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for descriptor in (waker, awaken):
                    os.close(descriptor)
                channel.close()
                _become(request)
                return True
            os.setpgid(pid, pid)
            process_of[request["start"]], number_of[pid] = pid, request["start"]
    for pid in number_of:
        os.killpg(pid, signal.SIGKILL)
    return False


def _become(request: dict[str, Any]) -> None:
    """Makes a new child what a process of the program is."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _bound(0)
    for file, descriptor in zip(output_files(Path(request["folder"])), (1, 2), strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["folder"])
    # Set, it is not set by starting over.
    os.environ.update({"GLIBC_TUNABLES": "", **request["env"]})
    tempfile.tempdir = None
    sys.argv = ["bertjax", *request["argv"]]


def _import_everything() -> None:
    """What takes long and starts no threads: no device is used before a child does."""
    for name in ("flax.linen", "matplotlib.figure", "optax", "orbax.checkpoint", "tensorflow"):
        importlib.import_module(name)
    # JAX warns of forks, which harm where its devices are in use.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)


if __name__ == "__main__":
    # As `bertjax.cli.main` does before TensorFlow is imported.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "GRPC_VERBOSITY": "ERROR"}
    _import_everything()
    # What no collection visits is not copied for each child.
    gc.freeze()
    # In the children they wait until the program listens.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    channel = socket.socket(fileno=int(sys.argv[1]))
    # By the system, not by this file, which children that multiprocessing spawns import.
    if _serve(channel):
        from bertjax.cli import main as cli

        cli.main()
