"""Worker processes for CPU-bound work and for compilers that may crash."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

from bertjax.errors import BertjaxError


def available_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def process_pool(
    workers: int, worker_died: BertjaxError, initializer: Callable[[], object] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yields a process pool whose workers ignore Ctrl-C and exit with their parent.

    Raises the error `worker_died` if a worker crashes or is killed. Each new worker calls `initializer`.
    """
    # Do not fork, because the child of a process with TensorFlow's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _initialize, (initializer,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise worker_died from error
    finally:
        # Suppress the error that shutdown() raises if an interrupt arrives while the pool starts its thread.
        with contextlib.suppress(RuntimeError):
            pool.shutdown(wait=True, cancel_futures=True)


def _initialize(initializer: Callable[[], object] | None) -> None:
    # Ignore Ctrl-C, which a terminal sends to all processes, because the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    # The workers use all cores, so the package `tokenizers` should not start more threads in every worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if initializer:
        initializer()


def _exit_with_parent(parent: BaseProcess) -> None:
    # Without this thread, a worker whose parent was killed would wait for work forever.
    parent.join()
    signal.raise_signal(signal.SIGKILL)
