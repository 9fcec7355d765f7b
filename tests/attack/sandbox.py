"""Temporary folder with valid inputs of all commands ("pieces", made on first use) and with a folder for each case."""

import atexit
import contextlib
import gzip
import json
import lzma
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock
from helpers import finetuning_data, made_up_text
from oracle import HANG, Report, differences, entries

from bertjax.cli import main as cli

# PID and `poll` function of a process. `poll` returns the exit code, -N after signal N, or None while it runs.
Process = tuple[int, Callable[[], int | None]]
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
LIMIT_SECONDS = 120.0
# The test suite sets XLA_FLAGS, with more flags that speed up compilation.
_XLA_FLAGS = os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")
_CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_USE_LEGACY_KERAS": "1"}
TINY = "size=L1_H16,quick=true"
# A short run that logs, evaluates and saves.
_RUN = {"steps": 6, "log_every": 4, "eval_every": 6, "checkpoint_every": 2}
_VOCABULARY = {"data.vocabulary": "{files}/vocab.txt"}
_DATA = {task: {"data.path": f"{{files}}/{task}", **_VOCABULARY} for task in ("glue", "ner", "squad", "swag")}
_DATA["glue"]["data.task"] = "cola"
_DATA["text"] = {"data.train_file": "{files}/text/train.csv", "data.dev_file": "{files}/text/dev.jsonl"} | _VOCABULARY
_DATA["embed"] = {"data.train_file": "{files}/pairs.tsv", "data.dev_file": "{files}/pairs.tsv"} | _VOCABULARY
_DATA |= dict.fromkeys(
    (*["adapt", "pretrain", "pretrain_cpu", "demo", "modernbert", "ettin", "neobert", "cramming"],),
    {"data.corpus": "{corpus}", "data.seq_len": "16"},
)


def start_fork(argv: Sequence[str], cwd: Path, env: Mapping[str, str], out: BinaryIO, err: BinaryIO) -> Process:
    """Starts a command in a fork of this process, which must have one thread. A fork takes 0.3 s, a new process 5 s."""
    process = multiprocessing.get_context("fork").Process(target=_run_command, args=(argv, cwd, env, out, err))
    # `_run_command` unblocks the signals when `bertjax.cli.main` has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    os.setpgid(process.pid, process.pid)
    return process.pid, lambda: process.exitcode


def _run_command(argv: Sequence[str], cwd: Path, env: Mapping[str, str], out: BinaryIO, err: BinaryIO) -> None:
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    # With this variable set, the command does not restart itself to get huge pages.
    os.environ.update({"GLIBC_TUNABLES": "", **env})
    # No command needs 8 GiB, and a faulty one must not fill the memory of the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    tempfile.tempdir = None
    sys.argv = ["bertjax", *argv]
    # Worker processes of multiprocessing import the main module, which must not be `run.py`.
    sys.modules["__main__"] = type(sys)("__main__")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = cli._run
    cli._run = lambda argv: (signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS), run(argv))
    try:
        cli.main()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def wait(poll: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of `poll` as soon as it is not None, or None after `seconds`."""
    deadline = time.monotonic() + seconds
    while (result := poll()) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return result


class Sandbox:
    """Pieces and cases below one temporary folder, which several processes may share."""

    def __init__(self, folder: Path, compiled: str = "") -> None:
        """Creates the folders; `compiled` is the compilation cache of all commands (default: a new folder)."""
        self.folder = folder.resolve()
        for name in ("pieces", "cases", "cache", "home"):
            (self.folder / name).mkdir()
        paths = {"HOME": f"{self.folder}/home", "JAX_COMPILATION_CACHE_DIR": compiled or f"{self.folder}/compiled"}
        self.env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _XLA_FLAGS, **_CACHE, **_TENSORFLOW, **paths}

    def cached(self, key: str, compute: Callable[[], Any]) -> Any:
        """Returns the result of `compute`, which is stored as JSON, so that only one process calls `compute`."""
        file = self.folder / "cache" / key
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(compute()))
            return json.loads(file.read_text())

    def piece(self, name: str) -> Path:
        """Returns the path of a piece, which is made on first use. No case may change it."""
        path = self.folder / "pieces" / name

        def make() -> None:
            path.mkdir(exist_ok=True)
            for argv in PIECES[name]:
                argv = [item.replace("FOLDER", str(path)) for item in argv]
                self.run(self.case(f"make-{name}"), argv).check_returncode()
            if name == "files":
                _write_files(path)
            elif name == "table":
                (path / "table.py").write_text(self.fill(_TABLE))
            path.with_suffix(".entries").write_text(json.dumps(entries(path)))

        self.cached(name, make)
        return path

    def changed_pieces(self) -> list[str]:
        """Returns a fault for each changed file of a piece; commands may add pair indices to the corpus."""
        faults = []
        for file in (self.folder / "pieces").glob("*.entries"):
            changes = differences(json.loads(file.read_text()), entries(file.with_suffix("")))
            faults += [f"changed {file.stem}/{name}" for name in changes if not name.startswith(("pair_index", "."))]
        return faults

    def fill(self, text: str) -> str:
        """Replaces each `{NAME}` with the path of the piece NAME."""
        return re.sub("{(\\w+)}", lambda name: str(self.piece(name[1])) if name[1] in PIECES else name[0], text)

    def case(self, name: str) -> Path:
        """Returns an empty folder for a case, whose commands run in the subfolder `work`."""
        case = self.folder / "cases" / name
        shutil.rmtree(case, ignore_errors=True)
        (case / "work").mkdir(parents=True)
        return case

    def run(
        self, case: Path, argv: Sequence[str], attempt: int = 0, disturb: Any = lambda *_: None
    ) -> CompletedProcess:
        """Runs a command with $TMPDIR `scratch{attempt}`; calls `disturb(pid, poll)` while it runs."""
        argv = [self.fill(item) for item in argv]
        env = {**self.env, "TMPDIR": str(case / f"scratch{attempt}")}
        os.mkdir(env["TMPDIR"])
        with (case / "stdout").open("wb") as out, (case / "stderr").open("wb") as err:
            pid, poll = start_fork(argv, case / "work", env, out, err)
        try:
            disturb(pid, poll)
            code = wait(poll, LIMIT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            wait(poll, LIMIT_SECONDS)
        texts = ((case / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return CompletedProcess(argv, HANG if code is None else code, *texts)


class Case(NamedTuple):
    """One attack; `row` names the attacked command or files."""

    name: str
    row: str
    attack: Callable[[Sandbox, Path], Report]

    def run(self, sandbox: Sandbox, keep: bool = False) -> Report:
        """Runs the attack in a new folder; an exception of the attack itself is also a fault."""
        case = sandbox.case(self.name)
        try:
            report = self.attack(sandbox, case)
        except Exception as error:
            report = Report("error", [f"{error!r}: {getattr(error, 'stderr', '')}"[:2000]])
        if not keep:
            shutil.rmtree(case)
        return report._replace(row=self.row, faults=[*report.faults, *sandbox.changed_pieces()])


def config(experiment: str, arguments: str = TINY, **fields: str | int) -> tuple[str, ...]:
    """Returns --config of a short run and its overrides; `__` stands for a dot, and an empty value omits a field."""
    values = _DATA[experiment] | _RUN | {name.replace("__", "."): value for name, value in fields.items()}
    overrides = (f"--config.{name}={value}" for name, value in values.items() if value != "")
    return (f"--config={EXPERIMENTS}/{experiment}.py:{arguments}", *overrides)


PREPARE = ("prepare", "--heldout=0.1", "--workers=1", "--output=out", "--vocab_size=70")
GLUE = (*config("glue", data__vocabulary=""), "--init_from={pretrained}")
SHORT_GLUE = config("glue", f"{TINY},grid=one", data__vocabulary="", steps=2, eval_every=2)
SWEEP = ("sweep", *SHORT_GLUE, "--init_from={pretrained}", "--seeds=2")
PRETRAIN = config("pretrain")
# The slice [9:] removes `--config=`.
_TABLE = f"""from bertjax.reproduce.table import Cell, Run, Table
def get_table(text):
    first = Run("first", {PRETRAIN[0][9:]!r}, {PRETRAIN[1:]}, flops=1e9)
    tuned = Run("tuned", {SHORT_GLUE[0][9:]!r}, {SHORT_GLUE[1:]}, init_from=first, seeds=2, flops=1e9)
    cells = Cell("BERT BASE", "ppl", (first,), "perplexity", 1.0), Cell("No NSP", "SST-2", (tuned,), "accuracy")
    return Table("5", "", "tiny", cells)
"""


def _write_files(folder: Path) -> None:
    made_up_text.write_letters(folder / "vocab.txt")
    made_up_text.write_text(folder / "text.txt")
    content = (folder / "text.txt").read_bytes()
    (folder / "text.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "text.txt.xz").write_bytes(lzma.compress(content))
    (folder / "pairs.tsv").write_text("anchor\tpositive\nbana\tkero\nke\tlo bana\n")
    finetuning_data.conll_files(folder / "ner")
    for task in ("glue", "squad", "swag", "text"):
        getattr(finetuning_data, f"{task}_files")(folder / task)


_PREPARE = (*PREPARE, "--input=text:{files}/text.txt", "--output=FOLDER")
_INSPECT = ("inspect", *config("pretrain", data__corpus="FOLDER"))  # Writes the pair indices.
_KEEP = ("table", "5", "--results=FOLDER", "--keep=FOLDER/kept.json")
# Maps the name of each input ("piece") to the commands that create it in FOLDER. `files` and `table` need no commands,
# because `Sandbox.piece` writes them.
PIECES: dict[str, Sequence[Sequence[str]]] = {
    **dict.fromkeys(("files", "table"), ()),
    "corpus": (_PREPARE, _INSPECT),
    "pretrained": (("train", *PRETRAIN, "--workdir=FOLDER"),),
    "glue": (("train", *GLUE, "--workdir=FOLDER"),),
    "glue2": (("train", *GLUE, "--config.seed=2", "--workdir=FOLDER"),),
    "huggingface": (("convert", "{pretrained}", "FOLDER", "--format=huggingface"),),
    "converted": (("convert", "{huggingface}", "FOLDER"),),
    "swept": ((*SWEEP, "--workdir=FOLDER"),),
    "predictions": (("predict", "--checkpoint={glue}", "--output=FOLDER"),),
    "reproduced": (("reproduce", "--config={table}/table.py", "--results=FOLDER"), _KEEP),
}
