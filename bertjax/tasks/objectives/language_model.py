"""Unidirectional language modeling: left to right (Table 5), right to left, or both independently (as in ELMo)."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from bertjax.errors import UsageError
from bertjax.metrics.metric import Metric
from bertjax.model.config import LSTM, ModelConfig
from bertjax.model.models import LanguageModel
from bertjax.tasks.objectives.losses import loss_and_accuracy, loss_and_accuracy_metrics
from bertjax.tasks.objectives.pretraining import PretrainingObjective
from bertjax.tasks.task import Batch, MetricSums, NumpyBatch, Outputs

if TYPE_CHECKING:
    from bertjax.data.corpus.store import Corpus

# These dictionaries are keyed by the side of the context. An offset is the predicted position minus the current one.
_OFFSETS = {"left": 1, "right": -1}
_PREFIXES = {"left": "ltr", "right": "rtl"}
_TITLES = {"left": "left to right", "right": "right to left"}


@dataclasses.dataclass(frozen=True)
class LanguageModeling(PretrainingObjective):
    """Prediction of the next or previous token at every position. The loss is the sum of the directions' losses."""

    model_class = LanguageModel
    has_masks = False

    @classmethod
    def check_model(cls, model: ModelConfig) -> None:
        if model.encoder != LSTM and model.attention_direction == "both":
            raise UsageError(
                "config.data.objective=lm would let the model see the tokens that it predicts; set "
                "model.attention_direction=left or right, or model.encoder=lstm"
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        pairs = (loss_and_accuracy_metrics(_PREFIXES[side], _TITLES[side]) for side in self.model.config.context_sides)
        return tuple(metric for pair in pairs for metric in pair)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of predicted tokens, which is equal for all directions."""
        total = jnp.maximum(jnp.sum(text_weights(batch["input_mask"])), 1.0)
        return dict.fromkeys(self.loss_weights, total)

    def baseline(self, corpus: "Corpus", batches: Iterator[NumpyBatch]) -> dict[str, float]:
        """Returns the metrics of a unigram baseline, which predicts the training data's token frequencies."""
        from bertjax.data.pretraining.baseline import token_frequency_baseline

        # Exclude the first and the last token of each row, [CLS] and [SEP].
        predicted = (batch["input_ids"][:, 1:-1][batch["input_mask"][:, 2:] > 0] for batch in batches)
        values = token_frequency_baseline(corpus, predicted)
        metrics = {metric.name: values["loss" if metric.is_loss else "accuracy"] for metric in self.metrics}
        return {**metrics, "heldout_entropy": values["heldout_entropy"]}

    def compute(self, params: dict, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        """Returns the metric sums. [CLS] and [SEP] are not predicted, as in masked LM."""
        sums = {}
        for side, logits in self.apply(params, batch, dropout_key).items():
            # The token that `roll` wraps around is a special token or padding, which has weight 0.
            labels, weights = (
                jnp.roll(values, -_OFFSETS[side], axis=1)
                for values in (batch["input_ids"], text_weights(batch["input_mask"]))
            )
            sums |= loss_and_accuracy(_PREFIXES[side], logits, labels, weights)
        return sums, {}


def text_weights(input_mask: jax.Array) -> jax.Array:
    """Returns weights, float32 [B, L]: 0 for padding, [CLS] and [SEP] (first and last token), else 1."""
    inner = jnp.pad(input_mask[:, 1:], ((0, 0), (0, 1))) * jnp.pad(input_mask[:, :-1], ((0, 0), (1, 0)))
    return inner.astype(jnp.float32)
