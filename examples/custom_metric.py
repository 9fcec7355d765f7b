"""Custom pre-training metric: fraction of masked tokens that are among the five most probable predictions.

    bertjax train --config examples/custom_metric.py:corpus=runs/corpus --workdir runs/top5

The metric appears in the log, in `metrics.jsonl` and in `curves.png`. A run can resume with an added metric.
"""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from bertjax.metrics.metric import Metric
from bertjax.presets import arguments, pretraining_config
from bertjax.tasks.objectives.losses import weighted_sum
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.tasks.pretraining.config import OBJECTIVES
from bertjax.tasks.task import Batch, MetricSums


@dataclasses.dataclass(frozen=True)
class MaskedLmTop5(MaskedLm):
    """Masked LM and next-sentence prediction with one more metric."""

    metrics = (*MaskedLm.metrics, Metric("mlm_top5", panel="masked LM: among the five most probable"))

    def metric_sums(self, batch: Batch, masked_lm_logits: jax.Array, pair_logits: jax.Array) -> MetricSums:
        sums = super().metric_sums(batch, masked_lm_logits, pair_logits)
        _, top5 = jax.lax.top_k(masked_lm_logits, 5)  # [B, P, 5]
        is_among = jnp.any(top5 == batch["masked_lm_ids"][..., None], axis=-1)
        # `weighted_sum` returns the weighted sum and the sum of the weights. The metric is their quotient.
        return {**sums, "mlm_top5": weighted_sum(is_among, batch["masked_lm_weights"])}


OBJECTIVES["nsp_top5"] = MaskedLmTop5


@arguments(size="tiny", corpus="", steps=1000)
def get_config(args: ConfigDict) -> ConfigDict:
    config = pretraining_config(args.size)
    config.data.corpus, config.data.objective, config.steps = args.corpus, "nsp_top5", args.steps
    config.optimizer.warmup_steps = -1
    return config
