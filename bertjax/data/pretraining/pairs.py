"""Sentence pairs of documents, by the rule of google-research/bert `create_pretraining_data.py`.

That script processes one document at a time. Since its decisions for a document do not depend on other documents, this
module processes all documents of a block together with array operations, one chunk (the sentences of one pair) per
document at a time. The distribution of pairs is the same.
"""

from collections.abc import Iterator

import numpy as np

from bertjax.errors import BertjaxError

# One document in ten has a short target length, like the probability 0.1 of short targets in google-research/bert.
_SHORT_EVERY = 10
_GOLDEN_RATIO = 0.6180339887498949
# Fields of a pair before truncation: token offsets and lengths of A and B; label (0 IsNext, 1 NotNext).
RECORD = np.dtype([("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("label", "<i4")])

# Limits of each array that `document_pairs` yields, to bound memory: number of pairs, and number of rounds. A round
# makes one pair of each unfinished document. Late rounds have few documents, so limiting the pairs is not enough.
_MAX_ROWS = 1 << 18
_MAX_ROUNDS = 1 << 12


def document_pairs(
    sentences: np.ndarray, documents: np.ndarray, first: int, targets: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Splits documents `first` to `first + len(targets) - 1` into pairs.

    A chunk is the next sentences of a document, until they reach the target length or the document ends. A is a random
    number of sentences from the start of the chunk: at least one, and not all unless there is only one.

    With probability 1/2, and always if the chunk is a single sentence, the pair is NotNext. Then B starts at a random
    sentence of a random other document and fills the rest of the target length. The chunk's unused sentences return to
    the document. Otherwise, the pair is IsNext, and B is the rest of the chunk. Hence more than half of the labels are
    NotNext (54 % on Wikipedia), as in google-research/bert; the paper states 50 %.

    Every sentence is part of A or of an IsNext B in exactly one pair. Spans are not truncated yet.

    Args:
      sentences: token offset of each sentence, then the number of tokens, int64 [sentences + 1].
      documents: first sentence of each document, then the number of sentences, int64 [documents + 1]; at least two
        documents.
      first: first document to split.
      targets: target length of each document to split, int64, from `target_lengths`.
      rng: random generator; only its `random` is used.

    Yields:
      Arrays of RECORD, each sorted by `a_start`.
    """
    last = first + targets.size
    cursor, end = documents[first:last].copy(), documents[first + 1 : last + 1]
    base = cursor[0]
    offsets = sentences[base : end[-1] + 1]
    if np.any(end <= cursor) or np.any(offsets[1:] <= offsets[:-1]):
        raise BertjaxError(
            f"empty document or sentence in documents {first} to {last - 1} of the corpus; prepare the corpus again"
        )

    chunks: list[tuple[np.ndarray, ...]] = []
    rows = 0
    active = np.arange(targets.size)
    while active.size:
        begin, target = cursor[active], targets[active]
        stop = base + np.searchsorted(offsets, sentences[begin] + target)
        stop = np.minimum(stop, end[active])
        a_uniform, next_uniform = rng.random((2, active.size))
        a_stop = begin + 1 + _below(stop - begin - 1, a_uniform)
        not_next = (a_stop == stop) | (next_uniform < 0.5)
        chunks.append((first + active, target, begin, a_stop, stop, not_next))
        rows += active.size
        cursor[active] = np.where(not_next, a_stop, stop)
        active = active[cursor[active] < end[active]]
        if rows >= _MAX_ROWS or len(chunks) >= _MAX_ROUNDS:
            yield _records(sentences, documents, chunks, rng)
            chunks, rows = [], 0
    if chunks:
        yield _records(sentences, documents, chunks, rng)


def target_lengths(lengths: np.ndarray, max_tokens: int, pass_index: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the target lengths of documents for one pass.

    A target is `max_tokens` or, with probability 0.1, uniform in 2..max_tokens, as in google-research/bert. With
    independent draws, the mean row length of a small corpus would vary by several percent, since a long document with a
    short target yields many rows. Therefore, each document in a group of ten of similar length has a short target in
    one of ten passes. Short targets follow a golden-ratio sequence, which covers the range evenly.

    Args:
      lengths: tokens of each document, [documents].
      max_tokens: longest target.
      pass_index: index of the pass.
      rng: random generator in the same state for every pass.

    Returns:
      Target lengths, int64 [documents].
    """
    groups = -(-lengths.size // _SHORT_EVERY)
    turns = np.argsort(rng.random((groups, _SHORT_EVERY)), axis=1)
    chosen = _SHORT_EVERY * np.arange(groups) + turns[:, pass_index % _SHORT_EVERY]
    # The last group may have fewer than ten documents.
    group = np.flatnonzero(chosen < lengths.size)
    short = np.argsort(lengths, kind="stable")[chosen[group]]
    uniform = (rng.random() + _GOLDEN_RATIO * (pass_index * groups + group)) % 1
    targets = np.full(lengths.size, max_tokens, np.int64)
    targets[short] = 2 + _below(max_tokens - 1, uniform)
    return targets


def _records(
    sentences: np.ndarray, documents: np.ndarray, chunks: list[tuple[np.ndarray, ...]], rng: np.random.Generator
) -> np.ndarray:
    document, target, begin, a_stop, stop, not_next = (np.concatenate(column) for column in zip(*chunks, strict=True))
    records = np.empty(begin.size, RECORD)
    records["a_start"] = sentences[begin]
    records["a_length"] = sentences[a_stop] - records["a_start"]
    # B of NotNext pairs is overwritten below.
    records["b_start"] = sentences[a_stop]
    records["b_length"] = sentences[stop] - records["b_start"]
    records["label"] = not_next

    document_uniform, sentence_uniform = rng.random((2, np.count_nonzero(not_next)))
    other = _below(documents.size - 2, document_uniform)
    other += other >= document[not_next]
    b_begin, b_end = documents[other], documents[other + 1]
    b_begin = b_begin + _below(b_end - b_begin, sentence_uniform)
    b_start = sentences[b_begin]
    # A random B has at least one sentence, even if A reaches the target.
    b_target = np.maximum(target[not_next] - records["a_length"][not_next], 1)
    b_stop = np.minimum(np.searchsorted(sentences, b_start + b_target), b_end)
    records["b_start"][not_next] = b_start
    records["b_length"][not_next] = sentences[b_stop] - b_start
    return records[np.argsort(records["a_start"], kind="stable")]


def _below(bound: np.ndarray | int, uniform: np.ndarray) -> np.ndarray:
    """Maps uniforms in [0, 1) to integers in 0..bound-1, or to 0 if the bound is 0."""
    return (uniform * bound).astype(np.int64)
