"""Cases that damage a file and run a command on it, which must give the same output or fail with a one-line error."""

import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

from helpers.orbax_files import newest_checkpoint
from oracle import Report, differences, faults_of, leftovers, state
from sandbox import GLUE, PREPARE, PRETRAIN, SWEEP, Case, Sandbox, config


def _flip_bits(content: bytes, rng: random.Random, count: int) -> bytes:
    flipped = bytearray(content)
    for bit in rng.sample(range(8 * len(content)), min(count, 8 * len(content))):
        flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


_CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bit": lambda content, rng: _flip_bits(content, rng, 1),
    "flipped bits": lambda content, rng: _flip_bits(content, rng, 1 + len(content) // 50),
    "zeros": lambda content, rng: content[: rng.randrange(len(content) or 1)].ljust(len(content), b"\0"),
    "truncated": lambda content, rng: content[: rng.randrange(len(content) or 1)],
    "empty": lambda content, rng: b"",
    "doubled": lambda content, rng: content + content,
    "CR line ends": lambda content, rng: content.replace(b"\n", b"\r"),
    "UTF-16": lambda content, rng: content.decode("latin-1").encode("utf-16"),
    "nested": lambda content, rng: b"[" * 100_000 + b"]" * 100_000,
    "null": lambda content, rng: b"null\n",
}
KINDS = (*_CHANGES, "deleted", "folder", "broken link", "other file")
# Kinds of damage after which a JSON file, a compressed file or a text may still be valid.
_JSON_EDITS = ("flipped bit", "flipped bits", "other file")
_GZIP_EDITS = ("empty", "doubled", "other file")
_TEXT_EDITS = (*_JSON_EDITS, *_GZIP_EDITS, "truncated", "CR line ends", "null", "nested")


def damage_file(file: Path, kind: str, rng: random.Random) -> None:
    """Damages a file. The kind `other file` copies the content of a nearby file with the same suffix."""
    content = file.read_bytes()
    if kind == "other file":
        contents = {path.read_bytes() for path in file.parent.parent.rglob(f"*{file.suffix}") if path.is_file()}
        content = rng.choice(sorted(contents - {content}) or [content[::-1]])
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "broken link":
        file.symlink_to("nowhere")
    elif kind != "deleted":
        file.write_bytes(_CHANGES[kind](content, rng) if kind in _CHANGES else content)


# Commands that read the folder `copy`. They write `out`, or resume the run in `copy`.
READERS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", *config("pretrain", data__corpus="copy")),
    "train": ("train", *config("pretrain", data__corpus="copy"), "--workdir=out"),
    "evaluate": ("evaluate", "--checkpoint=copy"),
    "fill_mask": ("fill_mask", "--checkpoint=copy", "bana [MASK]"),
    "features": ("features", "--checkpoint=copy", "bana kero", "--output=out"),
    "predict": ("predict", "--checkpoint=copy", "--output=out"),
    "export": ("convert", "copy", "out", "--format=huggingface"),
    "import": ("convert", "copy", "out"),
    "resume": ("train", *PRETRAIN, "--workdir=copy"),
    "resume_glue": ("train", *GLUE, "--workdir=copy"),
    "init_from": ("train", *GLUE, "--init_from=copy", "--workdir=out"),
    "sweep": (*SWEEP, "--workdir=copy"),
    "table": ("table", "5", "--results=copy"),
    "kept_table": ("table", "5", "--results=copy/kept.json"),
    "vocab": (*PREPARE[:-1], "--input=text:{files}/text.txt", "--vocab=copy/vocab.txt"),
    "submission": ("submission", "--predictions=copy", "--partial", "--output=out"),
    **{f"prepare_{kind}": (*PREPARE, f"--input=text:copy/text.{kind}") for kind in ("txt", "txt.gz", "txt.xz")},
    **{f"inspect_{task}": ("inspect", *config(task, data__path=f"copy/{task}")) for task in ("ner", "squad", "swag")},
    "inspect_glue": ("inspect", *config("glue", data__path="copy/glue", data__vocabulary="copy/vocab.txt")),
    "inspect_text": ("inspect", *config("text", data__train_file="copy/text/train.csv")),
}
# For each target: folder of the sandbox (copied to `copy`), pattern of the files to damage, keys of `READERS`, and
# kinds of damage after which a command may print other results instead of an error.
TARGETS: dict[str, tuple[str, str, str, Sequence[str]]] = {
    "corpus": ("corpus", "*.*", "inspect train", ()),
    "pair index": ("corpus", "pair_index/*", "inspect train", ()),
    "vocabulary": ("files", "vocab.txt", "vocab inspect_glue", _TEXT_EDITS),
    "checkpoint": ("pretrained", "checkpoints/**/*", "evaluate fill_mask features export resume resume", ()),
    "checkpoint of a task": ("glue", "checkpoints/**/*", "evaluate predict export", ()),
    "config": ("pretrained", "config.json", "evaluate fill_mask export resume", _JSON_EDITS),
    "data.json": ("pretrained", "data.json", "evaluate fill_mask resume", ()),
    "vocabulary of a run": ("glue", "vocab*", "evaluate predict export resume_glue", _TEXT_EDITS),
    "output layer": ("glue", "o*.json", "evaluate predict export resume_glue", ()),
    "results of a run": ("pretrained", "[!cdv.]*", "resume", KINDS),
    "sweep": ("swept", "**/*.json*", "sweep", _JSON_EDITS),
    "results of a table": ("reproduced", "**/re*.json", "table", (*_JSON_EDITS, "deleted", "broken link")),
    "kept results": ("reproduced", "kept.json", "kept_table", _JSON_EDITS),
    "converted": ("converted", "**/*", "fill_mask features export init_from", ()),
    # Formats without checksums, in which a changed value is often valid.
    "huggingface": ("huggingface", "*", "fill_mask features import", KINDS),
    "text": ("files", "text.txt", "prepare_txt", KINDS),
    **{kind: ("files", f"text.txt.{kind}", f"prepare_txt.{kind}", _GZIP_EDITS) for kind in ("gz", "xz")},
    "predictions": ("predictions", "*", "submission", KINDS),
    "glue data": ("files", "glue/CoLA/*", "inspect_glue", KINDS),
    **{f"{task} data": ("files", f"{task}/*", f"inspect_{task}", KINDS) for task in ("ner", "squad", "swag", "text")},
}


def damage(sandbox: Sandbox, case: Path, target: str, kind: str, reader: str, seed: str) -> Report:
    """Damages a file of a target and runs a command that reads it."""
    piece, pattern, _, may_differ = TARGETS[target]
    expected = sandbox.cached(f"{piece} {reader}", lambda: undamaged_answer(sandbox, piece, reader))
    copy, rng = _copy_piece(sandbox, case, piece, reader), random.Random(seed)
    # Sort by size before name, because Orbax's file names are random.
    files = [path for path in copy.glob(pattern) if path.is_file()]
    file = rng.choice(sorted(files, key=lambda path: (str(path.parent), path.stat().st_size, path.name)))
    damage_file(file, kind, rng)
    result = sandbox.run(case, READERS[reader])
    faults, changes = [*faults_of(result), *leftovers(case)], differences(expected, _answer(result, case))
    word = f"exit {result.returncode}"
    if result.returncode == 0 and changes:
        is_reported = re.search(f"{re.escape(file.name)}|damaged", result.stderr + result.stdout)
        word = "valid" if kind in may_differ else "reported" if is_reported else "silent"
        faults += ["silent"] if word == "silent" else []
    elif result.returncode == 2 and (case / "work" / "out").exists():
        faults.append("left out")
    detail = f"{kind}: {file.relative_to(copy)}; {result.stderr[-300:]!r}; differs: {changes[:4]}"
    return Report(word, faults, detail, result.args)


def undamaged_answer(sandbox: Sandbox, piece: str, reader: str) -> dict[str, str]:
    case = sandbox.case(f"undamaged-{piece}-{reader}")
    _copy_piece(sandbox, case, piece, reader)
    result = sandbox.run(case, READERS[reader])
    result.check_returncode()
    return _answer(result, case)


def _copy_piece(sandbox: Sandbox, case: Path, piece: str, reader: str) -> Path:
    copy = shutil.copytree(sandbox.piece(piece), case / "work" / "copy")
    if reader.startswith("resume"):
        # Delete the newest checkpoint, so that the run looks like one that was killed before its last save.
        shutil.rmtree(copy / "checkpoints" / str(newest_checkpoint(copy)))
    return copy


def _answer(result: CompletedProcess, case: Path) -> dict[str, str]:
    """Returns the stdout of a command, and hashes of the files that it wrote."""
    written = state(case / "work" / "out", case)
    if "--workdir=copy" in result.args:
        # Compare only results, because any other file of the resumed run may be the damaged one.
        results = re.compile("checkpoints|metrics.jsonl|results.json|sweep.json")
        written = {name: value for name, value in state(case / "work" / "copy", case).items() if results.match(name)}
    return {"stdout": result.stdout.replace(str(case), ""), **written}


def damages(count: int, seed: int) -> list[Case]:
    """Returns `count` cases, which use every pair of target and kind of damage before any pair repeats."""
    pairs = [(target, kind) for target in TARGETS for kind in KINDS]
    cases: list[Case] = []
    while len(cases) < count:
        for target, kind in random.Random(f"{seed}/{len(cases)}").sample(pairs, min(len(pairs), count - len(cases))):
            name = f"damage-{len(cases)}"
            reader = random.Random(f"{name}/{seed}").choice(TARGETS[target][2].split())
            options = {"target": target, "kind": kind, "reader": reader, "seed": f"{seed}/{name}"}
            cases.append(Case(name, target, partial(damage, **options)))
    return cases
