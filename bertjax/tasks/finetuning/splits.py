"""Which data a fine-tuning run learns from, and what it is evaluated on."""

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.splitting import first_texts, held_out, share_of, subset
from bertjax.data.finetuning.tables import Reading
from bertjax.errors import UsageError

# What a task's files may have, and `predict` takes.
SPLITS = ("dev", "test")
# A share of the training data, or nothing.
SHARE, NONE = "share", "none"


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    data = config.data
    if data.eval_split not in (*SPLITS, NONE):
        raise UsageError(f"config.data.eval_split is {data.eval_split!r}; known: {', '.join((*SPLITS, NONE))}")
    if not 0 < data.train_share <= 1:
        raise UsageError(f"config.data.train_share is {data.train_share}; it must be above 0 and at most 1")
    if not 0 <= data.dev_share < 1:
        raise UsageError(f"config.data.dev_share is {data.dev_share}; it must be at least 0 (none) and below 1")
    if not 0 <= data.dev_seed < 2**32:
        raise UsageError(f"config.data.dev_seed is {data.dev_seed}; it must be between 0 and 2^32 - 1")
    if data.dev_seed and not data.dev_share:
        raise UsageError(f"config.data.dev_seed is {data.dev_seed}, and config.data.dev_share cuts off nothing")
    if data.dev_share and data.eval_split == NONE:
        raise UsageError(
            f"config.data.dev_share is {data.dev_share}, and config.data.eval_split=none evaluates nothing"
        )


def evaluated(data: ConfigDict, train: bool) -> str:
    """What is evaluated: "dev" or "test" of the task's own files, SHARE of its training data, or NONE.

    Raises:
      UsageError: it is nothing, and there is no training either.
    """
    split = data.eval_split
    if split == "dev" and data.dev_share:
        split = SHARE
    elif split == "dev" and not data.get("dev_file", "-"):
        split = NONE
    if split == NONE and not train:
        raise UsageError(
            "there is nothing to evaluate: give dev or test data, such as --config.data.dev_file=FILE for your own, "
            "and --config.data.eval_split=dev or test"
        )
    return split


def divided(data: ConfigDict, whole: Examples, readings: list[Reading]) -> tuple[Examples, Examples | None]:
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


def dev_rows(data: ConfigDict, contents: Sequence[bytes], readings: list[Reading]) -> np.ndarray:
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


def cut_off(data: ConfigDict, training: Reading, rows: int) -> Reading:
    """The reading of a dev set that is a share of the training file."""
    where = f"{training.file} (dev: data.dev_share={data.dev_share:g}, dev_seed={data.dev_seed})"
    return Reading(where, read=training.read, used=rows)
