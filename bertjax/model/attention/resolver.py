"""Which implementation of attention a model is computed with; nothing else chooses one."""

import dataclasses
from typing import Protocol

import jax

from bertjax.errors import UsageError
from bertjax.model.attention.mask import DIRECTIONS, AttentionMask
from bertjax.model.attention.plain import plain_attention
from bertjax.model.config import ModelConfig


class AttentionFn(Protocol):
    """Self-attention: `query, key, value` [B, L, H, K] to [B, L, H, K], under the mesh that the step is traced for."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask,
        *,
        dropout_rate: float,
        dropout_key: jax.Array | None,
        mesh: jax.sharding.AbstractMesh,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function, and what it can compute.

    Attributes:
      function: the attention.
      directions: of the masks it takes.
      dropout: whether it takes a dropout rate above 0.
      several_sequences: whether a row may hold more than one.
    """

    function: AttentionFn
    directions: tuple[str, ...]
    dropout: bool
    several_sequences: bool


_IMPLEMENTATIONS = {
    "plain": Implementation(plain_attention, DIRECTIONS, dropout=True, several_sequences=True),
}
# `auto` takes the first that can.
_BY_SPEED = ("plain",)


def resolve(config: ModelConfig, several_sequences: bool = False) -> AttentionFn:
    """The implementation for a model.

    Args:
      config: its architecture and layout.
      several_sequences: rows hold more than one.

    Raises:
      UsageError: the one that the layout names cannot compute what the architecture or training asks for.
    """
    if config.attention != "auto":
        if lacking := _lacking(_IMPLEMENTATIONS[config.attention], config, several_sequences):
            raise UsageError(f"model.attention={config.attention} has no {lacking}; give model.attention=auto")
        return _IMPLEMENTATIONS[config.attention].function
    able = [name for name in _BY_SPEED if not _lacking(_IMPLEMENTATIONS[name], config, several_sequences)]
    return _IMPLEMENTATIONS[able[0]].function


def _lacking(implementation: Implementation, config: ModelConfig, several_sequences: bool) -> str:
    """What an implementation cannot do of what is asked for; "" where it can do all."""
    if config.attention_direction not in implementation.directions:
        return f"attention_direction={config.attention_direction}"
    if config.attention_dropout and not implementation.dropout:
        return f"attention_dropout={config.attention_dropout}"
    if several_sequences and not implementation.several_sequences:
        return "several sequences a row"
    return ""
