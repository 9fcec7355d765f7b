"""What no context at all reaches on the held-out rows: the line a model has to get beyond."""

from collections.abc import Iterable, Sequence

import numpy as np

from bertjax.data.corpus.store import Corpus

_BLOCK_TOKENS = 1 << 24


def context_free_baseline(
    corpus: Corpus, eval_batches: Iterable[dict[str, np.ndarray]], names: Sequence[str]
) -> dict[str, float]:
    """Metrics of guessing by frequency, on the same positions and pairs that a model is evaluated on.

    Args:
      names: of what is predicted, such as `mlm`.

    Returns:
      NAME_loss: nats, cross-entropy of the predicted tokens under training frequencies (one added to each count).
      NAME_accuracy: share of the predicted tokens that are the most frequent training token.
      nsp_accuracy: share of the more frequent of IsNext and NotNext; left out without pairs.
      heldout_entropy: nats, of the held-out tokens' own frequencies: no guess without context has a lower mean loss.
    """
    size = corpus.manifest["vocabulary"]["size"]
    train, heldout = (token_counts(split.tokens, size) for split in (corpus.train, corpus.heldout))
    predicted, labels = np.zeros(size, np.int64), np.zeros(2, np.int64)
    for batch in eval_batches:
        if "masked_lm_ids" in batch:
            predicted += np.bincount(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0], minlength=size)
            known = batch["next_sentence_labels"]
            labels += np.bincount(known[known >= 0], minlength=2)
        else:
            # All but the first and the last token of a row.
            predicted += np.bincount(batch["input_ids"][:, 1:-1][batch["input_mask"][:, 2:] > 0], minlength=size)
    share, own_share = predicted / predicted.sum(), heldout / heldout.sum()
    own_share = own_share[own_share > 0]
    loss, accuracy = float(-(share * np.log((train + 1) / (train + 1).sum())).sum()), float(share[train.argmax()])
    values = {f"{name}_{metric}": value for name in names for metric, value in (("loss", loss), ("accuracy", accuracy))}
    values["heldout_entropy"] = float(-(own_share * np.log(own_share)).sum())
    return values | ({"nsp_accuracy": float(labels.max() / labels.sum())} if labels.sum() else {})


def token_counts(tokens: np.ndarray, size: int) -> np.ndarray:
    """[tokens] ids to int64 [size] counts, block by block, since the array may be larger than RAM."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + _BLOCK_TOKENS], minlength=size)
    return counts
