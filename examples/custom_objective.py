"""Custom pre-training objective: masked LM on running text, with a z-loss (arXiv 2204.02311, section 5).

    bertjax train --config examples/custom_objective.py:corpus=runs/corpus --workdir runs/z_loss

The z-loss keeps the logarithm of the softmax's denominator near 0. The training loss is the sum of all losses, so
`metric_sums` multiplies the z-loss by its coefficient.
"""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from bertjax.metrics.metric import loss_metric
from bertjax.presets import arguments, pretraining_config
from bertjax.tasks.objectives.losses import weighted_sum
from bertjax.tasks.objectives.masked_lm import MaskedLmOnText
from bertjax.tasks.pretraining.config import OBJECTIVES
from bertjax.tasks.task import Batch, MetricSums

COEFFICIENT = 1e-4


@dataclasses.dataclass(frozen=True)
class MaskedLmWithZLoss(MaskedLmOnText):
    """Masked LM on rows of running text, with the additional loss `z_loss`."""

    metrics = (*MaskedLmOnText.metrics, loss_metric("z_loss", "z-loss"))

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        # Divide by the predicted tokens of the whole batch, so that micro-batches add up to the same gradient.
        divisors = super().denominators(batch)
        return {**divisors, "z_loss": divisors["mlm_loss"]}

    def metric_sums(self, batch: Batch, masked_lm_logits: jax.Array, pair_logits: jax.Array) -> MetricSums:
        sums = super().metric_sums(batch, masked_lm_logits, pair_logits)
        z = COEFFICIENT * jnp.square(jax.nn.logsumexp(masked_lm_logits, axis=-1))  # [B, P]
        return {**sums, "z_loss": weighted_sum(z, batch["masked_lm_weights"])}


OBJECTIVES["z_loss"] = MaskedLmWithZLoss


@arguments(size="tiny", corpus="", steps=1000)
def get_config(args: ConfigDict) -> ConfigDict:
    config = pretraining_config(args.size)
    config.data.corpus, config.data.objective, config.steps = args.corpus, "z_loss", args.steps
    config.optimizer.warmup_steps = -1
    return config
