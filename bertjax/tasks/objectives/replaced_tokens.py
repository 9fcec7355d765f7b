"""Replaced-token detection, the objective of ELECTRA (arXiv 2003.10555)."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import is_token
from bertjax.metrics.metric import Metric
from bertjax.model.config import ModelConfig
from bertjax.model.flops import TRAINING_FACTOR, attention_flops_per_position, flops_per_position
from bertjax.model.models import ReplacedTokenModel
from bertjax.tasks.objectives.losses import loss_and_accuracy, loss_and_accuracy_metrics, weighted_sum
from bertjax.tasks.objectives.masked_lm import MaskedLmOnText
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.task import Batch, MetricSums, Outputs


@dataclasses.dataclass(frozen=True)
class ReplacedTokens(MaskedLmOnText):
    """Replaced-token detection, on rows of contiguous text or documents (ELECTRA, arXiv 2003.10555).

    A generator is trained by masked LM, and a discriminator detects the tokens that it replaced. The generator samples
    a token at each predicted position. A token counts as replaced only if the sample differs.
    The loss of the discriminator is the mean over all tokens, special tokens included (google-research/electra
    `run_pretraining.py`).
    """

    token_prefix = "generator"
    metrics = (
        *loss_and_accuracy_metrics(token_prefix, "generator"),
        *loss_and_accuracy_metrics("discriminator", "discriminator"),
        Metric("discriminator_precision", panel="discriminator: precision"),
        Metric("discriminator_recall", panel="discriminator: recall"),
        Metric("replaced_fraction", panel="replaced tokens"),
    )
    model_class = ReplacedTokenModel
    options = ("generator_size", "discriminator_weight")
    untrained_modules = ()
    unexported_modules = ("generator", "generator_lm")
    discriminator_weight: float = 50.0

    @classmethod
    def for_model(cls, config: ModelConfig, data: Any = None) -> Self:
        if data is None:
            return super().for_model(config)
        model, weight = ReplacedTokenModel(config, data.generator_size), data.discriminator_weight
        return cls(model, packing=data.packing, discriminator_weight=weight)

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"generator_loss": 1.0, "discriminator_loss": self.discriminator_weight}

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        tokens = jnp.maximum(jnp.sum(is_token(batch)), 1).astype(jnp.float32)
        return {"generator_loss": jnp.sum(batch["masked_lm_weights"]) + 1e-5, "discriminator_loss": tokens}

    def compute(self, params: dict, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        generator_logits, logits, replaced = self.apply(params, batch, dropout_key)
        labels, weights = batch["masked_lm_ids"], batch["masked_lm_weights"]
        tokens, detected = is_token(batch).astype(jnp.float32), logits > 0
        return {
            **loss_and_accuracy(self.token_prefix, generator_logits, labels, weights),
            "discriminator_loss": weighted_sum(jax.nn.softplus(logits) - logits * replaced, tokens),
            "discriminator_accuracy": weighted_sum(detected == replaced, tokens),
            "discriminator_precision": weighted_sum(replaced, tokens * detected),
            "discriminator_recall": weighted_sum(detected, tokens * replaced),
            "replaced_fraction": weighted_sum(replaced, tokens),
        }, {}

    def flops_per_position(self, phase: Phase) -> float:
        config = self.model.config
        generator = flops_per_position(self.model.generator_config, phase.seq_len, phase.row_predictions)
        head = TRAINING_FACTOR * 2 * config.hidden_size * (config.hidden_size + 1)
        return generator + flops_per_position(config, phase.seq_len) + head

    def step_cost(self, phase: Phase, steps: int) -> StepCost:
        cost = super().step_cost(phase, steps)
        generator = cost.positions * attention_flops_per_position(self.model.generator_config, phase.seq_len)
        return dataclasses.replace(cost, attention_flops=cost.attention_flops + generator)
