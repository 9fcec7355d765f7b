"""Checks of the output, the exit code and the remaining files of a command."""

import hashlib
import multiprocessing
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

from helpers.orbax_files import checkpoint_arrays, newest_checkpoint

from bertjax.errors import INTERRUPTED, STOPPED

# Exit code that stands for a command that exceeded its time limit.
HANG = 124
_TRACEBACK = re.compile("^ *Traceback |^Exception (ignored )?in ", re.MULTILINE)
# Control characters except tab, newline and \r, which progress bars use.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TEMPORARY = re.compile(r"tmp|unfinished|\.write\.lock$")
# Files that depend on the clock, or contain the path of their folder.
_VOLATILE = ("timing.jsonl", "events.out.*", "*.png", "origin.json", "reproduce.json", ".lock")


class Report(NamedTuple):
    """Result of a case; the summary counts cases by `row` and `result`."""

    result: str
    faults: list[str]
    detail: str = ""
    argv: Sequence[str] = ()
    row: str = ""


def faults_of(result: CompletedProcess, codes: Sequence[int] = (0, 1, 2)) -> list[str]:
    """Returns the faults of a finished command that may exit with `codes`."""
    if result.returncode == HANG:
        return ["hang"]
    lines = result.stderr.strip().splitlines() or [""]
    is_one_line = [line for line in lines if line.startswith("bertjax: ")] == lines[-1:]
    is_explained = "same command" in result.stderr if result.returncode == STOPPED else is_one_line
    if result.returncode == INTERRUPTED and "bertjax: interrupted" in lines:
        return []  # Threads and worker processes that end later may print further messages.
    # A command may print its arguments, with their control characters, to stdout.
    out = result.stdout.translate({ord(character): None for character in "".join(result.args)})
    faults = ["traceback"] if _TRACEBACK.search(result.stdout + "\n" + result.stderr) else []
    faults += [f"exit {result.returncode}"] if result.returncode not in codes else []
    faults += ["not one line"] if result.returncode > 0 and not is_explained else []
    return faults + (["control characters"] if _CONTROL.search(result.stderr + out) else [])


def temporaries(folder: Path) -> list[str]:
    """Returns the temporary files and folders below a folder; other processes may be writing to it."""
    paths = [os.path.join(parent, name) for parent, *names in os.walk(folder) for name in sum(names, [])]
    return [os.path.relpath(path, folder) for path in paths if _TEMPORARY.search(os.path.basename(path))]


def leftovers(case: Path, attempt: int = 0) -> list[str]:
    """Returns a fault for each temporary file that a command left in its working directory or in its $TMPDIR."""
    # Ignore the cache folder, which keeps pair indices of read-only corpora for later commands.
    scratch = [name for name in os.listdir(case / f"scratch{attempt}") if name != f"bertjax-{os.getuid()}"]
    return [f"left {name}" for name in (*scratch, *temporaries(case / "work"))]


def entries(folder: Path) -> dict[str, str]:
    """Returns the modification time of each path below a folder; folders have an empty string."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: "" if path.is_dir() else str(path.lstat().st_mtime_ns) for name, path in paths.items()}


def differences(left: dict[str, str], right: dict[str, str]) -> list[str]:
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


def state(path: Path, root: Path | None = None) -> dict[str, str]:
    """Returns hashes of an output's files, ignoring the path `root` in them, and of its newest checkpoints' arrays."""
    contents = {path.name: path.read_bytes()} if path.is_file() else {}
    for file in path.rglob("*"):
        name = str(file.relative_to(path))
        if file.name == "checkpoints" and (step := newest_checkpoint(file.parent)) is not None:
            # Read in a child process: tensorstore starts threads, and a process with threads must not fork commands.
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                arrays = pool.submit(checkpoint_arrays, file / str(step)).result()
            contents |= {f"{name}/{step}/{key}": array for key, array in arrays.items()}
        elif file.is_file() and "checkpoints/" not in name and not any(map(file.match, _VOLATILE)):
            contents[name] = file.read_bytes().replace(os.fsencode(root or path), b"")
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
