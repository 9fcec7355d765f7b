"""Which implementation of attention a model is computed with; nothing else chooses one."""

import dataclasses
from typing import Any, Protocol

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


def _fused_attention(*arrays: jax.Array, **options: Any) -> jax.Array:
    # Imported where it is used: kernels take a quarter of a second.
    from bertjax.model.attention.fused import fused_attention

    return fused_attention(*arrays, **options)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function, and what it can compute.

    Attributes:
      function: the attention.
      directions: of the masks it takes.
      dropout: whether it takes a dropout rate above 0.
      several_sequences: whether a row may hold more than one.
      longest_row: tokens of a row at most; 0 is any number.
      made_for: platforms that it is fast on; on others `auto` does not take it. () are all.
    """

    function: AttentionFn
    directions: tuple[str, ...]
    dropout: bool
    several_sequences: bool
    longest_row: int = 0
    made_for: tuple[str, ...] = ()


_IMPLEMENTATIONS = {
    "plain": Implementation(plain_attention, DIRECTIONS, dropout=True, several_sequences=True),
    "fused": Implementation(
        _fused_attention,
        DIRECTIONS,
        dropout=True,
        several_sequences=True,
        # A program's scores of a row fit into the near memory of every chip.
        longest_row=512,
        made_for=("tpu",),
    ),
}
# `auto` takes the first that can.
_BY_SPEED = ("fused", "plain")


def resolve(config: ModelConfig, length: int, several_sequences: bool = False) -> AttentionFn:
    """The implementation for a model.

    Args:
      config: its architecture and layout.
      length: tokens a row.
      several_sequences: rows hold more than one.

    Raises:
      UsageError: the one that the layout names cannot compute what the architecture or training asks for.
    """
    if config.attention != "auto":
        if lacking := _lacking(_IMPLEMENTATIONS[config.attention], config, length, several_sequences):
            raise UsageError(f"model.attention={config.attention} has no {lacking}; give model.attention=auto")
        return _IMPLEMENTATIONS[config.attention].function
    platform = _platform()
    able = [
        implementation
        for implementation in map(_IMPLEMENTATIONS.__getitem__, _BY_SPEED)
        if not _lacking(implementation, config, length, several_sequences)
        and (not implementation.made_for or platform in implementation.made_for)
    ]
    return able[0].function


def longest_row(name: str) -> int:
    """Tokens a row at most of the implementation that a layout names; 0 is any number."""
    return 0 if name == "auto" else _IMPLEMENTATIONS[name].longest_row


def _platform() -> str:
    """Of the mesh in force, which may be of devices that are not here; else of this machine."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.platform if device else jax.default_backend()


def _lacking(implementation: Implementation, config: ModelConfig, length: int, several_sequences: bool) -> str:
    """What an implementation cannot do of what is asked for; "" where it can do all."""
    if config.attention_direction not in implementation.directions:
        return f"attention_direction={config.attention_direction}"
    if config.attention_dropout and not implementation.dropout:
        return f"attention_dropout={config.attention_dropout}"
    if several_sequences and not implementation.several_sequences:
        return "several sequences a row"
    if implementation.longest_row and length > implementation.longest_row:
        return f"rows of {length} tokens, {implementation.longest_row} at most"
    return ""
