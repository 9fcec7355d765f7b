"""Sentence pairs, as in google-research/bert `create_pretraining_data.py`, and pieces of documents.

The script processes one document at a time. This module processes many documents at once with array operations. Each
iteration makes one pair from each unfinished document. The distribution of pairs is the same, since the script's
decisions for a document do not depend on other documents.
"""

from collections.abc import Iterator

import numpy as np

# Kinds of pairs: for BERT's next-sentence prediction, and for ALBERT's sentence-order prediction.
NEXT_SENTENCE, SENTENCE_ORDER = "next_sentence", "sentence_order"
# Label names by kind of pairs, in the order of the label ids.
LABELS = {"": (), NEXT_SENTENCE: ("IsNext", "NotNext"), SENTENCE_ORDER: ("in order", "reversed or random")}
# In each pass, exactly one of ten documents of similar length has a short target length. In google-research/bert, each
# document has a short target length with probability 0.1.
_SHORT_EVERY = 10
_GOLDEN_RATIO = 0.6180339887498949
# Fields of a pair before truncation: token offsets and lengths of A and B; label (an index in LABELS).
RECORD = np.dtype([("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("label", "<i4")])

# A piece of a document may be shorter than the row by up to this fraction, to end at a sentence boundary. On Wikipedia
# at length 512, packed rows have 2 % padding with this limit, and 3 to 5 % without it.
_MAX_GAP = 1 / 16

# Maximum pairs and rounds per array that `document_pairs` yields, to bound memory. A round makes one pair from each
# unfinished document. Rounds are also limited, because late rounds make few pairs but have a fixed overhead.
_MAX_PAIRS = 1 << 18
_MAX_ROUNDS = 1 << 12


def document_pairs(
    sentences: np.ndarray,
    documents: np.ndarray,
    first: int,
    targets: np.ndarray,
    rng: np.random.Generator,
    pairing: str,
) -> Iterator[np.ndarray]:
    """Splits documents from index `first` into pairs. `targets` contains a target length for each document.

    A chunk contains the next sentences of a document, until the target length is reached or the document ends. Segment
    A contains a random number of sentences from the start of the chunk. At least one sentence remains, unless the chunk
    has only one.

    If sentences remain, the pair is IsNext with probability 1/2, and B contains the remaining sentences. All other
    pairs are NotNext: B starts at a random sentence of another random document, and fills the rest of the target
    length. After a NotNext pair, the next chunk starts with the remaining sentences. More than half of the labels are
    NotNext (54 % on Wikipedia), as in google-research/bert. The paper states 50 %.

    Every sentence is in exactly one segment A or IsNext segment B. Pairs are not truncated.

    With SENTENCE_ORDER, a pair with remaining sentences is never NotNext. Its segments are swapped with probability
    1/2, and the label is then 1, as in ALBERT (arXiv 1909.11942).

    `sentences` and `documents` are the offsets of `store.Split` as int64, for at least two documents. `targets` are
    from `target_lengths`. Yields arrays of RECORD, each in the order of the corpus.
    """
    last = first + targets.size
    cursor, end = documents[first:last].copy(), documents[first + 1 : last + 1]
    base = cursor[0]
    offsets = sentences[base : end[-1] + 1]
    chunks: list[tuple[np.ndarray, ...]] = []
    pairs = 0
    active = np.arange(targets.size)
    while active.size:
        begin, target = cursor[active], targets[active]
        stop = base + np.searchsorted(offsets, sentences[begin] + target)
        stop = np.minimum(stop, end[active])
        a_uniform, next_uniform = rng.random((2, active.size))
        a_stop = begin + 1 + _below(stop - begin - 1, a_uniform)
        is_last, draws_label_one = a_stop == stop, next_uniform < 0.5
        not_next = is_last if pairing == SENTENCE_ORDER else is_last | draws_label_one
        chunks.append((first + active, target, begin, a_stop, stop, not_next, draws_label_one & ~not_next))
        pairs += active.size
        cursor[active] = np.where(not_next, a_stop, stop)
        active = active[cursor[active] < end[active]]
        if not active.size or pairs >= _MAX_PAIRS or len(chunks) >= _MAX_ROUNDS:
            yield _records(sentences, documents, chunks, rng)
            chunks, pairs = [], 0


def document_pieces(
    sentences: np.ndarray, documents: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Divides the documents into pieces of at most `max_tokens` tokens.

    A document of at most `max_tokens` tokens is one piece. In longer documents, the first piece has a random maximum
    length, so that the pieces differ between passes. A piece ends at a sentence boundary, unless it would then be
    shorter than `(1 - _MAX_GAP) * max_tokens`. The first and last pieces may be shorter.

    `sentences` and `documents` are the offsets of `store.Split` as int64; `documents` may be a slice.
    Yields arrays of RECORD, each in the order of the corpus. The pieces are segments A, with an empty B and label -1.
    """
    offsets = sentences[documents[0] : documents[-1] + 1]
    cursor, end = sentences[documents[:-1]], sentences[documents[1:]]
    longest = np.where(end - cursor > max_tokens, rng.integers(1, max_tokens + 1, end.size), max_tokens)
    shortest = np.ones_like(longest)
    active, chunks, pieces = np.flatnonzero(cursor < end), [], 0
    while active.size:
        start = cursor[active]
        limit = start + longest[active]
        stop = offsets[np.searchsorted(offsets, limit, side="right") - 1]
        stop = np.minimum(np.where(stop - start < shortest[active], limit, stop), end[active])
        chunks.append((start, stop))
        pieces += active.size
        cursor[active], longest[active], shortest[active] = stop, max_tokens, max_tokens - int(_MAX_GAP * max_tokens)
        active = active[stop < end[active]]
        if not active.size or pieces >= _MAX_PAIRS or len(chunks) >= _MAX_ROUNDS:
            starts, stops = (np.sort(np.concatenate(column)) for column in zip(*chunks, strict=True))
            records = np.zeros(starts.size, RECORD)
            records["a_start"], records["a_length"], records["label"] = starts, stops - starts, -1
            yield records
            chunks, pieces = [], 0


def target_lengths(lengths: np.ndarray, max_tokens: int, pass_index: int, rng: np.random.Generator) -> np.ndarray:
    """Draws target lengths for one pass, int64 [documents], for documents with `lengths` tokens.

    As in google-research/bert, a tenth of the targets are short: uniform in 2..max_tokens. All others are `max_tokens`.
    With independent draws, the mean row length of a small corpus would vary by several percent. Therefore, documents of
    similar length form groups of ten, and in each pass a different document of a group has a short target. Short
    targets follow a golden-ratio sequence, which covers the range evenly. `rng` must be in the same state for every
    pass.
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
    columns = (np.concatenate(column) for column in zip(*chunks, strict=True))
    document, target, begin, a_stop, stop, not_next, is_reversed = columns
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
    order = np.argsort(records["a_start"], kind="stable")
    for field in ("start", "length"):
        a, b = f"a_{field}", f"b_{field}"
        records[a][is_reversed], records[b][is_reversed] = records[b][is_reversed], records[a][is_reversed]
    records["label"] |= is_reversed
    return records[order]


def _below(bound: np.ndarray | int, uniform: np.ndarray) -> np.ndarray:
    """Maps uniforms in [0, 1) to integers in 0..bound-1, or to 0 if the bound is 0."""
    return (uniform * bound).astype(np.int64)
