"""Baseline metrics of predictions that ignore the context."""

from collections.abc import Iterable, Sequence

import numpy as np

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.source import Prediction

_BLOCK_TOKENS = 1 << 24


def context_free_baseline(
    corpus: Corpus, eval_batches: Iterable[dict[str, np.ndarray]], names: Sequence[str], prediction: Prediction
) -> dict[str, float]:
    """Computes the metrics of a predictor that knows only token frequencies, on a model's evaluation batches.

    Args:
      corpus: corpus of the run.
      eval_batches: all evaluation batches.
      names: prefixes of the token metrics, such as `mlm`.
      prediction: functions that extract the predicted tokens and labels of a batch.

    Returns:
      NAME_loss: cross-entropy of the predicted tokens under training frequencies, in nats (add-one smoothing).
      NAME_accuracy: fraction of the predicted tokens that are the most frequent training token.
      nsp_accuracy: fraction of the more frequent next-sentence label; missing if the batches have no labels.
      heldout_entropy: entropy of the held-out token frequencies in nats, a lower bound for losses without context.
    """
    size = corpus.manifest["vocabulary"]["size"]
    train, heldout = (token_counts(split.tokens, size) for split in (corpus.train, corpus.heldout))
    predicted, labels = np.zeros(size, np.int64), np.zeros(2, np.int64)
    for batch in eval_batches:
        predicted += np.bincount(prediction.predicted_ids(batch), minlength=size)
        batch_labels = prediction.next_sentence_labels(batch)
        labels += np.bincount(batch_labels[batch_labels >= 0], minlength=2)
    frequencies, heldout_frequencies = predicted / predicted.sum(), heldout / heldout.sum()
    heldout_frequencies = heldout_frequencies[heldout_frequencies > 0]
    loss = float(-(frequencies * np.log((train + 1) / (train + 1).sum())).sum())
    accuracy = float(frequencies[train.argmax()])
    values = {f"{name}_{metric}": value for name in names for metric, value in (("loss", loss), ("accuracy", accuracy))}
    values["heldout_entropy"] = float(-(heldout_frequencies * np.log(heldout_frequencies)).sum())
    return values | ({"nsp_accuracy": float(labels.max() / labels.sum())} if labels.sum() else {})


def token_counts(tokens: np.ndarray, size: int) -> np.ndarray:
    """Returns the count of each token id, int64 [size]. Works in blocks, since `tokens` may be larger than memory."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + _BLOCK_TOKENS], minlength=size)
    return counts
