"""Parts of a training set: a share of it to learn from, and a share cut off to be evaluated on."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tagged import Tagged


def held_out(contents: Sequence[bytes], share: float, seed: int) -> np.ndarray:
    """Which of N rows a share cuts off: bool [N].

    Rows of equal content stay together, so that nothing that is trained on is evaluated. Contents are taken in the
    order of a hash of them and the seed until they have the share of rows: which are taken depends on the contents and
    the seed alone, not on where they stand in a file.
    """
    key = seed.to_bytes(8, "little")
    hashes = [hashlib.blake2b(content, key=key, digest_size=16).digest() for content in contents]
    counts = Counter(hashes)
    taken: set[bytes] = set()
    rows = 0
    for content in sorted(counts):
        # Rounded, since 0.1 * 30 is more than 3.
        if rows >= round(share * len(contents), 6):
            break
        taken.add(content)
        rows += counts[content]
    return np.array([content in taken for content in hashes], bool)


def share_of(count: int, share: float) -> np.ndarray:
    """Which of `count` rows a share of them is, at least one: int64, in order. The same for every run: drawn with 0."""
    if share == 1:
        return np.arange(count)
    order = np.random.default_rng(0).permutation(count)
    # Rounded, since 0.29 * 100 is less than 29.
    return np.sort(order[: max(1, int(round(share * count, 6)))])


def subset(examples: Examples, rows: np.ndarray) -> Examples:
    """The examples of these indices, in their order."""
    sequences = (rows[:, None] * examples.choices + np.arange(examples.choices)).reshape(-1)
    lengths = np.diff(examples.offsets)[sequences]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1]) + np.repeat(examples.offsets[sequences] - offsets[:-1], lengths)
    return Examples(
        offsets,
        {name: values[tokens] for name, values in examples.tokens.items()},
        {name: values[rows] for name, values in examples.rows.items()},
        examples.choices,
        tuple(examples.lines[row] for row in rows) if examples.lines else (),
    )


def first_texts(examples: Examples) -> list[bytes]:
    """The tokens of each example's first text, of which pairs, and choices, may have many with other second ones."""
    ids, first = examples.tokens["input_ids"], examples.tokens["segment_ids"] == 0
    starts, ends = (examples.offsets[place :: examples.choices][: len(examples)] for place in (0, 1))
    return [ids[start:end][first[start:end]].tobytes() for start, end in zip(starts, ends, strict=True)]


def units(tagged: Tagged, documents: bool) -> list[int]:
    """Words up to the end of each document, or, where there is one alone or sentences are wanted, of each sentence."""
    return tagged.document_ends if documents and len(tagged.document_ends) > 1 else tagged.sentence_ends


def unit_texts(tagged: Tagged, ends: Sequence[int]) -> list[bytes]:
    """The words of each unit."""
    return ["\n".join(tagged.words[start:end]).encode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def subset_of_tagged(tagged: Tagged, ends: Sequence[int], chosen: np.ndarray) -> Tagged:
    """The sentences of the chosen units, bool [units]; documents without one are gone."""
    kept = chosen if len(ends) == len(tagged.sentence_ends) else chosen[np.searchsorted(ends, tagged.sentence_ends)]
    words: list[str] = []
    tags: list[str] = []
    sentence_ends: list[int] = []
    document_ends: list[int] = []
    lines: list[int] = []
    closing = {*tagged.document_ends}
    by_row = tagged.document_ends == tagged.sentence_ends
    start = 0
    for index, (end, wanted) in enumerate(zip(tagged.sentence_ends, kept, strict=True)):
        if wanted:
            words += tagged.words[start:end]
            tags += tagged.tags[start:end]
            sentence_ends.append(len(words))
            lines += tagged.lines[index : index + 1]
        if by_row:
            document_ends = sentence_ends
        elif end in closing and len(words) > (document_ends[-1] if document_ends else 0):
            document_ends.append(len(words))
        start = end
    return Tagged(words, tags, sentence_ends, document_ends, tuple(lines))
