"""Division of fine-tuning data into training and evaluation splits."""

from collections.abc import Sequence

import numpy as np

from bertjax.data.finetuning.dev_split import first_segments, sample_fraction, select_dev_rows, subset
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import NO_SPLIT, FinetuningData

# Name of the evaluated split if `dev_share` holds out a part of the training data.
HELD_OUT = "held_out"


def evaluated_split(data: FinetuningData, train: bool) -> str:
    """Returns the split to evaluate: "dev", "test", HELD_OUT or NO_SPLIT."""
    split = data.eval_split
    if split == "dev" and data.dev_share:
        split = HELD_OUT
    elif split == "dev" and not getattr(data, "dev_file", "-"):
        split = NO_SPLIT
    if split == NO_SPLIT and not train:
        raise UsageError(
            "no evaluation data; set a dev or test file, such as --config.data.dev_file=FILE, and "
            "--config.data.eval_split=dev or test"
        )
    return split


def divide(data: FinetuningData, examples: Examples, read_stats: list[ReadStats]) -> tuple[Examples, Examples | None]:
    """Splits the examples of the training file into a training set and a held-out dev set.

    Args:
      data: data config. `train_share` is a fraction of the rows that `dev_share` does not hold out.
      examples: examples of the training file. Examples with the same first text stay together.
      read_stats: row counts. The last entry counts the training file. An entry for the dev set is appended.

    Returns:
      Training examples, and dev examples (None if `dev_share` is 0).
    """
    dev_mask = dev_rows(data, first_segments(examples), read_stats) if data.dev_share else np.zeros(len(examples), bool)
    rest = np.flatnonzero(~dev_mask)
    train = subset(examples, rest[sample_fraction(len(rest), data.train_share)])
    dev = subset(examples, np.flatnonzero(dev_mask)) if data.dev_share else None
    record_division(data, read_stats, len(train), None if dev is None else len(dev))
    return train, dev


def dev_rows(data: FinetuningData, contents: Sequence[bytes], read_stats: list[ReadStats]) -> np.ndarray:
    """Returns a bool mask of the training rows that are held out as dev set."""
    mask = select_dev_rows(contents, data.dev_share, data.dev_seed)
    if mask.all():
        raise UsageError(
            f"config.data.dev_share={data.dev_share} leaves no training rows: {read_stats[-1].file} contains only "
            f"{len(set(contents)):,} different texts or documents; use a dev file instead"
        )
    return mask


def record_division(data: FinetuningData, read_stats: list[ReadStats], train_rows: int, dev_rows: int | None) -> None:
    """Records how many rows of the training file are used for training and for dev."""
    training = read_stats[-1]
    training.used = train_rows
    if dev_rows is not None:
        source = f"{training.file} (dev: data.dev_share={data.dev_share:g}, dev_seed={data.dev_seed})"
        read_stats.append(ReadStats(source, read=training.read, used=dev_rows))
