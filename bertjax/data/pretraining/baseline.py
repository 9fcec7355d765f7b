"""Token statistics of a corpus: metrics of a predictor that ignores the context, and mean lengths of pieces."""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.vocabulary import BYTE_LEVEL_START, Vocabulary

_BLOCK_TOKENS = 1 << 24
_CHECKED_TOKENS = 1 << 20
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def token_frequency_baseline(corpus: Corpus, predicted: Iterable[np.ndarray]) -> dict[str, float]:
    """Computes the metrics of a predictor that uses only the frequencies of training tokens.

    `predicted` yields arrays of the token ids that a model is evaluated on, int [N] each.

    Returns:
      loss: cross-entropy of the predicted tokens under training frequencies, in nats (add-one smoothing).
      accuracy: fraction of the predicted tokens that equal the most frequent training token.
      heldout_entropy: entropy of the held-out token frequencies in nats. No predictor that ignores the context has a
        smaller mean loss over all held-out tokens.
    """
    size = corpus.manifest["vocabulary"]["size"]
    train, heldout = (_token_counts(_blocks(split.tokens), size) for split in (corpus.train, corpus.heldout))
    counts = _token_counts(predicted, size)
    frequencies, heldout_frequencies = counts / counts.sum(), heldout / heldout.sum()
    heldout_frequencies = heldout_frequencies[heldout_frequencies > 0]
    return {
        "loss": float(-(frequencies * np.log((train + 1) / (train + 1).sum())).sum()),
        "accuracy": float(frequencies[train.argmax()]),
        "heldout_entropy": float(-(heldout_frequencies * np.log(heldout_frequencies)).sum()),
    }


def _token_counts(blocks: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Returns the count of each token id in arrays of ids, int64 [size]."""
    return sum((np.bincount(ids, minlength=size) for ids in blocks), np.zeros(size, np.int64))


def _blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the tokens of a split in blocks, since the split may be larger than memory."""
    return (tokens[start : start + _BLOCK_TOKENS] for start in range(0, len(tokens), _BLOCK_TOKENS))


def mean_piece_bytes(vocabulary: Vocabulary, tokens: np.ndarray) -> float:
    """Returns the mean number of UTF-8 bytes per token. `tokens` is int [N], N > 0.

    The bytes of a piece are the UTF-8 bytes of its text, without `##` or word-start mark. The first piece of a word has
    one more byte, for the space before the word. Thus, the bytes of a word do not depend on how it is split. A special
    token such as [UNK] counts as one byte (the space).
    """
    is_special = np.isin(np.arange(vocabulary.size), vocabulary.special_ids)
    marker, _ = vocabulary.word_marker
    texts = (piece.removeprefix(marker) for piece in vocabulary.pieces)
    # In byte-level BPE, each character of a piece stands for a byte. In other BPE, a piece such as <0xE2> is one byte.
    is_byte_level = marker == BYTE_LEVEL_START
    lengths = np.array(
        [len(text) if is_byte_level else 1 if _BYTE.fullmatch(text) else len(text.encode()) for text in texts]
    )
    piece_bytes = np.where(is_special, 0, lengths) + ~vocabulary.is_continuation
    # Clip the invalid ids of a damaged file instead of failing, because checksum verification reports the damage.
    return sum(int(piece_bytes.take(block, mode="clip").sum()) for block in _blocks(tokens)) / len(tokens)


def mean_word_pieces(vocabulary: Vocabulary, tokens: np.ndarray) -> float:
    """Returns the mean number of pieces per word at the start of a text, `tokens` [N]."""
    start = tokens[:_CHECKED_TOKENS]
    return start.size / max(1, np.count_nonzero(~vocabulary.is_continuation[start]))
