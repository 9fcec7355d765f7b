"""`prepare`: any text to a tokenised corpus on disk, streaming, on all cores, the same bytes every time."""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatch
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from bertjax.corpus import docstrings, encoding, readers, store
from bertjax.corpus.output import CorpusWriter
from bertjax.corpus.tokenizer import KINDS, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.corpus.vocabulary import ordered_map, train_vocabulary
from bertjax.errors import BertjaxError, UsageError
from bertjax.files import check_space
from bertjax.process import REQUESTS
from bertjax.staging import staged
from bertjax.terminal import progress_bar

# Batches handed out and not yet written, a worker: enough that none waits, few enough to keep memory small.
_BATCHES_AHEAD = 2
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
    "invalid_utf8_bytes": "{} bytes were not UTF-8 and were left out",
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
    data_dir: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Makes the corpus directory `output` (see `store`) from texts and returns its manifest.

    The bytes written depend on the texts and the settings alone, not on the number of workers or where files lie.
    Nothing appears at `output` before it is whole. A document is held out by the hash of its content, so equal
    documents fall on the same side.

    Args:
      inputs: specs such as `wiki:dump/**/wiki_*`; see `readers`.
      vocabulary: an existing `vocab.txt` or SentencePiece `.model`; None trains one on a sample of the text.
      vocabulary_kind: `wordpiece` or `sentencepiece`, of a vocabulary trained here.
      vocabulary_size: pieces of a vocabulary trained here; a small text gives fewer.
      lower_case: None is what the vocabulary says, and True for one trained here.
      heldout_share: share of documents, in [0, 1), that never reaches training; 0 holds out none.
      workers: processes; None is one a core.
      data_dir: where TFDS datasets lie.
      overwrite: replaces a corpus at `output`, once the new one is whole.
      progress: a progress bar on standard error.

    Raises:
      UsageError: an argument, spec or vocabulary cannot be used.
      BertjaxError: reading, writing or a worker failed, or the inputs hold no text.
    """
    if not str(output):
        raise UsageError("--output is empty; name the folder that is to hold the corpus")
    output = Path(os.path.realpath(os.path.expanduser(output)))
    if not output.name:
        raise UsageError(f"the corpus cannot be {output}; name a folder that is not there yet")
    if not inputs:
        raise UsageError("prepare needs at least one --input, say --input docs:")
    if not 0 <= heldout_share < 1:
        raise UsageError(f"the held-out share {heldout_share} is outside [0, 1)")
    if vocabulary_kind not in KINDS:
        raise UsageError(f"vocabulary kind {vocabulary_kind!r} is none of {', '.join(KINDS)}")
    workers = _cores() if workers is None else workers
    if not 1 <= workers <= _MAX_WORKERS:
        raise UsageError(f"{workers:,} workers cannot work; give 1 to {_MAX_WORKERS:,}")
    given = load_vocabulary(vocabulary, lower_case) if vocabulary else None
    sources, repeated = readers.expand(inputs, data_dir)
    problems: Counter[str] = Counter(files_named_again=repeated)
    text_bytes = sum(source.size_bytes or 0 for source in sources)
    check_space(output.parent, _CORPUS_BYTES_A_TEXT_BYTE * text_bytes, f"the corpus {output}")

    with staged(output, overwrite, "corpus", _is_corpus) as directory:
        with worker_pool(workers) as pool:
            to_read = [_spooled(source, directory, problems, pool, progress) for source in sources]
            if given:
                used = given
                shutil.copyfile(given.path, directory / VOCABULARY_FILES[given.kind])
            else:
                used = train_vocabulary(
                    to_read,
                    directory / VOCABULARY_FILES[vocabulary_kind],
                    kind=vocabulary_kind,
                    size=vocabulary_size,
                    lower_case=lower_case is not False,
                    pool=pool,
                    progress=progress,
                )
        encoder = encoding.Encoder(used, heldout_share, encoding.cache_entries(workers))
        with (
            worker_pool(workers, encoder) as pool,
            CorpusWriter(directory, used.size, heldout_share) as writer,
            progress_bar("prepare", _total_bytes(to_read), "B", progress) as bar,
        ):
            texts = itertools.chain.from_iterable(readers.read(source, problems, bar.update) for source in to_read)
            calls = ((batch,) for batch in encoding.batches(texts))
            for encoded in ordered_map(pool, encoding.encode_batch, calls, _BATCHES_AHEAD * workers):
                problems.update(encoded.problems)
                writer.add(encoded)
                bar.set_postfix_str(f"{writer.documents:,} documents", refresh=False)
            splits = writer.finish(problems)
        for source in set(to_read) - set(sources):
            Path(source.name).unlink()
        manifest = {
            "vocabulary": _vocabulary_entry(used, trained=given is None),
            "settings": {
                "heldout_share": heldout_share,
                "inputs": _inputs_entry(sources),
                **({} if given else {"vocabulary_size": vocabulary_size}),
            },
            "splits": splits,
            "token_dtype": store.token_dtype(used.size).str,
            "problems": {name: count for name, count in sorted(problems.items()) if count},
            "files": store.describe_files(directory),
        }
        store.write_manifest(directory, manifest)
    return store.read_manifest(output)


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


def _total_bytes(sources: list[readers.Source]) -> int | None:
    sizes = [source.size_bytes for source in sources]
    return None if None in sizes else sum(sizes)


def _spooled(
    source: readers.Source, directory: Path, problems: Counter[str], pool: Executor, progress: bool
) -> readers.Source:
    """The source, or for docstrings, which take longest to find, a file of them that is quick to read twice."""
    if source.kind != "docs":
        return source
    path = directory / "docstrings.spool"
    names = docstrings.modules()
    with (
        open(path, "w", encoding="utf-8", errors="replace", newline="\n") as file,
        progress_bar("docs: parse", len(names), " modules", progress) as bar,
    ):
        for document in docstrings.documents(names, problems, pool, bar.update):
            file.write(document + "\n\n")
    return readers.Source("paragraphs", str(path), path.stat().st_size)


def _is_corpus(path: Path) -> bool:
    """Whether a folder holds a corpus and nothing else, which would be lost with it."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return store.MANIFEST in names and all(any(fnmatch(name, pattern) for pattern in _FILES) for name in names)


class _Pool(ProcessPoolExecutor):
    """Processes that start with requests to end blocked: Python has a traceback for one that comes before its start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Started here, since it leaves requests unblocked.
        resource_tracker.ensure_running()
        super().__init__(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        # Which starts a process where none is idle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def worker_pool(workers: int, encoder: encoding.Encoder | None = None) -> Iterator[Executor]:
    """A process pool; with an encoder, its workers are ready for `encoding.encode_batch`.

    Raises:
      BertjaxError: a worker was killed.
    """
    # Not fork: TensorFlow's threads may run in the parent.
    context = multiprocessing.get_context("spawn")
    pool = _Pool(workers, context, encoding.start_worker, (encoder,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise BertjaxError(
            "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
