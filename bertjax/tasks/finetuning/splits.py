"""Selection of the split to evaluate, dev sets held out from training data, and random fractions of training data."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import NO_SPLIT, FinetuningData

# Name of the evaluated split if `dev_share` holds out a dev set from the training data.
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
            "no evaluation data; set a dev or test file, such as --config.data.dev_file=FILE, and set "
            "--config.data.eval_split to the split of this file, dev or test"
        )
    return split


def divide_examples(
    data: FinetuningData, examples: Examples, read_stats: list[ReadStats]
) -> tuple[Examples, Examples | None]:
    """Divides the examples of the training file into training and dev examples (None if `dev_share` is 0).

    Examples with the same first text stay together. See `divide_rows`.
    """
    train, dev = divide_rows(data, len(examples), lambda: first_segments(examples), read_stats)
    return subset(examples, train), subset(examples, dev) if data.dev_share else None


def divide_rows(
    data: FinetuningData, count: int, read_contents: Callable[[], Sequence[bytes]], read_stats: list[ReadStats]
) -> tuple[np.ndarray, np.ndarray]:
    """Divides the `count` rows of the training file. Returns ascending indices of the training and of the dev rows.

    `train_share` is a fraction of the rows that remain after holding out `dev_share`. `read_contents` returns the
    content of each row; rows with the same content are held out together. Records the division in `read_stats`.
    """
    dev_mask = select_dev_units(data, read_contents(), read_stats) if data.dev_share else np.zeros(count, bool)
    rest, dev = np.flatnonzero(~dev_mask), np.flatnonzero(dev_mask)
    train = rest[sample_fraction(len(rest), data.train_share)]
    record_division(data, read_stats, len(train), len(dev))
    return train, dev


def record_division(data: FinetuningData, read_stats: list[ReadStats], train_rows: int, dev_rows: int) -> None:
    """Sets the number of used rows in the last item of `read_stats`, and appends an item for a held-out dev set."""
    training = read_stats[-1]
    training.used = train_rows
    if data.dev_share:
        source = f"{training.file} (dev: data.dev_share={data.dev_share:g}, dev_seed={data.dev_seed})"
        read_stats.append(ReadStats(source, read=training.read, used=dev_rows))


def select_dev_units(data: FinetuningData, contents: Sequence[bytes], read_stats: list[ReadStats]) -> np.ndarray:
    """Returns a mask of the rows or documents to hold out as dev set, bool [N]."""
    mask = select_dev_rows(contents, data.dev_share, data.dev_seed)
    if mask.all():
        raise UsageError(
            f"config.data.dev_share={data.dev_share} leaves no training rows: {read_stats[-1].file} contains only "
            f"{len(set(contents)):,} distinct texts or documents; use a dev file instead"
        )
    return mask


def select_dev_rows(contents: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Returns a mask that selects a fraction of N rows as the dev set, bool [N].

    Rows with equal content are selected together, so that no dev row is also a training row. Contents are selected in
    the order of a hash keyed with `seed`, so the selection does not depend on the order of the rows.
    """
    key = seed.to_bytes(8, "little")
    hashes = [hashlib.blake2b(content, key=key, digest_size=16).digest() for content in contents]
    counts = Counter(hashes)
    selected: set[bytes] = set()
    rows = 0
    for digest in sorted(counts):
        # Round, because 0.1 * 30 is above 3 in floating point.
        if rows >= round(fraction * len(contents), 6):
            break
        selected.add(digest)
        rows += counts[digest]
    return np.array([digest in selected for digest in hashes], bool)


def sample_fraction(count: int, fraction: float) -> np.ndarray:
    """Samples a fraction of the indices 0..count-1 with a fixed seed. Returns at least one index, ascending, int64."""
    if fraction == 1:
        return np.arange(count)
    order = np.random.default_rng(0).permutation(count)
    # Round, because 0.29 * 100 is below 29 in floating point.
    return np.sort(order[: max(1, int(round(fraction * count, 6)))])


def subset(examples: Examples, indices: np.ndarray) -> Examples:
    """Returns the examples with the given indices, in that order."""
    group = examples.sequences_per_example
    sequences = (indices[:, None] * group + np.arange(group)).reshape(-1)
    lengths = np.diff(examples.offsets)[sequences]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1]) + np.repeat(examples.offsets[sequences] - offsets[:-1], lengths)
    return Examples(
        offsets,
        {name: values[tokens] for name, values in examples.tokens.items()},
        {name: values[indices] for name, values in examples.rows.items()},
        group,
        tuple(examples.lines[index] for index in indices) if examples.lines else (),
    )


def first_segments(examples: Examples) -> list[bytes]:
    """Returns the token ids of each example's first segment as bytes, to find examples with equal segments."""
    ids, is_first = examples.tokens["input_ids"], examples.tokens["segment_ids"] == 0
    group = examples.sequences_per_example
    starts, ends = (examples.offsets[index::group][: len(examples)] for index in (0, 1))
    return [ids[start:end][is_first[start:end]].tobytes() for start, end in zip(starts, ends, strict=True)]


def divide_tagged(
    data: FinetuningData, tagged: TaggedText, by_document: bool, read_stats: list[ReadStats]
) -> tuple[TaggedText, TaggedText | None]:
    """Divides the training file into training and dev sentences (None if `dev_share` is 0), like `divide_rows`.

    The dev set consists of documents if there are several. `train_share` selects documents only if `by_document` is
    True.
    """
    train, dev = tagged, None
    if data.dev_share:
        ends = unit_ends(tagged, documents=True)
        texts = ["\n".join(tagged.words[start:end]).encode() for start, end in itertools.pairwise([0, *ends])]
        dev_mask = select_dev_units(data, texts, read_stats)
        train, dev = tagged_subset(tagged, ends, ~dev_mask), tagged_subset(tagged, ends, dev_mask)
    if data.train_share < 1:
        ends = unit_ends(train, by_document)
        train = tagged_subset(train, ends, np.isin(np.arange(len(ends)), sample_fraction(len(ends), data.train_share)))
    record_division(data, read_stats, len(train.sentence_ends), len(dev.sentence_ends) if dev else 0)
    return train, dev


def unit_ends(tagged: TaggedText, documents: bool) -> list[int]:
    """Returns the end (exclusive) word index of each unit that a split must not divide.

    Units are documents if `documents` is True and the text has several documents. Otherwise, units are sentences.
    """
    return tagged.document_ends if documents and len(tagged.document_ends) > 1 else tagged.sentence_ends


def tagged_subset(tagged: TaggedText, ends: Sequence[int], mask: np.ndarray) -> TaggedText:
    """Returns the sentences of the selected units. Documents without a selected sentence are dropped.

    `mask` is bool [units], and `ends` contains the ends of the units, from `unit_ends`.
    """
    by_sentence = mask if len(ends) == len(tagged.sentence_ends) else mask[np.searchsorted(ends, tagged.sentence_ends)]
    lengths = np.diff(tagged.sentence_ends, prepend=0)
    chosen = np.repeat(by_sentence, lengths)
    sentence_ends = np.cumsum(lengths[by_sentence]).tolist()
    document_ends = sentence_ends
    if tagged.document_ends != tagged.sentence_ends:
        document_ends = np.unique(np.append(0, np.cumsum(chosen))[tagged.document_ends])
        document_ends = document_ends[document_ends > 0].tolist()
    words, tags = (list(itertools.compress(values, chosen)) for values in (tagged.words, tagged.tags))
    return TaggedText(words, tags, sentence_ends, document_ends, tuple(itertools.compress(tagged.lines, by_sentence)))
