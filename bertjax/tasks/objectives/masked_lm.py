"""Masked LM and next-sentence prediction (section 3.1 of the paper); of rows without pairs the first alone.

Rows may hold several pairs, each with a label of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.pretraining.config import MASKED_LM_BATCH, PACKED_BATCH, Phase
from bertjax.data.schema import synthetic_batch
from bertjax.model.config import ModelConfig
from bertjax.model.heads import PretrainingModel
from bertjax.tasks.objectives.losses import apply, loss_and_accuracy
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs

METRICS = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
LOSSES = ("mlm_loss", "nsp_loss")


def objective(model: ModelConfig) -> Objective:
    """Masked LM and next sentence, the loss being the sum of both means (section A.2 of the paper)."""
    return Objective(
        model=PretrainingModel(model),
        metrics=METRICS,
        losses=LOSSES,
        denominators=denominators,
        compute=compute,
        schema=MASKED_LM_BATCH,
    )


def synthetic_rows(phase: Phase, model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of a phase's shape to time a step with."""
    return synthetic_batch(
        MASKED_LM_BATCH if phase.spans_a_row == 1 else PACKED_BATCH,
        phase.batch_size,
        seed,
        length=phase.seq_len,
        predictions=phase.row_predictions,
        pairs=phase.spans_a_row,
        pieces=model.vocab_size,
        segments=min(2, model.type_vocab_size),
        labels=2,
    )


def denominators(batch: Batch) -> dict[str, jax.Array]:
    """Weights of both losses; the masked-LM one has google-research/bert's 1e-5 added (`run_pretraining.py`)."""
    labelled = jnp.sum(batch["next_sentence_labels"] >= 0).astype(jnp.float32)
    return {
        "mlm_loss": jnp.sum(batch["masked_lm_weights"]) + 1e-5,
        "nsp_loss": jnp.maximum(labelled, 1.0),
    }


def compute(
    model: PretrainingModel, params: dict, batch: Batch, dropout_key: jax.Array | None
) -> tuple[MetricSums, Outputs]:
    """Sum and weight of masked-LM and next-sentence loss and accuracy. Rows labelled -1 have no next sentence."""
    masked_lm_logits, next_sentence_logits = apply(model, params, batch, dropout_key)
    labels = batch["next_sentence_labels"]
    there = (labels >= 0).astype(jnp.float32)
    mlm = loss_and_accuracy(masked_lm_logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
    nsp = loss_and_accuracy(next_sentence_logits, jnp.maximum(labels, 0), there)
    return dict(zip(METRICS, (*mlm, *nsp), strict=True)), {}
