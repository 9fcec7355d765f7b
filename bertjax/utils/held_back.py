"""What libraries write to standard error: held back while all is well, shown when the process crashes.

Damage, a full disk or a lost machine makes libraries of C++ and their threads write hundreds of lines before the
exception arrives that becomes our one line. What they write to file descriptor 2 goes into a pipe, at whose other end a
child process keeps the last of it. The child outlives any crash of its parent and is what tells of it.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from bertjax.errors import INTERRUPTED, LOST, shortened

LOST_PROCESS = (
    "another process of this run is gone ({}); when all of them have ended, the same command on every host goes on "
    "from the last checkpoint"
)
# What `client.h` of JAX's distributed runtime says before it aborts the process.
_LOST = re.compile(rb"JAX distributed service detected fatal errors.*?absl::Status: ([^\n]*)\n", re.DOTALL)
# Its request with which a process joins the others.
_JOINING = "CoordinationService/RegisterTask"
_NOT_ALL_CAME = (
    "the processes of this run did not find each other in config.cluster.initialization_timeout_seconds ({}); see that "
    "all of them were started, each with a number of its own, and reach process 0"
)
# The numbers of the processes it has not heard of; it is of process 0, and says nothing where that one is gone.
_SILENT = re.compile(r"stopped sending heartbeats\):\n([\d\n, ]+)\n")
# Of faulthandler, at any signal that is a crash.
_CRASHED = b"Fatal Python error"
# Their loggers warn of what becomes an error of ours, or of what is as it should be.
_LIBRARIES = ("absl", "asyncio", "concurrent", "etils", "grpc", "orbax", "py.warnings", "tensorflow")
_KEPT_BYTES = 1 << 16
_SHOWN_LINES = 40
# Of libraries of C++ that end the process of their own will, as the TPU compiler does at flags it does not know.
_FATAL = re.compile(rb"^F\d{4} [^\n]*$", re.MULTILINE)
_KILLED = "bertjax: ended from outside, perhaps for lack of memory"
_LAST_WORDS_SECONDS = 0.2
_WELL = b"."


def hold_back(end: Callable[[int], object], clean_up: Callable[[], object]) -> Callable[[], None]:
    """Holds back what libraries write from now on; `sys.stderr` goes where standard error went.

    Call it before there are threads.

    Args:
      end: called with an exit code, in a thread of its own, when a library aborts the process and this was told; and
        where nothing but a finaliser got to hear of an interruption.
      clean_up: called in the child when this process is gone.

    Returns:
      A function to call when the process is about to end as it should; the child tells of any other end.
    """
    shown = os.dup(2)
    source, sink = os.pipe()
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        for descriptor in (0, 1, 2, sink, here.fileno()):
            os.close(descriptor)
        _watch(source, there, shown, clean_up)
    os.close(source)
    there.close()
    os.dup2(sink, 2)
    os.close(sink)
    # For as long as there is a process.
    sys.stderr = open(shown, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    _hold_back_python(open(2, "w", buffering=1, errors="backslashreplace", closefd=False), end)  # noqa: SIM115

    def end_when_told() -> None:
        if code := here.recv(1):
            end(code[0])

    threading.Thread(target=end_when_told, daemon=True).start()

    def well() -> None:
        here.sendall(_WELL)
        here.shutdown(socket.SHUT_WR)
        os.waitpid(child, 0)

    return well


def _hold_back_python(held: TextIO, end: Callable[[int], object]) -> None:
    """The tracebacks of threads and of callbacks from C++, the logs of libraries, and where a crash happened."""

    def hold(kind: Any, error: Any, trace: Any) -> None:
        # Also while the process ends and has put away what this needs: a hook that fails would be shown instead.
        with contextlib.suppress(Exception):
            traceback.print_exception(kind, error, trace, file=held)

    sys.excepthook = hold
    threading.excepthook = lambda args: hold(args.exc_type, args.exc_value, args.exc_traceback)

    def hold_unraisable(args: Any) -> None:
        if issubclass(args.exc_type, KeyboardInterrupt):
            end(INTERRUPTED)
        hold(args.exc_type, args.exc_value, args.exc_traceback)

    sys.unraisablehook = hold_unraisable
    logging.captureWarnings(True)
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.addHandler(logging.StreamHandler(held))
        logger.propagate = False
    # A thread that aborts sleeps for as many seconds as the number of SIGABRT, time for an end in order. In C: a
    # handler of the interpreter would run too late. faulthandler hands on to it.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    faulthandler.enable(held, all_threads=False)


def _watch(source: int, parent: socket.socket, shown: int, clean_up: Callable[[], object]) -> None:
    """The child: reads until the parent is gone, and says how it went if that was not as it should be."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kept, well, told, alive = b"", False, False, True
    while alive:
        ready, _, _ = select.select([source, parent], [], [])
        if parent in ready:
            word = parent.recv(1)
            well, alive = well or word == _WELL, bool(word)
        kept = _drained(source, kept)
        if not told and (_CRASHED in kept or _LOST.search(kept)):
            told = True
            time.sleep(_LAST_WORDS_SECONDS)
            os.write(shown, _ending(_drained(source, kept)).encode())
            with contextlib.suppress(OSError):
                parent.sendall(bytes([LOST if _LOST.search(kept) else 1]))
    if not well and not told:
        said = "".join(f"{line.decode(errors='replace')}\n" for line in _FATAL.findall(kept))
        last = "bertjax: ended by a library; above is why" if said else _KILLED
        os.write(shown, f"{said}{last}\n".encode())
    clean_up()
    os._exit(0)


def _drained(source: int, kept: bytes) -> bytes:
    while select.select([source], [], [], 0)[0] and (new := os.read(source, _KEPT_BYTES)):
        kept = (kept + new)[-_KEPT_BYTES:]
    return kept


def _ending(kept: bytes) -> str:
    """What to say of a crash, from what libraries said."""
    text = kept.decode(errors="replace")
    if lost := _LOST.search(kept):
        status = shortened(lost[1].decode(errors="replace"))
        if _JOINING in text:
            return f"bertjax: {_NOT_ALL_CAME.format(status)}\n"
        silent = _SILENT.search(text)
        who = f"process {', '.join(silent[1].split())}" if silent else "process 0, which coordinates the others"
        return f"bertjax: {LOST_PROCESS.format(f'{who}: {status}')}\n"
    lines = text.splitlines()[-_SHOWN_LINES:]
    last = "bertjax: a library crashed; above is what was said last, --debug shows it from the beginning\n"
    return "\n".join(lines) + "\n" + last
