"""Makes sure that neither split of a small corpus stays without documents."""

from pathlib import Path

import numpy as np

from bertjax.corpus import store

_COPY_ENTRIES = 1 << 20
# First document, document after the last, of one split.
_Run = tuple[store.Split, int, int]


def fewest_documents(documents: int) -> int:
    """Documents each split of a corpus of so many must have: 2, so that a NotNext sentence can come from another.

    Training has one in any case.
    """
    return 2 if documents >= 4 else int(documents >= 2)


def to_move(train: np.ndarray, heldout: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents to move for each split to have `fewest_documents`.

    Those held out are the ones of smallest hash in any case, so the ones nearest to the line between the splits move,
    and equal documents, whose hashes are equal, together.

    Args:
      train: uint64 [documents], hashes of the training documents.
      heldout: uint64 [documents], of the held-out ones.

    Returns:
      Sorted indices into `train` of documents to hold out, and into `heldout` of documents to train on; both empty
      where nothing need or can be done.
    """
    fewest = fewest_documents(train.size + heldout.size)
    none = np.empty(0, np.int64)
    if heldout.size < fewest:
        chosen = np.flatnonzero(np.isin(train, np.unique(train)[: fewest - heldout.size]))
        return (chosen, none) if train.size - chosen.size >= fewest else (none, none)
    if train.size < max(fewest, 1):
        chosen = np.flatnonzero(np.isin(heldout, np.unique(heldout)[::-1][: max(fewest, 1) - train.size]))
        return (none, chosen) if heldout.size - chosen.size >= fewest or not train.size else (none, none)
    return none, none


def rewrite(directory: Path, dtype: np.dtype, from_train: np.ndarray, from_heldout: np.ndarray) -> None:
    """Moves documents between finished splits; those moved come last. Memory stays bounded.

    Raises:
      OSError: the disk is full.
    """
    splits = {split: store.open_split(directory, split, dtype) for split in store.SPLITS}
    moving = dict(zip(store.SPLITS, (from_train, from_heldout), strict=True))
    for split, other in zip(store.SPLITS, reversed(store.SPLITS), strict=True):
        taken = [(splits[other], int(i), int(i) + 1) for i in moving[other]]
        _write(directory, split, [*_kept(splits[split], moving[split]), *taken])
    for split in store.SPLITS:
        for array in store.ARRAYS:
            _new(directory, split, array).replace(directory / store.array_file(split, array))


def _kept(split: store.Split, moving: np.ndarray) -> list[_Run]:
    edges = [-1, *map(int, moving), split.documents.size - 1]
    return [(split, a + 1, b) for a, b in zip(edges, edges[1:], strict=False) if b > a + 1]


def _new(directory: Path, split: str, array: str) -> Path:
    return directory / f"{store.array_file(split, array)}.new"


def _write(directory: Path, split: str, runs: list[_Run]) -> None:
    with (
        open(_new(directory, split, "tokens"), "wb") as tokens,
        open(_new(directory, split, "sentences"), "wb") as sentences,
        open(_new(directory, split, "documents"), "wb") as documents,
    ):
        token = sentence = 0
        for source, first, last in runs:
            first_sentence, last_sentence = int(source.documents[first]), int(source.documents[last])
            first_token, last_token = int(source.sentences[first_sentence]), int(source.sentences[last_sentence])
            _copy(source.documents, first, last, sentence - first_sentence, documents)
            _copy(source.sentences, first_sentence, last_sentence, token - first_token, sentences)
            _copy(source.tokens, first_token, last_token, 0, tokens)
            sentence += last_sentence - first_sentence
            token += last_token - first_token
        documents.write(np.array([sentence], store.OFFSET_DTYPE).tobytes())
        sentences.write(np.array([token], store.OFFSET_DTYPE).tobytes())


def _copy(array: np.ndarray, start: int, stop: int, shift: int, file) -> None:
    for at in range(start, stop, _COPY_ENTRIES):
        block = np.asarray(array[at : min(at + _COPY_ENTRIES, stop)])
        if shift:
            block = (block.astype(np.int64) + shift).astype(block.dtype)
        file.write(block.tobytes())
