"""Selection of the split to evaluate, dev sets held out from training data, and random fractions of training data."""

import hashlib
import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np

from bertjax.data.finetuning.examples import Source
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import NO_SPLIT, FinetuningData

# Name of the evaluated split if `dev_share` holds out a dev set from the training data.
HELD_OUT = "held_out"


def evaluated_split(data: FinetuningData, train: bool) -> str:
    """Returns the split to evaluate: "dev", "test", HELD_OUT or NO_SPLIT."""
    split = data.eval_split
    if split == "dev" and data.dev_share:
        split = HELD_OUT
    elif split == "dev" and not (getattr(data, "dev_file", "-") or getattr(data, "retrieval", "")):
        split = NO_SPLIT
    if split == NO_SPLIT and not train:
        raise UsageError(
            "no evaluation data; set a dev or test file, such as --config.data.dev_file=FILE, and set "
            "--config.data.eval_split to the split of this file, dev or test"
        )
    return split


def divide(
    data: FinetuningData, rows: Source, read_stats: list[ReadStats], by_document: bool
) -> tuple[Source, Source | None]:
    """Divides the rows of the training file into training rows and dev rows. Without `dev_share`, dev rows are None.

    Holds out `dev_share` first. `train_share` is a fraction of the remaining rows or, with `by_document`, documents.
    Sets the number of used rows in the last item of `read_stats`, and appends an item for the dev rows.
    """
    training, dev = read_stats[-1], None
    if data.dev_share:
        documents = _documents(rows)
        groups = itertools.groupby(zip(documents, rows.texts(), strict=True), key=operator.itemgetter(0))
        contents = [b"\n".join(text for _, text in group) for _, group in groups]
        selected = select_dev_rows(contents, data.dev_share, data.dev_seed)
        if selected.all():
            raise UsageError(
                f"config.data.dev_share={data.dev_share} leaves no training rows: {training.file} contains only "
                f"{len(set(contents)):,} distinct texts or documents; use a dev file instead"
            )
        mask = selected[documents]
        rows, dev = rows.subset(np.flatnonzero(~mask)), rows.subset(np.flatnonzero(mask))
        source = f"{training.file} (dev: data.dev_share={data.dev_share:g}, dev_seed={data.dev_seed})"
        read_stats.append(ReadStats(source, read=training.read, used=len(dev)))
    if data.train_share < 1:
        documents = _documents(rows) if by_document else np.arange(len(rows))
        sample = sample_fraction(documents[-1] + 1, data.train_share)
        rows = rows.subset(np.flatnonzero(np.isin(documents, sample)))
    training.used = len(rows)
    return rows, dev


def _documents(rows: Source) -> np.ndarray:
    """Returns the document index of each row, int [N]. If there is only one document, each row counts as a document."""
    names, numbers = np.unique(np.array(rows.document_numbers()), return_inverse=True)
    return numbers if len(names) > 1 else np.arange(len(rows))


def select_dev_rows(contents: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Returns a mask that selects a fraction of N rows as the dev set, bool [N].

    Rows with equal content are selected together, so that no dev row is also a training row. Contents are selected in
    the order of a hash keyed with `seed`, so the selection does not depend on the order of the rows.
    """
    key = seed.to_bytes(8, "little")
    hashes = [hashlib.blake2b(content, key=key, digest_size=16).digest() for content in contents]
    # Round, because 0.07 * 100 is above 7 in floating point.
    count = max(1, math.ceil(round(fraction * len(hashes), 6)))
    last = sorted(hashes)[count - 1]
    return np.array([digest <= last for digest in hashes], bool)


def sample_fraction(count: int, fraction: float) -> np.ndarray:
    """Samples a fraction of the indices 0..count-1 with a fixed seed. Returns at least one index, ascending, int64."""
    order = np.random.default_rng(0).permutation(count)
    # Round, because 0.29 * 100 is below 29 in floating point.
    return np.sort(order[: max(1, int(round(fraction * count, 6)))])
