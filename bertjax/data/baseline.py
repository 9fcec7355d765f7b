"""What a model without context reaches on the held-out text: the line a masked LM has to get below."""

import numpy as np

from bertjax.corpus.store import Corpus

_BLOCK_TOKENS = 1 << 24


def unigram_baseline(corpus: Corpus) -> dict[str, float]:
    """Loss and accuracy of always predicting by token frequency.

    Returns:
      unigram_entropy: nats, of the held-out tokens' own frequencies: no context-free guess has a lower loss there.
      unigram_loss: nats, cross-entropy of the held-out tokens under training frequencies (one added to each count).
      unigram_accuracy: share of the held-out tokens that are the most frequent training token.
    """
    size = corpus.manifest["vocabulary"]["size"]
    train, heldout = (_counts(split.tokens, size) for split in (corpus.train, corpus.heldout))
    share = heldout / heldout.sum()
    probability = (train + 1) / (train + 1).sum()
    seen = share > 0
    return {
        "unigram_entropy": float(-(share[seen] * np.log(share[seen])).sum()),
        "unigram_loss": float(-(share[seen] * np.log(probability[seen])).sum()),
        "unigram_accuracy": float(share[train.argmax()]),
    }


def _counts(tokens: np.ndarray, size: int) -> np.ndarray:
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + _BLOCK_TOKENS], minlength=size)
    return counts
