"""Makes sure that neither split of a small corpus stays without documents."""

from pathlib import Path

import numpy as np

from bertjax.data.corpus import merging, store


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
        runs = [*_kept(splits[split], moving[split]), *_moved(splits[other], moving[other])]
        for array in store.ARRAYS:
            with open(_new(directory, split, array), "wb") as file:
                merging.write(merging.spans_of(runs, array), array, _read, file)
    for split in store.SPLITS:
        for array in store.ARRAYS:
            _new(directory, split, array).replace(directory / store.array_file(split, array))


def _kept(split: store.Split, moving: np.ndarray) -> list[merging.Run]:
    return merging.runs_without(split, split.sentences, split.documents, moving)


def _moved(split: store.Split, moving: np.ndarray) -> list[merging.Run]:
    return [merging.run_of(split, split.sentences, split.documents, int(i), int(i) + 1) for i in moving]


def _read(split: store.Split, array: str, first: int, last: int) -> np.ndarray:
    return np.asarray(getattr(split, array)[first:last])


def _new(directory: Path, split: str, array: str) -> Path:
    return directory / f"{store.array_file(split, array)}.new"
