"""Unidirectional language modeling: left to right (Table 5), right to left, or both independently (as in ELMo)."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.baseline import token_frequency_baseline
from bertjax.metrics.metric import Metric
from bertjax.model.models import LanguageModel
from bertjax.tasks.objectives.losses import loss_and_accuracy, loss_and_accuracy_metrics
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.task import Batch, MetricSums, NumpyBatch, Outputs

# (offset of the predicted position, prefix of metric names, panel title), keyed by the side of the context.
_DIRECTIONS = {"left": (1, "ltr", "left to right"), "right": (-1, "rtl", "right to left")}


@dataclasses.dataclass(frozen=True)
class LanguageModeling(PretrainingObjective):
    """Prediction of the next or previous token at every position. The loss is the sum of the directions' losses."""

    model_class = LanguageModel
    has_masks = False

    @property
    def metrics(self) -> tuple[Metric, ...]:
        directions = (_DIRECTIONS[side] for side in self.model.config.context_sides)
        return tuple(itertools.chain(*(loss_and_accuracy_metrics(prefix, title) for _, prefix, title in directions)))

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of predicted tokens, which is equal for all directions."""
        total = jnp.maximum(jnp.sum(text_weights(batch["input_mask"])), 1.0)
        return dict.fromkeys(self.loss_weights, total)

    def baseline(self, corpus: Corpus, batches: Iterator[NumpyBatch]) -> dict[str, float]:
        """Returns the metrics of a unigram baseline, which predicts the training data's token frequencies."""
        # Exclude the first and the last token of each row, [CLS] and [SEP].
        predicted = (batch["input_ids"][:, 1:-1][batch["input_mask"][:, 2:] > 0] for batch in batches)
        values = token_frequency_baseline(corpus, predicted)
        metrics = {metric.name: values["loss" if metric.is_loss else "accuracy"] for metric in self.metrics}
        return {**metrics, "heldout_entropy": values["heldout_entropy"]}

    def compute(self, params: dict, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        """Returns the metric sums. [CLS] and [SEP] are not predicted, as in masked LM."""
        sums = {}
        for side, logits in self.apply(params, batch, dropout_key).items():
            offset, prefix, _ = _DIRECTIONS[side]
            # The token that `roll` wraps around is a special token or padding, which has weight 0.
            arrays = (batch["input_ids"], text_weights(batch["input_mask"]))
            labels, weights = (jnp.roll(array, -offset, axis=1) for array in arrays)
            sums |= loss_and_accuracy(prefix, logits, labels, weights)
        return sums, {}


def text_weights(input_mask: jax.Array) -> jax.Array:
    """Returns weights, float32 [B, L]: 0 for padding, [CLS] and [SEP] (first and last token), else 1."""
    inner = jnp.pad(input_mask[:, 1:], ((0, 0), (0, 1))) * jnp.pad(input_mask[:, :-1], ((0, 0), (1, 0)))
    return inner.astype(jnp.float32)
