"""Which data a fine-tuning run learns from, and what it is evaluated on."""

from collections.abc import Sequence

import numpy as np

from bertjax.data.finetuning.dev_split import first_texts, held_out, share_of, subset
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.settings import NONE, FinetuningData

# Evaluated where a share of the training data is cut off.
SHARE = "share"


def evaluated(data: FinetuningData, train: bool) -> str:
    """What is evaluated: "dev" or "test" of the task's own files, SHARE of its training data, or NONE.

    Raises:
      UsageError: it is nothing, and there is no training either.
    """
    split = data.eval_split
    if split == "dev" and data.dev_share:
        split = SHARE
    elif split == "dev" and not getattr(data, "dev_file", "-"):
        split = NONE
    if split == NONE and not train:
        raise UsageError(
            "there is nothing to evaluate: give dev or test data, such as --config.data.dev_file=FILE for your own, "
            "and --config.data.eval_split=dev or test"
        )
    return split


def divided(data: FinetuningData, whole: Examples, readings: list[ReadStats]) -> tuple[Examples, Examples | None]:
    """The examples to train on, and those that are cut off for dev; None where there are none.

    Args:
      data: its `train_share` is of what `dev_share` leaves.
      whole: of the training file; those with the same first text stay together.
      readings: the last is that of the training file; gains one of what is cut off.
    """
    held = dev_rows(data, first_texts(whole), readings) if data.dev_share else np.zeros(len(whole), bool)
    rest = np.flatnonzero(~held)
    trained = subset(whole, rest[share_of(len(rest), data.train_share)])
    readings[-1].used = len(trained)
    dev = subset(whole, np.flatnonzero(held)) if data.dev_share else None
    if dev is not None:
        readings.append(cut_off(data, readings[-1], len(dev)))
    return trained, dev


def dev_rows(data: FinetuningData, contents: Sequence[bytes], readings: list[ReadStats]) -> np.ndarray:
    """Which rows of the training data are cut off for dev: bool [rows].

    Raises:
      UsageError: that leaves nothing to train on.
    """
    held = held_out(contents, data.dev_share, data.dev_seed)
    if held.all():
        raise UsageError(
            f"config.data.dev_share={data.dev_share} of {readings[-1].file} leaves nothing to train on: it has "
            f"{len(set(contents)):,} different texts or documents, which stay whole; give a dev file instead"
        )
    return held


def cut_off(data: FinetuningData, training: ReadStats, rows: int) -> ReadStats:
    """The reading of a dev set that is a share of the training file."""
    where = f"{training.file} (dev: data.dev_share={data.dev_share:g}, dev_seed={data.dev_seed})"
    return ReadStats(where, read=training.read, used=rows)
