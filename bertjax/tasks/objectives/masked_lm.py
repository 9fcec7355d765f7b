"""Masked LM, with or without next-sentence prediction (section 3.1 of the paper).

`data/pretraining/masking.py` selects new tokens to mask in each epoch.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.baseline import token_frequency_baseline
from bertjax.data.pretraining.pairs import NEXT_SENTENCE, SENTENCE_ORDER
from bertjax.model.models import PretrainingModel
from bertjax.tasks.objectives.losses import loss_and_accuracy, loss_and_accuracy_metrics
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.task import Batch, MetricSums, NumpyBatch, Outputs


@dataclasses.dataclass(frozen=True)
class MaskedLm(PretrainingObjective):
    """Masked LM and next-sentence prediction. The loss is the sum of their mean losses (section A.2 of the paper)."""

    # Prefixes of metric names, for predicted tokens and for sentence pairs. A subclass that changes one must repeat
    # `metrics`, which is built from them. Without pairs, the metrics of pairs have weight 0 and are not logged.
    token_prefix: ClassVar[str] = "mlm"
    pair_prefix: ClassVar[str] = "nsp"
    metrics = (
        *loss_and_accuracy_metrics(token_prefix, "masked LM"),
        *loss_and_accuracy_metrics(pair_prefix, "next sentence"),
    )
    model_class = PretrainingModel
    pairing = NEXT_SENTENCE
    can_add_pieces = True

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the divisor of each loss. As in google-research/bert, 1e-5 is added to the divisor of masked LM."""
        tokens = jnp.sum(batch["masked_lm_weights"]) + 1e-5
        pairs = jnp.sum(batch["next_sentence_labels"] >= 0).astype(jnp.float32)
        return {f"{self.token_prefix}_loss": tokens, f"{self.pair_prefix}_loss": jnp.maximum(pairs, 1.0)}

    def baseline(self, corpus: Corpus, batches: Iterator[NumpyBatch]) -> dict[str, float]:
        """Returns the metrics of predicting the token frequencies, and the most frequent next-sentence label."""
        label_counts, masked_ids = np.zeros(2, np.int64), []
        for batch in batches:
            labels = batch["next_sentence_labels"]
            label_counts += np.bincount(labels[labels >= 0], minlength=2)
            masked_ids.append(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0])
        values = token_frequency_baseline(corpus, masked_ids)
        metrics = {f"{self.token_prefix}_{name}": values[name] for name in ("loss", "accuracy")}
        metrics["heldout_entropy"] = values["heldout_entropy"]  # minimum loss of predictions that ignore the context
        if label_counts.sum():
            metrics[f"{self.pair_prefix}_accuracy"] = float(label_counts.max() / label_counts.sum())
        return metrics

    def compute(self, params: dict, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        # A model with fewer than two segments has no next-sentence head: `pair_logits` are 0, and all labels are -1.
        masked_lm_logits, pair_logits = self.apply(params, batch, dropout_key)
        return self.metric_sums(batch, masked_lm_logits, pair_logits), {}

    def metric_sums(self, batch: Batch, masked_lm_logits: jax.Array, pair_logits: jax.Array) -> MetricSums:
        """Computes metric sums from masked-LM logits [B, P, V] and pair logits [B, 2] (packed rows: [B, S, 2]).

        Labels of -1 are ignored. A subclass may add metrics here.
        """
        labels = batch["next_sentence_labels"]
        has_label = (labels >= 0).astype(jnp.float32)
        token_labels, token_weights = batch["masked_lm_ids"], batch["masked_lm_weights"]
        return {
            **loss_and_accuracy(self.token_prefix, masked_lm_logits, token_labels, token_weights),
            **loss_and_accuracy(self.pair_prefix, pair_logits, jnp.maximum(labels, 0), has_label),
        }


@dataclasses.dataclass(frozen=True)
class MaskedLmWithSentenceOrder(MaskedLm):
    """Masked LM and sentence-order prediction (arXiv 1909.11942, section 3.1). It uses the next-sentence head.

    The label is 1 if A and B are swapped. It is also 1 if B is random, which is the case if no sentence is left for B.
    """

    pair_prefix = "sop"
    metrics = (
        *loss_and_accuracy_metrics(MaskedLm.token_prefix, "masked LM"),
        *loss_and_accuracy_metrics(pair_prefix, "sentence order"),
    )
    pairing = SENTENCE_ORDER


@dataclasses.dataclass(frozen=True)
class MaskedLmOnPairs(MaskedLm):
    """Masked LM without next-sentence prediction, on rows of sentence pairs (No NSP in Table 5 of the paper)."""

    untrained_modules = ("next_sentence", "pooler")
    unexported_modules = ("next_sentence",)  # Export the pooler, which may come from the checkpoint of `--init_from`.

    def postprocess_batches(self, batches: Iterator[NumpyBatch]) -> Iterator[NumpyBatch]:
        """Sets next-sentence labels to -1, which the loss ignores."""
        name = "next_sentence_labels"
        return ({**batch, name: np.full_like(batch[name], -1)} for batch in batches)


@dataclasses.dataclass(frozen=True)
class MaskedLmOnText(MaskedLm):
    """Masked LM on rows of contiguous text or, with packing, of documents. All next-sentence labels are -1."""

    pairing = ""
    untrained_modules = MaskedLmOnPairs.untrained_modules
    unexported_modules = MaskedLmOnPairs.unexported_modules
