"""Where commands are attacked: a folder of its own with sound things to read, made when first asked for."""

import functools
import random
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from oracle import Outcome, changed, entries
from zygote import Program, Running, Starter, Zygote, output_files

TESTS = Path(__file__).parents[1]
# Data that other tests are run on.
sys.path += [str(TESTS), str(TESTS / "tasks")]

import finetuning_data  # noqa: E402
import made_up_text  # noqa: E402

ROOT = TESTS.parent
EXPERIMENTS = ROOT / "experiments"
LIMIT_SECONDS = 60.0
TINY = "size=L1_H16,quick=true"
# Small steps that still log, evaluate and save at different ones.
RUN = {"steps": 6, "log_every": 4, "eval_every": 6, "checkpoint_every": 2}
# The fields that lead a task to its data, by its name.
DATA = {
    "pretraining": {"data.corpus": "{corpus}", "data.seq_len": "16"},
    "glue": {"data.task": "cola", "data.path": "{tables}/glue", "data.vocabulary": "{letters}/vocab.txt"},
    "ner": {"data.path": "{tables}/ner", "data.vocabulary": "{letters}/vocab.txt"},
    "squad": {"data.path": "{tables}/squad", "data.vocabulary": "{letters}/vocab.txt"},
    "swag": {"data.path": "{tables}/swag", "data.vocabulary": "{letters}/vocab.txt"},
    "text": {
        "data.train_file": "{tables}/text/train.csv",
        "data.dev_file": "{tables}/text/dev.jsonl",
        "data.test_file": "{tables}/text/test.tsv",
        "data.vocabulary": "{letters}/vocab.txt",
    },
}


class Sandbox:
    """A folder with what the commands need; files of one case are in one folder of it.

    Attributes:
      folder: gone when this is closed.
      seconds: that it took to make each piece.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bertjax-attack-")).resolve()
        for name in ("pieces", "cases", "home", "compiled"):
            (self.folder / name).mkdir()
        self._env = {
            "HOME": str(self.folder / "home"),
            "MPLCONFIGDIR": str(self.folder / "home" / "matplotlib"),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
            "--xla_cpu_use_fusion_emitters=false",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.program = Program()
        self._locks: dict[str, threading.Lock] = {name: threading.Lock() for name in PIECES}
        self._made: dict[str, dict] = {}
        self.seconds: dict[str, float] = {}
        self._elsewhere = _elsewhere()

    @functools.cached_property
    def zygote(self) -> Zygote:
        """Started when first asked for."""
        return Zygote(self._env)

    def close(self) -> None:
        if "zygote" in self.__dict__:
            self.zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def piece(self, name: str) -> Path:
        """A sound thing to read, which no case may change."""
        path = self.folder / "pieces" / name
        with self._locks[name]:
            if name not in self._made:
                path.mkdir()
                began = time.monotonic()
                PIECES[name](self, path)
                self.seconds[name] = time.monotonic() - began
                self._made[name] = entries(path)
        return path

    def filled(self, text: str) -> str:
        """The text with the paths of pieces where it has their names in braces."""
        for name in PIECES:
            if f"{{{name}}}" in text:
                text = text.replace(f"{{{name}}}", str(self.piece(name)))
        return text

    def case(self, name: str) -> Path:
        """An empty folder for a case; commands run in `work` in it."""
        folder = self.folder / "cases" / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "work").mkdir(parents=True)
        return folder

    def start(self, starter: Starter, case: Path, argv: Sequence[str], attempt: int = 0) -> tuple[Running, Path]:
        """Starts a command in the case's `work`, with a temporary folder of its own, which is returned too."""
        temporary = case / f"tmp{attempt}"
        temporary.mkdir(exist_ok=True)
        return starter.start(argv, case / "work", {**self._env, "TMPDIR": str(temporary)}), temporary

    def execute(
        self, starter: Starter, case: Path, argv: Sequence[str], limit: float | None = None, attempt: int = 0
    ) -> Outcome:
        """Runs a command to its end, or kills it at its limit, which is `LIMIT_SECONDS` where none is given."""
        argv = [self.filled(item) for item in argv]
        began = time.monotonic()
        running, _ = self.start(starter, case, argv, attempt)
        code = running.wait(LIMIT_SECONDS if limit is None else limit)
        if code is None:
            running.kill()
        return self.outcome(case, argv, code, time.monotonic() - began)

    def outcome(self, case: Path, argv: Sequence[str], code: int | None, seconds: float) -> Outcome:
        out, err = (file.read_text(errors="replace") for file in output_files(case / "work"))
        return Outcome(tuple(argv), code, out, err, seconds)

    def make(self, folder: Path, *argv: str) -> None:
        """Runs a command that must succeed, in the folder of a piece."""
        case = self.case(f"make-{folder.name}-{time.monotonic_ns()}")
        outcome = self.execute(self.zygote, case, argv, limit=300)
        if outcome.code != 0:
            raise RuntimeError(f"bertjax {shlex.join(outcome.argv)} ended with {outcome.code}: {outcome.err}")

    def harm(self) -> list[str]:
        """What has been changed outside of the cases' folders; told once."""
        found = []
        for name, before in list(self._made.items()):
            after = entries(self.folder / "pieces" / name)
            new, gone = changed(before, after)
            # Plans of other settings are kept beside the corpus.
            found += [f"{name}/{path}" for path in (*new, *gone) if not path.startswith(("pair_index", "."))]
            self._made[name] = after
        now = _elsewhere()
        found += sorted(now ^ self._elsewhere)
        self._elsewhere = now
        return found


def _elsewhere() -> set[str]:
    folders = (ROOT, EXPERIMENTS, Path("/"))
    return {str(path) for folder in folders for path in folder.iterdir() if path.name != "__pycache__"}


def config(experiment: str, arguments: str = TINY, **fields: str | int | float) -> list[str]:
    """--config of an experiment on the data of the sandbox, and overrides of fields, `__` for each dot."""
    task = "pretraining" if experiment in ("pretrain", "pretrain_cpu", "demo") else experiment
    given = {**DATA[task], **RUN, **{name.replace("__", "."): value for name, value in fields.items()}}
    overrides = [f"--config.{name}={value}" for name, value in given.items() if value != ""]
    return [f"--config={EXPERIMENTS}/{experiment}.py:{arguments}", *overrides]


def _letters(_: Sandbox, folder: Path) -> None:
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{char}" for char in characters)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def _texts(_: Sandbox, folder: Path) -> None:
    import gzip
    import lzma

    made_up_text.write_text(folder / "text.txt")
    content = (folder / "text.txt").read_bytes()
    (folder / "text.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "text.txt.xz").write_bytes(lzma.compress(content))
    (folder / "lines.txt").write_text("bana kero\nlote ||| misu\n")


def _tables(_: Sandbox, folder: Path) -> None:
    finetuning_data.glue_files(folder / "glue")
    finetuning_data.conll_files(folder / "ner")
    finetuning_data.squad_files(folder / "squad")
    finetuning_data.swag_files(folder / "swag")
    finetuning_data.text_files(folder / "text")


def _prepared(sandbox: Sandbox, folder: Path) -> None:
    text = sandbox.piece("texts") / "text.txt"
    sandbox.make(folder, *prepare(f"text:{text}", str(folder / "corpus")))
    for path in (folder / "corpus").iterdir():
        path.rename(folder / path.name)
    (folder / "corpus").rmdir()
    # Leaves its pair plans there.
    sandbox.make(folder, "inspect", *config("pretrain", data__corpus=folder))


def prepare(source: str, output: str) -> list[str]:
    sizes = ["--vocab_size=70", "--heldout=0.1", "--workers=1"]
    return ["prepare", f"--input={source}", f"--output={output}", *sizes]


def _run(experiment: str, *more: str, **fields: str) -> Callable[[Sandbox, Path], None]:
    def make(sandbox: Sandbox, folder: Path) -> None:
        sandbox.make(folder, "train", *config(experiment, **fields), f"--workdir={folder}", *more)

    return make


def _converted(source: str, form: str) -> Callable[[Sandbox, Path], None]:
    def make(sandbox: Sandbox, folder: Path) -> None:
        sandbox.make(folder, "convert", f"{{{source}}}", str(folder), f"--format={form}")

    return make


def _swept(sandbox: Sandbox, folder: Path) -> None:
    sandbox.make(folder, *sweep(str(folder)))


def sweep(workdir: str) -> list[str]:
    short = config("glue", f"{TINY},grid=one", data__vocabulary="", steps=2, eval_every=2)
    return ["sweep", *short, "--init_from={pretrained}", "--seeds=2", f"--workdir={workdir}"]


TABLE = """from bertjax.reproduce.table import Cell, Run, Table


def get_table(text):
    first = Run("first", {first[0]!r}, {first[1]!r}, flops=1e9)
    tuned = Run("tuned", {tuned[0]!r}, {tuned[1]!r}, init_from=first, seeds=2, flops=1e9)
    cells = Cell("BERT BASE", "ppl", (first,), "perplexity", 1.0), Cell("No NSP", "SST-2", (tuned,), "accuracy")
    return Table("5", "", "tiny", cells)
"""


def _table(sandbox: Sandbox, folder: Path) -> None:
    def run(*given: str) -> tuple[str, tuple[str, ...]]:
        experiment, *overrides = (sandbox.filled(item) for item in given)
        return experiment.removeprefix("--config="), tuple(overrides)

    short = config("glue", f"{TINY},grid=one", data__vocabulary="", steps=2, eval_every=2)
    (folder / "table.py").write_text(TABLE.format(first=run(*config("pretrain")), tuned=run(*short)))


def _reproduced(sandbox: Sandbox, folder: Path) -> None:
    sandbox.make(folder, "reproduce", "--config={table}/table.py", f"--results={folder}")
    sandbox.make(folder, "table", "5", f"--results={folder}", f"--keep={folder}/kept.json")


def _predicted(sandbox: Sandbox, folder: Path) -> None:
    sandbox.make(folder, "predict", "--checkpoint={glue}", f"--output={folder}")


# What can be read, by its name in the arguments of a case.
PIECES: dict[str, Callable[[Sandbox, Path], None]] = {
    "letters": _letters,
    "texts": _texts,
    "tables": _tables,
    "corpus": _prepared,
    "pretrained": _run("pretrain"),
    "glue": _run("glue", "--init_from={pretrained}", data__vocabulary=""),
    "glue2": _run("glue", "--init_from={pretrained}", data__vocabulary="", seed=2),
    "ner": _run("ner"),
    "squad": _run("squad"),
    "swag": _run("swag"),
    "text": _run("text"),
    "huggingface": _converted("pretrained", "huggingface"),
    "tensorflow": _converted("pretrained", "tensorflow"),
    "converted": _converted("huggingface", "bertjax"),
    "swept": _swept,
    "predictions": _predicted,
    "table": _table,
    "reproduced": _reproduced,
}


def rng_of(*parts: object) -> random.Random:
    """A generator of its own for each thing that is drawn."""
    return random.Random("/".join(map(str, parts)))
