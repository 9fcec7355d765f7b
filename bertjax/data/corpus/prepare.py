"""`bertjax prepare`: deterministic conversion of text to a tokenized corpus on disk, on all cores."""

import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus import readers, store
from bertjax.data.corpus.chunks import divide_chunk, encode_chunk, group_sources, plan_splits, write_array
from bertjax.data.corpus.vocabulary import BPE, WORDPIECE, Vocabulary, is_cased, load_vocabulary, named_special_ids
from bertjax.data.corpus.vocabulary_extension import extend_vocabulary, extended_kind
from bertjax.data.corpus.vocabulary_training import (
    check_size,
    learn_vocabulary,
    ordered_map,
    sample_training_data,
    strips_letters,
)
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import AnyPath, as_path, atomic_folder, check_free_space, is_remote
from bertjax.utils.process_pool import available_cores, process_pool
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)
# Maximum pending chunks per worker: enough to keep workers busy, few enough to bound the disk space for their texts.
_CHUNKS_PER_WORKER = 2
# Minimum disk space for a corpus and its shards, in bytes per byte of text. 200 MB of English text needed 0.9 bytes
# per byte.
_DISK_BYTES_PER_TEXT_BYTE = 0.8
_WORKER_DIED = "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"

# Number of bytes at the start of the training tokens that are checked for [UNK].
_CHECKED_BYTES = 1 << 20

# Report a held-out split with more than this fraction of the tokens, and more than twice the requested fraction: there
# are too few documents, or one is too long.
_LARGE_HELDOUT_SHARE = 0.2

# Files that a corpus folder may contain. `--overwrite` replaces only folders with a manifest and no other files.
_FILES = {store.MANIFEST: (store.MANIFEST, "*.bin", "vocab.txt", "*.model", "tokenizer.json", "pair_index")}

# Messages for the `problems` of the manifest, keyed by name. {} is the number of occurrences.
_PROBLEMS = {
    "characters_outside_doc": "{} characters outside <doc> ... </doc> were skipped",
    "documents_without_sentences": "{} documents were empty after cleaning and were skipped",
    "empty_files": "{} files were empty",
    "files_named_again": "{} files matched more than one --input and were read once",
    "invalid_utf8_bytes": "{} bytes were not UTF-8 and were replaced",
    "long_sentence_cuts": "long text without a sentence end was cut {} times, at whitespace if possible",
    "no_heldout_document": "no document could be held out: there are too few different documents for an evaluation set",
    "nul_characters": "{} NUL characters were skipped",
    "paragraphs_not_split": "{} paragraphs could not be split into sentences and became one sentence each",
    "single_sentence_documents": (
        "{} documents, more than half, have one sentence, so next-sentence prediction cannot be trained on them: in "
        "text: inputs, write a blank line between documents, not after each sentence; in datasets, write one document "
        "per row"
    ),
    "sentences_without_tokens": "{} sentences contained only control characters and were skipped",
    "unclosed_doc": "{} <doc> tags lacked </doc> and were read to the next <doc> or the end of their file",
    "undivided_files": (
        "{} files of text: have no blank line, so each is one document; if a file has several documents, write a blank "
        "line between them"
    ),
    "unknown_words": "{} words are <unk> in WikiText; use its raw version, such as wikitext-103-raw-v1",
}


def prepare(
    inputs: list[str],
    output: str | os.PathLike,
    *,
    vocabulary: Vocabulary | str | Path | None = None,
    vocabulary_kind: str = WORDPIECE,
    vocabulary_size: int = 30522,
    add_pieces: int = 0,
    lower_case: bool | None = None,
    heldout_fraction: float = 0.01,
    workers: int | None = None,
    runner: str = "local",
    runner_options: Sequence[str] = (),
    data_dir: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the corpus folder `output`, local or `gs://`, and returns its manifest.

    The module `store` describes the format of a corpus. The content depends only on the texts and settings, not on
    workers, runner or paths. The folder appears only when it is complete. Documents are held out by a hash of their
    content, so equal documents are in the same split.

    The arguments correspond to the options of `bertjax prepare`. Defaults of None mean:
      vocabulary: train a vocabulary on a sample of the text.
      lower_case: detect the case from `vocabulary`; True for a new vocabulary, but False for byte-level BPE, and for
        WordPiece if it would strip marks from many letters (`strips_letters`).
      workers: one process per core.
      data_dir: TFDS's default folder.
    """
    path = _resolve_output(output)
    workers = workers or available_cores()
    run = _runner(runner, runner_options, path, workers)
    loaded = vocabulary if isinstance(vocabulary, Vocabulary | None) else load_vocabulary(vocabulary, lower_case)
    if loaded is None:
        check_size(vocabulary_size, vocabulary_kind)
    elif loaded.kind == WORDPIECE and lower_case == is_cased(loaded.pieces):
        option, has = ("--uncased", "has") if lower_case else ("--cased", "does not have")
        logger.warning(f"{option} does not match {loaded.path}, which {has} upper-case letters; omit {option}")
    if add_pieces:
        if loaded is None:
            raise UsageError("--add_pieces needs a vocabulary to extend; set --vocab, or train one with --vocab_size")
        check_size(loaded.size + add_pieces, extended_kind(loaded))
    sources, duplicates = readers.find_sources(inputs, data_dir)
    text_bytes = sum(source.size_bytes or 0 for source in sources)
    check_free_space(path.parent, _DISK_BYTES_PER_TEXT_BYTE * text_bytes, f"the corpus {path}")

    with (
        atomic_folder(path, overwrite, "corpus", _FILES, last_file=store.MANIFEST) as folder,
        # Disable garbage collection in workers, because they create millions of small lists but no cycles.
        process_pool(workers, BertjaxError(_WORKER_DIED), gc.disable) as pool,
    ):
        used, extension = loaded, {}
        settings = {"heldout_fraction": heldout_fraction, "inputs": _describe_inputs(sources)}
        if used is None:
            # BERT's uncased tokenizer strips nonspacing marks; those of SentencePiece and BPE do not.
            strips = vocabulary_kind == WORDPIECE and lower_case is not False and strips_letters(sources)
            if strips:
                problem = "many letters have accents or vowel signs, which an uncased WordPiece vocabulary strips"
                logger.warning(f"{problem}; {'omit --uncased' if lower_case else 'the new vocabulary is cased'}")
            if lower_case is None:  # Byte-level BPE vocabularies are usually cased.
                lower_case = vocabulary_kind != BPE and not strips
            data = sample_training_data(sources, vocabulary_kind, lower_case, pool)
            used = learn_vocabulary(data, kind=vocabulary_kind, size=vocabulary_size, lower_case=lower_case)
            settings["vocabulary_size"] = vocabulary_size
        elif add_pieces:
            data = sample_training_data(sources, extended_kind(used), used.lower_case, pool)
            used, extension["added_pieces"] = extend_vocabulary(used, data, add_pieces)
            settings["add_pieces"] = add_pieces
        entries = run(sources, used, heldout_fraction, folder, pool)
        with (folder / store.array_file("train", "tokens")).open("rb") as file:
            start = np.frombuffer(file.read(_CHECKED_BYTES), store.token_dtype(used.size))
        if problem := used.unknown_problem(start):
            logger.warning(problem)
        entry = used.entry()
        (folder / entry["file"]).write_bytes(used.content)
        manifest = {
            **entries,
            **extension,
            "vocabulary": {
                **entry,
                "kind": used.kind,
                "size": used.size,
                "special_ids": named_special_ids(used),
                "trained_here": loaded is None,
            },
            "settings": settings,
            "token_dtype": store.token_dtype(used.size).str,
            "problems": entries["problems"] | ({"files_named_again": duplicates} if duplicates else {}),
            "files": entries["files"] | {entry["file"]: {"bytes": len(used.content), "sha256": used.sha256}},
        }
        store.write_manifest(folder, manifest)
    return store.read_manifest(path)


def _resolve_output(output: str | os.PathLike) -> AnyPath:
    if is_remote(output):
        if "/" not in str(output).partition("://")[2].strip("/"):
            raise UsageError(f"--output is a whole bucket: {output}; use a folder in it")
        return as_path(str(output))
    return Path(os.path.realpath(os.path.expanduser(output)))


def _runner(runner: str, options: Sequence[str], output: AnyPath, workers: int) -> Callable[..., dict[str, Any]]:
    """Returns a function `(sources, vocabulary, heldout_fraction, folder, pool)` that writes the corpus arrays."""
    if runner == "local":
        if options:
            raise UsageError("--runner_options has no effect without --runner beam; add --runner beam")
        return partial(run_local, workers=workers)
    # Suppress Beam's warnings about missing optional packages, which it logs on import.
    logging.disable(logging.WARNING)
    try:
        from bertjax.data.corpus import run_beam
    except ImportError as error:
        raise UsageError(f"--runner beam: {first_line(error)}; install it with pip install -e '.[beam]'") from error
    finally:
        logging.disable(logging.NOTSET)
    return partial(run_beam.run, options=run_beam.pipeline_options(options, output, workers))


def run_local(
    sources: Sequence[readers.Source],
    vocabulary: Vocabulary,
    heldout_fraction: float,
    folder: AnyPath,
    pool: Executor,
    workers: int,
) -> dict[str, Any]:
    """Writes the arrays of a corpus, and returns the manifest's entries `splits`, `problems` and `files`.

    Worker processes encode chunks of text, which the main process cuts from large sources.
    """
    groups, chunk_chars = group_sources(sources)
    sizes = [source.size_bytes for source in sources]
    shards = []
    with tempfile.TemporaryDirectory(dir=None if is_remote(folder) else folder) as temporary:
        work = Path(temporary)
        with progress_bar("prepare", None if None in sizes else sum(filter(None, sizes)), "B") as bar:
            divided = (divide_chunk(group, work, chunk_chars, bar.update) for group in groups)
            calls = ((chunk, vocabulary, work) for chunk in itertools.chain.from_iterable(divided))
            for shard in ordered_map(pool, encode_chunk, calls, _CHUNKS_PER_WORKER * workers):
                shards.append(shard)
                Path(f"{shard.path}.texts").unlink(missing_ok=True)
        heldout_below, entries = plan_splits(shards, heldout_fraction)
        arrays = itertools.product(store.SPLITS, store.ARRAYS)
        files = dict(write_array(folder, split, array, shards, heldout_below) for split, array in arrays)
    return {**entries, "files": files}


def summary(output: str | Path, manifest: dict[str, Any]) -> str:
    """Formats the sizes of a corpus and the problems of its inputs as a few lines of text."""
    vocabulary = manifest["vocabulary"]
    case = "lower-cased" if vocabulary["lower_case"] else "cased"
    lines = [f"{output}: {vocabulary['size']:,} {vocabulary['kind']} pieces, {case}, in {vocabulary['file']}"]
    settings, learned = manifest["settings"], vocabulary["size"]
    if added := manifest.get("added_pieces"):
        learned = added["count"]
        lines.append(
            f"  {added['count']:,} pieces were added to --vocab: {added['pieces_per_word_after']:.3f} pieces per word "
            f"(before: {added['pieces_per_word_before']:.3f}), {added['unknown_words_after']:.2%} unknown words "
            f"(before: {added['unknown_words_before']:.2%})"
        )
    if learned < (number := settings.get("add_pieces") or settings.get("vocabulary_size", 0)):
        lines.append(f"  the text yields {learned:,} useful pieces instead of {number:,}")
    splits = manifest["splits"]
    lines += [
        f"  {name}: {split['documents']:,} documents, {split['sentences']:,} sentences, "
        f"{split['tokens']:,} tokens of {split['text_bytes'] / 1e6:,.1f} MB"
        for name, split in splits.items()
    ]
    if splits["heldout"]["documents"] < 2:
        lines.append(
            "  training needs two held-out documents to evaluate on: prepare more documents (a file of "
            "a prose: input is usually one document, and each line of a lines: input), or raise --heldout"
        )
    share = splits["heldout"]["tokens"] / max(1, sum(split["tokens"] for split in splits.values()))
    if share > max(_LARGE_HELDOUT_SHARE, 2 * settings["heldout_fraction"]):
        lines.append(
            f"  {share:.0%} of the tokens are held out, because documents are never divided between training and "
            "evaluation: divide long files into several documents, or prepare more text"
        )
    lines += [f"  {_PROBLEMS[name].format(f'{count:,}')}" for name, count in manifest["problems"].items()]
    return "\n".join(lines)


def _describe_inputs(sources: list[readers.Source]) -> dict[str, Any]:
    # Omit file names, because the content of a corpus must not depend on paths.
    inputs: dict[str, Any] = {}
    for source in sources:
        entry = inputs.setdefault(source.kind, {"sources": 0, "bytes": 0})
        entry["sources"] += 1
        entry["bytes"] += source.size_bytes or 0
        if source.split:
            entry.setdefault("names", []).append(f"{source.name}:{source.split}")
    return inputs
