"""Cutting documents into sentence pairs: the rule of google-research/bert's `create_pretraining_data.py`.

The script walks through one document at a time. Nothing it decides depends on another document, so here all documents
of a block advance together, one chunk each at a time, in whole-array operations; the distribution is the same.
"""

from collections.abc import Iterator

import numpy as np

from bertjax.errors import BertjaxError

# One document in so many gets a short target: the script's probability of 0.1.
_SHORT_EVERY = 10
_GOLDEN_RATIO = 0.6180339887498949
# A pair before truncation: token offsets and numbers of tokens of A and B, and the label: 0 IsNext, 1 NotNext.
RECORD = np.dtype([("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("label", "<i4")])

# Records are handed over after so many rows, or so many rounds where few documents are left: both bound memory.
_ROWS_AT_ONCE = 1 << 18
_ROUNDS_AT_ONCE = 1 << 12


def document_pairs(
    sentences: np.ndarray, documents: np.ndarray, first: int, targets: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Cuts documents `first` to `first + len(targets) - 1` into pairs once.

    A chunk takes sentences until the first that reaches the target, or the document's end. A is a random number of its
    sentences, at least one and never the last. With probability 1/2, and always where the chunk is one sentence, B is
    random (NotNext): from a random sentence of a random other document on, up to what A left of the target, and the
    chunk's unused sentences are taken up again. Otherwise B is the rest of the chunk. Hence more than half of the
    labels are NotNext (54 % of Wikipedia), as in the script and unlike the paper's 50 %.

    Every sentence of the documents is in exactly one pair as part of A or of a B that is next; spans are not yet
    truncated.

    Args:
      sentences: [sentences + 1] int64, token offset of each sentence, then the number of tokens.
      documents: [documents + 1] int64, first sentence of each document, then the number of sentences; at least two
        documents.
      first: the first document to cut.
      targets: [documents to cut] int64, from `target_lengths`.
      rng: only its `random` is used.

    Yields:
      [rows] RECORD, sorted by `a_start` within each array.

    Raises:
      BertjaxError: a document without sentences or a sentence without tokens.
    """
    last = first + targets.size
    cursor, end = documents[first:last].copy(), documents[first + 1 : last + 1]
    base = cursor[0]
    offsets = sentences[base : end[-1] + 1]
    if np.any(end <= cursor) or np.any(offsets[1:] <= offsets[:-1]):
        raise BertjaxError(f"documents {first}..{last - 1} of the corpus have an empty document or sentence")

    chunks: list[tuple[np.ndarray, ...]] = []
    rows = 0
    active = np.arange(targets.size)
    while active.size:
        begin, wanted = cursor[active], targets[active]
        stop = base + np.searchsorted(offsets, sentences[begin] + wanted)
        stop = np.minimum(stop, end[active])
        a_share, next_share = rng.random((2, active.size))
        a_stop = begin + 1 + _below(stop - begin - 1, a_share)
        not_next = (a_stop == stop) | (next_share < 0.5)
        chunks.append((first + active, wanted, begin, a_stop, stop, not_next))
        rows += active.size
        cursor[active] = np.where(not_next, a_stop, stop)
        active = active[cursor[active] < end[active]]
        if rows >= _ROWS_AT_ONCE or len(chunks) >= _ROUNDS_AT_ONCE:
            yield _records(sentences, documents, chunks, rng)
            chunks, rows = [], 0
    if chunks:
        yield _records(sentences, documents, chunks, rng)


def target_lengths(lengths: np.ndarray, max_tokens: int, pass_index: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the documents' target lengths for one pass, spread evenly over documents and passes.

    A document's target is `max_tokens`, or with probability 0.1 uniform in 2..max_tokens, as in the script. But one
    long document with a short target makes many rows, so that the mean row length of a small corpus varies by several
    per cent where targets are drawn independently. Here, of ten documents of similar length each is short in one of
    ten passes, and the short targets are a golden-ratio sequence, which fills the range evenly from any start.

    Args:
      lengths: [documents], in tokens.
      max_tokens: the longest target.
      pass_index: from 0.
      rng: in the same state for every pass.

    Returns:
      int64 [documents].
    """
    groups = -(-lengths.size // _SHORT_EVERY)
    turns = np.argsort(rng.random((groups, _SHORT_EVERY)), axis=1)
    chosen = _SHORT_EVERY * np.arange(groups) + turns[:, pass_index % _SHORT_EVERY]
    # The last group may be smaller; its documents' turns come as often.
    group = np.flatnonzero(chosen < lengths.size)
    short = np.argsort(lengths, kind="stable")[chosen[group]]
    share = (rng.random() + _GOLDEN_RATIO * (pass_index * groups + group)) % 1
    targets = np.full(lengths.size, max_tokens, np.int64)
    targets[short] = 2 + _below(max_tokens - 1, share)
    return targets


def _records(
    sentences: np.ndarray, documents: np.ndarray, chunks: list[tuple[np.ndarray, ...]], rng: np.random.Generator
) -> np.ndarray:
    document, target, begin, a_stop, stop, not_next = (np.concatenate(column) for column in zip(*chunks, strict=True))
    records = np.empty(begin.size, RECORD)
    records["a_start"] = sentences[begin]
    records["a_length"] = sentences[a_stop] - records["a_start"]
    # Overwritten below where it is not the next.
    records["b_start"] = sentences[a_stop]
    records["b_length"] = sentences[stop] - records["b_start"]
    records["label"] = not_next

    document_share, sentence_share = rng.random((2, np.count_nonzero(not_next)))
    other = _below(documents.size - 2, document_share)
    other += other >= document[not_next]
    b_begin, b_end = documents[other], documents[other + 1]
    b_begin = b_begin + _below(b_end - b_begin, sentence_share)
    b_start = sentences[b_begin]
    # A random B is at least one sentence, even where A alone reaches the target.
    wanted = np.maximum(target[not_next] - records["a_length"][not_next], 1)
    b_stop = np.minimum(np.searchsorted(sentences, b_start + wanted), b_end)
    records["b_start"][not_next] = b_start
    records["b_length"][not_next] = sentences[b_stop] - b_start
    return records[np.argsort(records["a_start"], kind="stable")]


def _below(bound: np.ndarray | int, uniform: np.ndarray) -> np.ndarray:
    """Integers in 0..bound-1 from uniforms in [0, 1); 0 where the bound is 0."""
    return (uniform * bound).astype(np.int64)
