"""Helpers that write small corpora in the on-disk format without `prepare`."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from bertjax.data.corpus import store
from bertjax.data.pretraining.batches import train_dataset
from bertjax.data.pretraining.config import Phase
from bertjax.data.shard import SINGLE_SHARD
from bertjax.utils.io import file_sha256

SPECIAL_PIECES = {0: "[PAD]", 7: "[UNK]", 8: "[CLS]", 9: "[SEP]", 11: "[MASK]"}


def write_pieces(path: Path, size: int) -> Path:
    """Writes a WordPiece vocabulary. Special pieces are among the first ids. A quarter of all pieces are continuations.

    Returns `path`.
    """
    pieces = [SPECIAL_PIECES.get(i, f"##p{i}" if i % 4 == 0 else f"p{i}") for i in range(size)]
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def write_corpus(
    path: Path, splits: dict[str, tuple[np.ndarray, list[list[int]]]], vocabulary_size: int
) -> store.Corpus:
    """Writes and opens a corpus. `splits` maps names to token ids and the sentence lengths of each document."""
    path.mkdir(parents=True)
    write_pieces(path / "vocab.txt", vocabulary_size)
    dtype = store.token_dtype(vocabulary_size)
    for split, (tokens, documents) in splits.items():
        lengths = [length for document in documents for length in document]
        assert sum(lengths) == len(tokens)
        arrays = {
            "tokens": np.asarray(tokens, dtype),
            "sentences": np.cumsum([0, *lengths]).astype(store.OFFSET_DTYPE),
            "documents": np.cumsum([0, *(len(document) for document in documents)]).astype(store.OFFSET_DTYPE),
        }
        for name, array in arrays.items():
            array.tofile(path / store.array_file(split, name))
    vocabulary = {"file": "vocab.txt", "lower_case": True, "size": vocabulary_size}
    files = {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in path.iterdir()}
    manifest = {"files": files, "problems": {}, "token_dtype": dtype.str, "vocabulary": vocabulary}
    store.write_manifest(path, manifest)
    return store.open_corpus(path)


def random_documents(count: int, seed: int) -> list[list[int]]:
    """Returns the sentence lengths of random documents, log-normally distributed as in an encyclopedia."""
    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, rng.lognormal(3.0, 1.0, count)).astype(int)
    return [np.maximum(1, rng.lognormal(3.0, 0.6, size)).astype(int).tolist() for size in sizes]


def token_offsets(corpus: store.Corpus, split: str, ids: np.ndarray) -> np.ndarray:
    """Returns the index in a split of each token id, or -1, for a split whose tokens all have different ids."""
    tokens = getattr(corpus, split).tokens
    offsets = np.full(corpus.vocabulary().size, -1)
    offsets[tokens] = np.arange(len(tokens))
    return offsets[ids]


def pretraining_batches(corpus: store.Corpus, phase: Phase, **arguments) -> tf.data.Dataset:
    """Returns the training batches of a corpus; `arguments` replace defaults of `train_dataset`'s arguments."""
    defaults = {"seed": 0, "dupe_factor": 2, "start_step": 0, "shard": SINGLE_SHARD}
    return train_dataset(corpus, phase, **{**defaults, **arguments})
