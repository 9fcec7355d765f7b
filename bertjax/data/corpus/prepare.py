"""`prepare`: any text to a tokenised corpus on disk, streaming, on all cores, the same bytes every time."""

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.data.corpus import readers, run_local, store
from bertjax.data.corpus.blocks import BLOCK_BYTES
from bertjax.data.corpus.job import Job, Made
from bertjax.data.corpus.tokenizer import KINDS, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.data.corpus.vocabulary import check_size
from bertjax.errors import UsageError, first_line
from bertjax.utils.atomic_directory import atomic_directory
from bertjax.utils.io import as_path, check_free_space, is_remote, upload

LOCAL, BEAM = RUNNERS = ("local", "beam")
# Of a corpus made on many machines: few for a terabyte of text, many for as many machines to write.
SHARD_BYTES = 128 << 20
_MAX_WORKERS = 1024
# A low guess: plain English text of 200 MB gave 0.48.
_CORPUS_BYTES_A_TEXT_BYTE = 0.4

# All that is in the folder of a corpus.
_FILES = (store.MANIFEST, "*.bin", "*.crc32", "vocab.txt", "*.model", "plans")

# Each entry of the manifest's `problems`, for people.
_PROBLEMS = {
    "characters_outside_doc": "{} characters outside <doc> ... </doc> were left out",
    "documents_without_sentences": "{} documents held no text after cleaning and were left out",
    "empty_files": "{} files were empty",
    "files_named_again": "{} files were named by more than one --input and read once",
    "invalid_utf8_bytes": "{} bytes were not UTF-8 and were replaced",
    "long_sentence_cuts": "{} cuts, at white space where there was some, of text without a sentence end",
    "no_heldout_document": "no document could be held out: there are too few different ones to evaluate on",
    "nul_characters": "{} NUL characters were left out",
    "paragraphs_not_split": "{} paragraphs could not be split into sentences and were kept as one each",
    "sentences_without_tokens": "{} sentences held nothing but control characters and were left out",
    "unclosed_doc": "{} <doc> had no </doc> and were read to the end of their file",
    "unparsable_modules": "{} Python modules could not be parsed and were left out",
}


def prepare(
    inputs: list[str],
    output: str | Path,
    *,
    vocabulary: str | Path | None = None,
    vocabulary_kind: str = WORDPIECE,
    vocabulary_size: int = 30522,
    lower_case: bool | None = None,
    heldout_share: float = 0.01,
    workers: int | None = None,
    runner: str = LOCAL,
    runner_options: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    data_dir: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Makes the corpus directory `output` (see `store`) from texts and returns its manifest.

    The bytes written depend on the texts and the settings alone, not on the number of workers or where files lie.
    Nothing that passes for a corpus is at `output` before it is whole. A document is held out by the hash of its
    content, so equal documents fall on the same side.

    Args:
      inputs: specs such as `wiki:dump/**/wiki_*`; see `readers`.
      vocabulary: an existing `vocab.txt` or SentencePiece `.model`; None trains one on a sample of the text.
      vocabulary_kind: `wordpiece` or `sentencepiece`, of a vocabulary trained here.
      vocabulary_size: pieces of a vocabulary trained here; a small text gives fewer.
      lower_case: None is what the vocabulary says, and True for one trained here.
      heldout_share: share of documents, in [0, 1), that never reaches training; 0 holds out none.
      workers: processes of this machine; None is one a core.
      runner: `local`, the cores of this machine, or `beam`, Apache Beam here or on a cluster, whose corpus has each
        array in files of `shard_bytes`: the same array.
      runner_options: of Beam's pipeline, as NAME=VALUE or NAME.
      shard_bytes: some whole blocks (`blocks.BLOCK_BYTES`).
      data_dir: where TFDS datasets lie.
      overwrite: replaces a corpus at `output`, once the new one is whole.
      progress: a progress bar on standard error.

    Raises:
      UsageError: an argument, spec or vocabulary cannot be used.
      BertjaxError: reading, writing or a worker failed, or the inputs hold no text.
    """
    output = _place(output)
    if not inputs:
        raise UsageError("prepare needs at least one --input, say --input docs:")
    if not 0 <= heldout_share < 1:
        raise UsageError(f"the held-out share {heldout_share} is outside [0, 1)")
    if vocabulary_kind not in KINDS:
        raise UsageError(f"vocabulary kind {vocabulary_kind!r} is none of {', '.join(KINDS)}")
    if not vocabulary:
        check_size(vocabulary_size)
    workers = _cores() if workers is None else workers
    if not 1 <= workers <= _MAX_WORKERS:
        raise UsageError(f"{workers:,} workers cannot work; give 1 to {_MAX_WORKERS:,}")
    if shard_bytes < BLOCK_BYTES or shard_bytes % BLOCK_BYTES:
        raise UsageError(f"files of {shard_bytes:,} bytes are no whole blocks of {BLOCK_BYTES:,}")
    make = _executor(runner, runner_options, output, workers, progress, shard_bytes)
    given = _given(vocabulary, lower_case) if vocabulary else None
    sources, repeated = readers.expand(inputs, data_dir)
    text_bytes = sum(source.size_bytes or 0 for source in sources)
    # Beam's parts lie there as long as the corpus is made of them.
    copies = 2 if runner == BEAM else 1
    check_free_space(output.parent, copies * _CORPUS_BYTES_A_TEXT_BYTE * text_bytes, f"the corpus {output}")
    job = Job(
        sources=tuple(sources),
        problems={"files_named_again": repeated},
        given=given,
        vocabulary_kind=vocabulary_kind,
        vocabulary_size=vocabulary_size,
        lower_case=lower_case is not False,
        heldout_share=heldout_share,
    )

    with atomic_directory(output, overwrite, "corpus", _is_corpus, last_file=store.MANIFEST) as directory:
        made = make(job, directory)
        manifest = {
            "vocabulary": _vocabulary_entry(made.vocabulary, trained=given is None),
            "settings": {
                "heldout_share": heldout_share,
                "inputs": _inputs_entry(sources),
                **({} if given else {"vocabulary_size": vocabulary_size}),
            },
            "splits": made.splits,
            "token_dtype": store.token_dtype(made.vocabulary.size).str,
            "problems": {name: count for name, count in sorted(made.problems.items()) if count},
            "files": made.files,
            **({"shards": made.shards} if made.shards else {}),
        }
        store.write_manifest(directory, manifest)
    return store.read_manifest(output)


def _place(output: str | Path) -> Path | epath.Path:
    if not str(output):
        raise UsageError("--output is empty; name the folder that is to hold the corpus")
    if is_remote(output):
        if "/" not in str(output).partition("://")[2].strip("/"):
            raise UsageError(f"the corpus cannot be {output}, the whole of a bucket; name a folder in it")
        return as_path(str(output))
    place = Path(os.path.realpath(os.path.expanduser(output)))
    if not place.name:
        raise UsageError(f"the corpus cannot be {place}; name a folder that is not there yet")
    return place


def _given(vocabulary: str | Path, lower_case: bool | None) -> Vocabulary:
    if not is_remote(vocabulary):
        return load_vocabulary(vocabulary, lower_case)
    try:
        content = as_path(vocabulary).read_bytes()
    except Exception as error:  # Each kind of storage has exceptions of its own.
        raise UsageError(f"cannot read the vocabulary {vocabulary}: {first_line(error)}") from error
    return load_vocabulary(Path(vocabulary), lower_case, content)


def _executor(
    runner: str, options: Sequence[str], output: Path | epath.Path, workers: int, progress: bool, shard_bytes: int
) -> Callable[[Job, Path | epath.Path], Made]:
    """What does the work: (job, folder to be filled) to what it made.

    Raises:
      UsageError: there is no such runner, its options are not its own, or what it needs is not installed.
    """
    if runner not in RUNNERS:
        raise UsageError(f"runner {runner!r} is none of {', '.join(RUNNERS)}")
    if runner == LOCAL:
        if options:
            raise UsageError("--runner_options are for --runner beam")
        return lambda job, directory: _run_here(job, directory, workers, progress)
    # Its library says what else could be installed.
    logging.disable(logging.WARNING)
    try:
        from bertjax.data.corpus import run_beam
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "apache_beam":
            raise
        raise UsageError("--runner beam needs Apache Beam: pip install -e '.[beam]'") from error
    finally:
        logging.disable(logging.NOTSET)
    pipeline_options = run_beam.pipeline_options(options, output, workers)
    return lambda job, directory: run_beam.run(job, directory, pipeline_options, workers, progress, shard_bytes)


def _run_here(job: Job, directory: Path | epath.Path, workers: int, progress: bool) -> Made:
    if not is_remote(directory):
        return run_local.run(job, directory, workers, progress)
    with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
        made = run_local.run(job, Path(folder), workers, progress)
        for file in sorted(Path(folder).iterdir()):
            upload(file, directory / file.name)
    return made


def summary(output: str | Path, manifest: dict[str, Any]) -> str:
    """What a finished corpus holds and what was wrong with its inputs, in a few lines."""
    vocabulary = manifest["vocabulary"]
    case = "lower-cased" if vocabulary["lower_case"] else "cased"
    lines = [f"{output}: {vocabulary['size']:,} {vocabulary['kind']} pieces, {case}, in {vocabulary['file']}"]
    wanted = manifest["settings"].get("vocabulary_size", vocabulary["size"])
    if vocabulary["size"] < wanted:
        lines.append(f"  the text has no more than {vocabulary['size']:,} of the {wanted:,} pieces asked for")
    for name, split in manifest["splits"].items():
        lines.append(
            f"  {name}: {split['documents']:,} documents, {split['sentences']:,} sentences, "
            f"{split['tokens']:,} tokens of {split['text_bytes'] / 1e6:,.1f} MB"
        )
    if manifest["splits"]["heldout"]["documents"] < 2:
        lines.append(
            "  training evaluates on held-out documents and needs two: prepare more text, or a larger --heldout"
        )
    lines += [f"  {_PROBLEMS[name].format(f'{count:,}')}" for name, count in manifest["problems"].items()]
    return "\n".join(lines)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _vocabulary_entry(vocabulary: Vocabulary, trained: bool) -> dict[str, Any]:
    names = ("pad", "unk", "cls", "sep", "mask")
    return {
        "file": VOCABULARY_FILES[vocabulary.kind],
        "kind": vocabulary.kind,
        "sha256": vocabulary.sha256,
        "size": vocabulary.size,
        "lower_case": vocabulary.lower_case,
        "special_ids": dict(zip(names, vocabulary.special_ids, strict=True)),
        "trained_here": trained,
    }


def _inputs_entry(sources: list[readers.Source]) -> dict[str, Any]:
    kinds = sorted({source.kind for source in sources})
    return {
        kind: {
            "sources": sum(source.kind == kind for source in sources),
            "bytes": sum(source.size_bytes or 0 for source in sources if source.kind == kind),
        }
        for kind in kinds
    }


def _is_corpus(path: Path) -> bool:
    """Whether a folder holds a corpus and nothing else, which would be lost with it."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return store.MANIFEST in names and all(any(fnmatch(name, pattern) for pattern in _FILES) for name in names)
