"""Damage to every kind of file, and a command that reads it: it answers as before, or says what is wrong."""

import collections
import dataclasses
import gzip
import json
import lzma
import random
import re
import shlex
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oracle import Finding, Outcome, differences, faults_of, is_json_of, newest_checkpoint, state, temporary_left
from sandbox import EXPERIMENTS, TINY, Sandbox, config, prepare, rng_of, sweep
from zygote import Starter

_JUNK_BYTES = 300
_NESTING = 100_000


def _flipped(content: bytes, rng: random.Random, bits: int) -> bytes:
    changed = bytearray(content)
    for place in rng.sample(range(8 * len(content)), min(bits, 8 * len(content))):
        changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _zeroed(content: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
    return content[:first] + bytes(last - first) + content[last:]


# What makes other bytes of a file's.
CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a flipped bit": lambda content, rng: _flipped(content, rng, 1),
    "flipped bits": lambda content, rng: _flipped(content, rng, 1 + len(content) // 50),
    "zeros": _zeroed,
    "cut short": lambda content, rng: content[: rng.randrange(len(content))] if content else b"",
    "emptied": lambda content, rng: b"",
    "junk": lambda content, rng: rng.randbytes(_JUNK_BYTES),
    "doubled": lambda content, rng: content + content,
    "CR line ends": lambda content, rng: content.replace(b"\n", b"\r"),
    "UTF-16": lambda content, rng: content.decode("latin-1").encode("utf-16"),
    "nested": lambda content, rng: b"[" * _NESTING + b"]" * _NESTING,
    "a null": lambda content, rng: b"null\n",
}
# What makes something else of it.
KINDS = (*CHANGES, "deleted", "a folder", "a link to nowhere", "another's")


def damage(file: Path, kind: str, rng: random.Random) -> None:
    """Damages a file.

    Args:
      kind: one of `KINDS`; `another's` has the content of another file of that form, of its folder or one beside it.
      rng: draws what is left open.
    """
    content = file.read_bytes()
    if kind == "another's":
        near = {path for path in file.parent.parent.rglob(f"*{file.suffix}") if path.is_file() and path != file}
        others = sorted(path for path in near if path.read_bytes() != content)
        content = rng.choice(others).read_bytes() if others else content[::-1]
    elif kind in CHANGES:
        content = CHANGES[kind](content, rng)
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a link to nowhere":
        file.symlink_to("nowhere")
    elif kind != "deleted":
        file.write_bytes(content)


def _is_text(content: bytes) -> bool:
    return b"\0" not in content


def _unpacks(unpack: Callable[[bytes], bytes]) -> Callable[[bytes], bool]:
    """A test of a packed file: has it a checksum that fits?"""

    def fits(content: bytes) -> bool:
        try:
            unpack(content)
        except (OSError, EOFError, lzma.LZMAError, zlib.error):
            return False
        return True

    return fits


@dataclasses.dataclass(frozen=True)
class Target:
    """Files of one kind, and commands that read them.

    Attributes:
      piece: of the sandbox; it is copied to `copy`.
      files: patterns below it.
      readers: commands, which run beside `copy`, and write `out` or go on with `copy`.
      may_differ: whether other answers are sound, told by the damaged file's bytes: it may be of its form still.
      before: done to the copy first.
    """

    piece: str
    files: tuple[str, ...]
    readers: tuple[tuple[str, ...], ...]
    may_differ: Callable[[bytes], bool] = lambda content: False
    before: Callable[[Path], None] | None = None


def _stopped_earlier(copy: Path) -> None:
    """Makes a workdir one of a run that was killed before its last save."""
    shutil.rmtree(copy / "checkpoints" / str(newest_checkpoint(copy)))


def _data(task: str, **fields: str) -> tuple[str, ...]:
    return ("inspect", *config(task, **fields))


_PRETRAIN = config("pretrain", data__corpus="copy")
_RESUME = (("train", *config("pretrain"), "--workdir=copy"),)
_RESUME_GLUE = (("train", *config("glue", data__vocabulary=""), "--init_from={pretrained}", "--workdir=copy"),)
_ASKED = (
    ("evaluate", "--checkpoint=copy"),
    ("fill_mask", "--checkpoint=copy", "bana [MASK]"),
    ("features", "--checkpoint=copy", "bana kero", "--output=out"),
    ("convert", "copy", "out", "--format=huggingface"),
)
_ASKED_GLUE = (
    ("evaluate", "--checkpoint=copy"),
    ("predict", "--checkpoint=copy", "--output=out"),
    ("convert", "copy", "out", "--format=huggingface"),
)
# What a run that goes on must come to; all else there may be the damaged file.
_RESULTS = ("checkpoints", "metrics.jsonl", "results.json", "sweep.json")
_OF_A_CHECKPOINT = ("checkpoints/**/*",)
_OTHERS = ("config.json", "data.json", "output_layer.json", "vocabulary.json", "vocab.txt")
_NUMBERS = ("metrics.jsonl", "timing.jsonl", "results.json", "curves.png", "events.*")


def _same_model(content: bytes) -> bool:
    """A config may be edited by hand."""
    return is_json_of(lambda saved: {"task", "data", "model"} <= saved.keys())(content)


TARGETS = {
    "corpus": Target(
        "corpus",
        ("*.*",),
        (
            ("inspect", *_PRETRAIN),
            ("train", *_PRETRAIN, "--workdir=out"),
            ("bench", "input", *_PRETRAIN, "--seconds=0.05"),
        ),
    ),
    "pair plan": Target("corpus", ("pair_index/*",), (("inspect", *_PRETRAIN), ("train", *_PRETRAIN, "--workdir=out"))),
    "vocabulary": Target(
        "letters",
        ("vocab.txt",),
        (
            ("prepare", "--input=text:{texts}/text.txt", "--vocab=copy/vocab.txt", "--workers=1", "--output=out"),
            _data("glue", data__vocabulary="copy/vocab.txt"),
        ),
        _is_text,
    ),
    "checkpoint": Target("pretrained", _OF_A_CHECKPOINT, _ASKED),
    "checkpoint of a run that goes on": Target("pretrained", _OF_A_CHECKPOINT, _RESUME, before=_stopped_earlier),
    "checkpoint of a task": Target("glue", _OF_A_CHECKPOINT, (*_ASKED_GLUE, *_RESUME_GLUE)),
    "config.json": Target("pretrained", ("config.json",), (*_ASKED, *_RESUME), _same_model, _stopped_earlier),
    "workdir": Target("pretrained", _OTHERS[1:], (*_ASKED, *_RESUME), before=_stopped_earlier),
    "workdir of a task": Target("glue", _OTHERS[1:], (*_ASKED_GLUE, *_RESUME_GLUE)),
    "numbers of a run": Target("pretrained", _NUMBERS, _RESUME, before=_stopped_earlier),
    "sweep": Target("swept", ("sweep.json", "trials/*/*.json*"), (tuple(sweep("copy")),)),
    "results of a table": Target(
        "reproduced",
        ("reproduce.json", "first/results.json", "tuned/sweep.json", "tuned/trials/*/results.json"),
        (("table", "5", "--results=copy"),),
        # A run without its file has not been run to its end.
        lambda content: not content,
    ),
    "results that are kept": Target(
        "reproduced", ("kept.json",), (("table", "5", "--results=copy/kept.json"),), lambda content: not content
    ),
    "converted": Target(
        "converted",
        ("**/*",),
        (
            _ASKED[1],
            _ASKED[2],
            _ASKED[3],
            ("train", *config("glue", data__vocabulary=""), "--init_from=copy", "--workdir=out"),
        ),
    ),
    # Files of others, in which a number may be any.
    "huggingface": Target("huggingface", ("*",), (*_ASKED[1:3], ("convert", "copy", "out")), lambda content: True),
    "tensorflow": Target("tensorflow", ("*",), (*_ASKED[1:3], ("convert", "copy", "out")), lambda content: True),
    "text": Target("texts", ("text.txt",), (tuple(prepare("text:copy/text.txt", "out")),), lambda content: True),
    "gzip": Target(
        "texts",
        ("text.txt.gz",),
        tuple(tuple(prepare(f"{form}:copy/text.txt.gz", "out")) for form in ("text", "prose")),
        _unpacks(gzip.decompress),
    ),
    "xz": Target(
        "texts",
        ("text.txt.xz",),
        tuple(tuple(prepare(f"{form}:copy/text.txt.xz", "out")) for form in ("text", "prose")),
        _unpacks(lzma.decompress),
    ),
    "lines": Target(
        "texts",
        ("lines.txt",),
        (("features", "--checkpoint={huggingface}", "--input=copy/lines.txt", "--output=out"),),
        lambda content: True,
    ),
    "tables of glue": Target(
        "tables", ("glue/CoLA/*",), (_data("glue", data__path="copy/glue"),), lambda content: True
    ),
    "tables of ner": Target("tables", ("ner/*",), (_data("ner", data__path="copy/ner"),), lambda content: True),
    "tables of squad": Target("tables", ("squad/*",), (_data("squad", data__path="copy/squad"),), lambda content: True),
    "tables of swag": Target("tables", ("swag/*",), (_data("swag", data__path="copy/swag"),), lambda content: True),
    "tables of text": Target(
        "tables",
        ("text/*",),
        (_data("text", data__train_file="copy/text/train.csv", data__dev_file="copy/text/dev.jsonl"),),
        lambda content: True,
    ),
    "predictions": Target(
        "predictions",
        ("*",),
        (("submission", "--predictions=copy", "--partial", "--output=out"),),
        lambda content: True,
    ),
    "experiment": Target(
        "experiments",
        ("*.py",),
        (
            ("describe", f"--config=copy/pretrain.py:{TINY}"),
            ("sweep", f"--config=copy/glue.py:{TINY},grid=one", "--workdir=out"),
        ),
        lambda content: True,
    ),
}


class References:
    """How each command answers when nothing is damaged; found when first asked for."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[str, dict[str, str]]] = {}
        self._locks: dict[Any, threading.Lock] = collections.defaultdict(threading.Lock)

    def of(self, sandbox: Sandbox, target: Target, reader: tuple[str, ...]) -> tuple[str, dict[str, str]]:
        """What the command prints, and leaves.

        Raises:
          RuntimeError: it does not end as a sound command does.
        """
        key = target.piece, target.before, reader
        with self._locks[key]:
            if key not in self._found:
                case = sandbox.case(f"sound-{target.piece}-{abs(hash(key))}")
                copied(sandbox, target, case)
                outcome = sandbox.execute(sandbox.zygote, case, reader, 300)
                if faults_of(outcome) or (outcome.code != 0 and target.piece != "experiments"):
                    raise RuntimeError(
                        f"{shlex.join(reader)}, on what is sound, ended with {outcome.code}: {outcome.err}"
                    )
                self._found[key] = answer(outcome, case)
            return self._found[key]


def copied(sandbox: Sandbox, target: Target, case: Path) -> Path:
    """A copy of what is to be damaged, in the case's `work`."""
    copy = case / "work" / "copy"
    shutil.copytree(EXPERIMENTS if target.piece == "experiments" else sandbox.piece(target.piece), copy)
    if target.before:
        target.before(copy)
    return copy


def answer(outcome: Outcome, case: Path) -> tuple[str, dict[str, str]]:
    """What a command printed and left, without the name of the case's folder, speeds and times."""
    printed = outcome.out.replace(str(case), "@")
    if outcome.argv[0] == "bench":
        printed = str(sorted(json.loads(printed.splitlines()[-1]))) if printed else ""
    work = case / "work"
    left = state(work / "out", case)
    if "--workdir=copy" in outcome.argv:
        left |= {name: value for name, value in state(work / "copy", case).items() if name.startswith(_RESULTS)}
    return printed, left


@dataclasses.dataclass(frozen=True)
class Damage:
    """A case: one file of a target, damaged in one way, and one command.

    Attributes:
      name: of the case.
      row: of the summary, the target.
      kind: of damage.
      reader: the command.
      seed: of what is drawn.
      references: of all cases.
    """

    name: str
    row: str
    kind: str
    reader: tuple[str, ...]
    seed: str
    references: References

    def run(self, sandbox: Sandbox, starter: Starter) -> Finding:
        rng, target = random.Random(self.seed), TARGETS[self.row]
        expected = self.references.of(sandbox, target, self.reader)
        case = sandbox.case(self.name)
        copy = copied(sandbox, target, case)
        # Their names may be random, which folder they are in and how large they are is not.
        files = sorted(
            {path for pattern in target.files for path in copy.glob(pattern) if path.is_file()},
            key=lambda path: (str(path.parent), path.stat().st_size, path.name),
        )
        file = rng.choice(files)
        damage(file, self.kind, rng)
        outcome = sandbox.execute(starter, case, self.reader)
        faults = faults_of(outcome)
        word = {0: "same", 1: "failed", 2: "refused"}.get(outcome.code, "odd")
        differing = differences(expected[1], answer(outcome, case)[1]) if outcome.code == 0 else []
        if outcome.code == 0 and (differing or answer(outcome, case)[0] != expected[0]):
            content = file.read_bytes() if file.is_file() else b""
            told = re.search(f"{re.escape(file.name)}|damaged|left out|files were empty", outcome.err + outcome.out)
            word = "other" if target.may_differ(content) else "told" if told else "silent"
            faults += ["silent"] if word == "silent" else []
        elif outcome.code == 0 and "damaged" in outcome.err:
            word = "healed"
        if outcome.code == 2 and (case / "work" / "out").exists():
            faults.append("left behind")
        if outcome.code is not None and temporary_left(case / "tmp0"):
            faults.append("temporary file left")
        faults += [f"harm: {path}" for path in sandbox.harm()]
        what = f"{self.kind}: {file.relative_to(copy)}; exit {outcome.code} in {outcome.seconds:.1f} s"
        detail = f"{what}; {outcome.last_line}" + (f"; differs: {', '.join(differing[:4])}" if differing else "")
        return Finding(self.row, word, tuple(faults), detail, outcome.argv)


def damages(count: int, seed: int, references: References, targets: Sequence[str] = tuple(TARGETS)) -> list[Damage]:
    """Cases: each target with each kind in turn, then again with other draws."""
    pairs = [(target, kind) for target in targets for kind in KINDS]
    cases = []
    for index in range(count):
        turn, place = divmod(index, len(pairs))
        if not place:
            rng_of(seed, "damages", turn).shuffle(pairs)
        name = f"damage-{index}"
        target, kind = pairs[place]
        reader = rng_of(seed, name, "reader").choice(TARGETS[target].readers)
        cases.append(Damage(name, target, kind, reader, f"{seed}/{name}", references))
    return cases
