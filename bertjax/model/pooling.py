"""Hidden states that represent whole sequences, and BERT's pooler. Axis letters: see `encoder.py`."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.layers import Dense
from bertjax.model.lstm import LEFT


def pool_cls(reads: Sequence[str], hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Selects the hidden state that represents each row, at a token that attends to the whole row.

    This token is the first one, [CLS]. For states with only left context, it is the last one, [SEP].

    Args:
      reads: context direction of each equal slice of a hidden state, see `Architecture.reads`.
      hidden: [B, L, D].
      input_mask: [B, L] int32, 1 for tokens and 0 for padding at the end.

    Returns:
      [B, D].
    """
    last = jnp.maximum(jnp.sum(input_mask, axis=1) - 1, 0)[:, None, None]
    slices = zip(jnp.split(hidden, len(reads), axis=-1), reads, strict=True)
    return jnp.concatenate(
        [jnp.take_along_axis(part, last, axis=1)[:, 0] if reading == LEFT else part[:, 0] for part, reading in slices],
        axis=-1,
    )


def pool_cls_packed(reads: Sequence[str], hidden: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """Selects the hidden state that represents each sequence of packed rows, as `pool_cls` does for a whole row.

    Args:
      reads, hidden: as in `pool_cls`.
      sequence_ids: [B, L] int32.
      num_sequences: maximum number of sequences per row; missing sequences get an arbitrary finite state.

    Returns:
      [B, num_sequences, D].
    """
    member = sequence_ids[:, None] == 1 + jnp.arange(num_sequences)[:, None]  # [B, num_sequences, L]
    first = jnp.argmax(member, axis=-1)
    last = jnp.maximum(first + jnp.sum(member, axis=-1) - 1, 0)
    slices = zip(jnp.split(hidden, len(reads), axis=-1), reads, strict=True)
    return jnp.concatenate(
        [
            jnp.take_along_axis(part, (last if reading == LEFT else first)[..., None], axis=1)
            for part, reading in slices
        ],
        axis=-1,
    )


class Pooler(nn.Module):
    """Dense layer and tanh on the state selected by `pool_cls`: [..., D] to [..., D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        return jnp.tanh(Dense(self.config, (self.config.hidden_size,), ("embed", "pooled"), name="dense")(state))
