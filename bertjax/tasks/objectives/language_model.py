"""Language models that see one side of a position: left to right (Table 5 of the paper), or both ways apart (ELMo)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.pretraining.config import LANGUAGE_MODEL_BATCH, Phase
from bertjax.data.schema import synthetic_batch
from bertjax.model.config import ModelConfig
from bertjax.model.heads import LanguageModel
from bertjax.tasks.objectives.losses import apply, loss_and_accuracy
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs

# What is seen to the name of the model, and how far away what it predicts is.
_NAMES, _STEPS = {"left": "ltr", "right": "rtl"}, {"left": 1, "right": -1}


def objective(model: ModelConfig) -> Objective:
    """The next piece of text, or the one before, at every position; the loss is the sum of the directions' means."""
    names = tuple(_NAMES[direction] for direction in model.reads)
    return Objective(
        model=LanguageModel(model),
        metrics=tuple(f"{name}_{metric}" for name in names for metric in ("loss", "accuracy")),
        losses=tuple(f"{name}_loss" for name in names),
        denominators=Denominators(names),
        compute=compute,
        schema=LANGUAGE_MODEL_BATCH,
    )


def synthetic_rows(phase: Phase, model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of a phase's shape to time a step with."""
    segments = min(2, model.type_vocab_size)
    return synthetic_batch(
        LANGUAGE_MODEL_BATCH, phase.batch_size, seed, length=phase.seq_len, pieces=model.vocab_size, segments=segments
    )


def text_weights(input_mask: jax.Array) -> jax.Array:
    """float32 like the mask [B, L]: 1 for a row's tokens but its first and last, [CLS] and [SEP]."""
    inner = jnp.pad(input_mask[:, 1:], ((0, 0), (0, 1))) * jnp.pad(input_mask[:, :-1], ((0, 0), (1, 0)))
    return inner.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Denominators:
    """How many pieces a batch has to predict, the same in each direction."""

    names: tuple[str, ...]

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        total = jnp.maximum(jnp.sum(text_weights(batch["input_mask"])), 1.0)
        return {f"{name}_loss": total for name in self.names}


def compute(
    model: LanguageModel, params: dict, batch: Batch, dropout_key: jax.Array | None
) -> tuple[MetricSums, Outputs]:
    """Sum and weight of each direction's loss and accuracy. Special tokens are not predicted, as in masked LM."""
    sums = {}
    for direction, logits in apply(model, params, batch, dropout_key).items():
        # What wraps around is a special token, or padding.
        labels, weights = (
            jnp.roll(part, -_STEPS[direction], axis=1)
            for part in (batch["input_ids"], text_weights(batch["input_mask"]))
        )
        loss, accuracy = loss_and_accuracy(logits, labels, weights)
        sums |= {f"{_NAMES[direction]}_loss": loss, f"{_NAMES[direction]}_accuracy": accuracy}
    return sums, {}
