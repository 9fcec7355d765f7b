"""What a command is to the system it runs in: requests to end it, its exit code, its memory pages."""

import atexit
import contextlib
import os
import select
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TextIO

from bertjax.errors import INTERRUPTED, STOPPED
from bertjax.utils.held_back import hold_back
from bertjax.utils.temporary import own_place

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For the interpreter to hear of a request, and for a command to clean up once it has.
_GRACE_SECONDS = 5
_CLEAN_UP_SECONDS = 10
# Of this process, while `run` has it.
_ending: "_Ending | None" = None


def run(command: Callable[[], None], debug: bool) -> NoReturn:
    """Runs a command as all that this process does, and ends the process.

    Ctrl-C, SIGTERM and SIGHUP interrupt it, so that it can clean up; a second Ctrl-C ends it at once, and so does the
    first when it is done. Either way the exit code is 130.

    Args:
      command: raises SystemExit with an exit code where it fails, and prints why; of other exceptions, as with
        --debug, a traceback is shown.
      debug: shows what libraries write, which is held back otherwise.
    """
    # Until there are handlers; a signal that comes in between waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    with_huge_pages()
    _open_closed_streams()
    remove_temporary_files = own_place()

    def clean_up() -> None:
        # What is being made is known to a module that takes long to import, and without it nothing is.
        if staging := sys.modules.get("bertjax.utils.atomic_dir"):
            staging.clear_under_way()
        remove_temporary_files()

    global _ending
    _ending = ending = _Ending(clean_up)
    if not debug:
        ending.well = hold_back(ending.now, remove_temporary_files)
    ending.watch_requests()
    code: object = None
    ends_all = False
    try:
        for number in handled_requests():
            signal.signal(number, ending.requested)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        try:
            command()
        except SystemExit as end:
            code, ends_all = end.code, _ends_all(end)
            if not isinstance(code, int | None):
                # A user's own module may end the program so; the interpreter, which would say it, is not asked.
                print(f"bertjax: {code}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
            code = 1
        done, ending.begun = not ending.begun, True
    except KeyboardInterrupt:
        # Between two lines of a command's end.
        done = False
    if not done:
        # Libraries make other exceptions of an interruption; whatever the command said last, this is what it was.
        ending.interrupted()
    # Not left to the interpreter, which would put the handlers away first.
    if code in (None, 0, STOPPED) or ends_all:
        # Where there are others, they are waited for: to them this process would be lost, whatever they have to say.
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ending.now(code if isinstance(code, int) else int(code is not None))


def _ends_all(end: SystemExit) -> bool:
    """Whether the error that it comes of is raised in all processes of a run."""
    error: BaseException | None = end
    while error is not None and not getattr(error, "ends_all", False):
        error = error.__cause__ or error.__context__
    return error is not None


def end_at_once(code: int) -> NoReturn:
    """Ends this process from any thread, whatever the others are at, and leaves no temporary file."""
    if _ending is not None:
        _ending.now(code)
    os._exit(code)


def handled_requests() -> list[signal.Signals]:
    """Those of `REQUESTS` that are not to be ignored: `nohup` has SIGHUP ignored."""
    return [number for number in REQUESTS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class _Ending:
    """How this process ends when it is asked to.

    Attributes:
      begun: a request interrupts nothing any more, and ends the process at once.
      clean_up: called before any end.
      well: called before any end that is not a crash.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self.begun = False
        self.clean_up = clean_up
        self.well: Callable[[], None] = lambda: None
        self._said = threading.Lock()
        # Of the thread that ends the process; a handler may run inside it.
        self._leaving = threading.RLock()
        self._clearing = False

    def requested(self, number: int, _frame: FrameType | None) -> None:
        """The handler of requests."""
        if self._clearing:
            return
        if number == signal.SIGHUP:
            leave_terminal()
        if self.begun:
            self.interrupted()
        self.begun = True
        self._say_so()
        raise KeyboardInterrupt

    def watch_requests(self) -> None:
        """Ends the process at a second Ctrl-C, and where a request does not get through to the interpreter.

        A handler runs when a library gives the interpreter back, which takes minutes where XLA compiles or storage
        does not answer, and a library may keep to itself the exception that it raises; this is a thread of its own.
        """
        source, sink = os.pipe()
        os.set_blocking(sink, False)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)

        def watch() -> None:
            requests, patience_seconds = 0, None
            while True:
                if not select.select([source], [], [], patience_seconds)[0]:
                    if not self.begun or patience_seconds == _CLEAN_UP_SECONDS:
                        self.interrupted()
                    patience_seconds = _CLEAN_UP_SECONDS
                    continue
                number = os.read(source, 1)[0]
                requests += number in REQUESTS
                if requests > 1 and number == signal.SIGINT:
                    self.interrupted()
                # Training has handlers of its own, and takes its time to save.
                if requests and signal.getsignal(signal.SIGTERM) == self.requested:
                    patience_seconds = _GRACE_SECONDS

        threading.Thread(target=watch, daemon=True).start()

    def interrupted(self) -> NoReturn:
        """Ends the process at once, as interrupted."""
        self._say_so()
        self.now(INTERRUPTED)

    def _say_so(self) -> None:
        """Says once that it is interrupted; the line is the last."""
        if self._said.acquire(blocking=False):
            with contextlib.suppress(OSError, ValueError):
                # Not print: this may run inside another one.
                os.write(sys.stderr.fileno(), b"bertjax: interrupted\n")
                _write_nowhere(sys.stderr)

    def now(self, code: int) -> NoReturn:
        """Ends the process at once, whatever is under way; other processes of a run are not waited for."""
        if not self._leaving.acquire(blocking=False):
            # Another thread is at it, and would be cut off while it cleans up.
            threading.Event().wait()
        self._clearing = True
        self.clean_up()
        with contextlib.suppress(OSError):
            self.well()
        os._exit(code)


def leave_terminal() -> None:
    """Writes nowhere from now on what went to a terminal, which is gone: a run that saves must not fail on it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                _write_nowhere(stream)


def _write_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _open_closed_streams() -> None:
    """Has the standard streams that the process was started without lead nowhere, and not into the next open file."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # The lowest one that is free.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as the process


def with_huge_pages() -> None:
    """Starts the process over with glibc asking for huge pages, which it reads from the environment at start alone.

    A train step takes and frees gigabytes of buffers; with pages of 4 KiB a step on two CPU cores had 8 % (BASE)
    to 25 % (Mini) fewer tokens/s.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
