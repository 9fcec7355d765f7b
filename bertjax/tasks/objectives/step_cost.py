"""Cost of training steps in rows, positions and FLOPs, and the fractions of this cost not spent on padding."""

import dataclasses
import operator

import jax
import jax.numpy as jnp

from bertjax.data.schema import is_token

# Metric names of the fractions that `non_padding_sums` computes.
TOKEN_FRACTION, ATTENTION_FRACTION = "token_fraction", "attention_fraction"


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of a number of training steps, computed without reading batches."""

    rows: int = 0
    positions: int = 0  # number of positions, including padding
    flops: float = 0.0  # model FLOPs, as if every position were a token that attends to its whole row
    attention_flops: float = 0.0  # part of `flops` for the attention products (scores, and weighted sums of values)

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __sub__(self, other: "StepCost") -> "StepCost":
        return StepCost(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))

    def token_flops(self, token_fraction: float, attention_fraction: float) -> float:
        """Returns the FLOPs that are not spent on padding.

        The arguments are the mean fractions of `non_padding_sums` over the steps.
        """
        return token_fraction * (self.flops - self.attention_flops) + attention_fraction * self.attention_flops


def non_padding_sums(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metric sums of TOKEN_FRACTION and ATTENTION_FRACTION for a batch.

    TOKEN_FRACTION is the fraction of positions that are not padding. ATTENTION_FRACTION is the fraction of a row's
    (query, key) pairs in which both positions are tokens of the same sequence. Without local attention layers, this is
    the fraction of attention FLOPs not spent on padding. With local layers, it underestimates this fraction and MFU.
    """
    tokens = is_token(batch).astype(jnp.float32)
    length = tokens.shape[-1]
    position = batch.get("position_ids", jnp.arange(length))
    # A sequence of n tokens has n * n (query, key) pairs. The batch contains each token's position i, but not n. So sum
    # 2 i + 1 over the tokens of the sequence, which gives n * n.
    fractions = {TOKEN_FRACTION: tokens, ATTENTION_FRACTION: tokens * (2 * position + 1) / length}
    return {name: jnp.stack([jnp.sum(values), jnp.float32(tokens.size)]) for name, values in fractions.items()}
