"""Baseline metrics of predictions that ignore the context."""

from collections.abc import Iterable

import numpy as np

from bertjax.data.corpus.store import Corpus

_BLOCK_TOKENS = 1 << 24


def token_frequency_baseline(corpus: Corpus, predicted: Iterable[np.ndarray]) -> dict[str, float]:
    """Computes the metrics of a predictor that knows only the frequencies of training tokens.

    Args:
      corpus: corpus of the run.
      predicted: arrays of the token ids that a model is evaluated on, int [N] each.

    Returns:
      loss: cross-entropy of the predicted tokens under training frequencies, in nats (add-one smoothing).
      accuracy: fraction of the predicted tokens that equal the most frequent training token.
      heldout_entropy: entropy of the held-out token frequencies in nats, a lower bound for losses without context.
    """
    size = corpus.manifest["vocabulary"]["size"]
    train, heldout = (token_counts(split.tokens, size) for split in (corpus.train, corpus.heldout))
    counts = sum((np.bincount(ids, minlength=size) for ids in predicted), np.zeros(size, np.int64))
    frequencies, heldout_frequencies = counts / counts.sum(), heldout / heldout.sum()
    heldout_frequencies = heldout_frequencies[heldout_frequencies > 0]
    return {
        "loss": float(-(frequencies * np.log((train + 1) / (train + 1).sum())).sum()),
        "accuracy": float(frequencies[train.argmax()]),
        "heldout_entropy": float(-(heldout_frequencies * np.log(heldout_frequencies)).sum()),
    }


def token_counts(tokens: np.ndarray, size: int) -> np.ndarray:
    """Returns the count of each token id, int64 [size]. Works in blocks, since `tokens` may be larger than memory."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + _BLOCK_TOKENS], minlength=size)
    return counts
