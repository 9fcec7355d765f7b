"""The BERT encoder: embeddings, post-norm Transformer layers, pooler.

Axis letters, here and wherever arrays have comments:

    B batch    L length of a row    D hidden size    H heads    K head size    F feed-forward size
    V vocabulary (padded)    P masked positions a row    N layers

A row holds one sequence or several: `sequence_ids` says which one each token belongs to, 0 being padding, and
`position_ids` counts from 0 within each. With one sequence a row, `sequence_ids` is the input mask.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.architecture import LSTM
from bertjax.model.attention.dispatch import AttentionFn, resolve
from bertjax.model.attention.mask import AttentionMask
from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.layer_stack import CONTEXT, MLP_IN, PROJECTIONS, SUMS, kept, recomputes, run_layers
from bertjax.model.layers import Dense, LayerNorm, activation, kernel_init
from bertjax.model.lstm import ACTIVATION_AXES, LEFT, LstmReader
from bertjax.model.partitioning import placed


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then LayerNorm and dropout (paper, Figure 2)."""

    config: ModelConfig

    def setup(self) -> None:
        config, width = self.config, self.config.hidden_size

        def table(name: str, rows: int, axis: str) -> jax.Array:
            return self.param(name, kernel_init(config, (axis, "embed")), (rows, width))

        self.token_table = table("token", config.padded_vocab_size, "vocab")
        self.segment_table = table("segment", config.type_vocab_size, "segment")
        self.position_table = table("position", config.max_position_embeddings, "position")
        # Its input is float32, and takes as much memory as what the gradient is made of.
        self.norm = LayerNorm(config, keeps_input=False)

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array, deterministic: bool
    ) -> jax.Array:
        # A part of the hidden size of more rows: ids are small to gather, tables are not.
        input_ids, segment_ids, position_ids = (
            placed(ids, ("shared_batch", "length")) for ids in (input_ids, segment_ids, position_ids)
        )
        x = jnp.take(placed(self.token_table, ("vocab", "embed_part")), input_ids, axis=0)  # [B, L, D]
        # A product with one-hot rows: two segments make a gather slower than this, forwards and backwards.
        x += jax.nn.one_hot(segment_ids, self.config.type_vocab_size, dtype=x.dtype) @ self.segment_table
        x += jnp.take(self.position_table, position_ids, axis=0)
        x = placed(placed(x, ("shared_batch", "length", "embed_part")), ACTIVATION_AXES)
        key = None if deterministic else self.make_rng("dropout")
        return dropout(self.norm(x), self.config.hidden_dropout_prob, key)


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection: [B, L, D] to [B, L, D]."""

    config: ModelConfig
    attention: AttentionFn

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        shape = (config.hidden_size, config.num_attention_heads, config.head_size)

        def projected(name: str) -> jax.Array:
            y = Dense(config, shape, ("embed", "heads", "head"), flat=True, name=name)(x)
            return kept(y, PROJECTIONS).reshape(*y.shape[:-1], config.num_attention_heads, config.head_size)

        query, key, value = map(projected, ("query", "key", "value"))  # [B, L, H, K] each
        attend = partial(
            self.attention,
            mask=AttentionMask(config.attention_direction, sequence_ids),
            dropout_rate=config.attention_probs_dropout_prob,
            dropout_key=None if deterministic else self.make_rng("dropout"),
            mesh=jax.sharding.get_abstract_mesh(),
        )
        if config.remat == "attention":
            attend = jax.checkpoint(attend, prevent_cse=not config.scan_layers)
        context = kept(attend(query, key, value), CONTEXT)
        shape = (config.num_attention_heads, config.head_size, config.hidden_size)
        return Dense(config, shape, ("heads", "head", "embed"), inputs=2, name="output")(context)


class Layer(nn.Module):
    """One post-norm Transformer layer: x = norm(x + dropout(sublayer(x))), twice."""

    config: ModelConfig
    attention: AttentionFn
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        config = self.config
        width, mlp = config.hidden_size, config.intermediate_size
        keeps_input = not recomputes(config)

        def residual(x: jax.Array, y: jax.Array, norm: str) -> jax.Array:
            key = None if self.deterministic else self.make_rng("dropout")
            total = kept(x + dropout(y, config.hidden_dropout_prob, key), SUMS)
            return placed(LayerNorm(config, keeps_input, name=norm)(total), ACTIVATION_AXES)

        y = SelfAttention(config, self.attention, name="attention")(x, sequence_ids, self.deterministic)
        x = residual(x, y, "attention_norm")
        y = kept(Dense(config, (width, mlp), ("embed", "mlp"), name="mlp_in")(x), MLP_IN)  # [B, L, F]
        y = Dense(config, (mlp, width), ("mlp", "embed"), name="mlp_out")(activation(config, keeps_input)(y))
        x = residual(x, y, "mlp_norm")
        return x, x if self.collect else None


class Encoder(nn.Module):
    """Embeddings and layers, of a Transformer or of LSTMs.

    All layers' parameters are stacked on a leading axis N, scanned or not: unrolling changes how the loop is
    compiled and nothing else, so any checkpoint loads with either setting. Parameters may be given with the lowest
    layers in a stack FROZEN_LAYERS of their own, so that a gradient with respect to the others stops there.
    """

    config: ModelConfig

    def setup(self) -> None:
        if self.config.encoder == LSTM:
            self.left, self.right = (LstmReader(self.config, direction) for direction in self.config.reads)
        else:
            self.embeddings = Embeddings(self.config)

    @property
    def token_tables(self) -> tuple[jax.Array, ...]:
        """For tied output projections, float32: [V, D], or of each of `config.reads` [V, D / 2]."""
        return tuple(part.token_table for part in self._parts)

    @property
    def _parts(self) -> tuple[nn.Module, ...]:
        return (self.left.embeddings, self.right.embeddings) if self.config.encoder == LSTM else (self.embeddings,)

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array,
        sequence_ids: jax.Array,
        position_ids: jax.Array | None = None,
        *,
        deterministic: bool = True,
        collect_layers: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Hidden states of the last layer, and of all of them if asked for.

        Args:
          input_ids: [B, L] int32.
          segment_ids: [B, L] int32.
          sequence_ids: [B, L] int32, which sequence of the row a token belongs to; 0 is padding.
          position_ids: [B, L] int32, position within the sequence; for rows of one sequence 0, 1, 2, ... by default.
          deterministic: no dropout; otherwise a `dropout` rng is needed.
          collect_layers: also return the embeddings' and each layer's output.

        Returns:
          [B, L, D] and None, or [B, L, D] and [N + 1, B, L, D], in the config's dtype.
        """
        config = self.config
        if config.encoder == LSTM:
            # Positions and segments are a Transformer's.
            parts = (
                reader(input_ids, sequence_ids, deterministic, collect_layers) for reader in (self.left, self.right)
            )
            hidden, states = zip(*parts, strict=True)
            return jnp.concatenate(hidden, -1), jnp.concatenate(states, -1) if collect_layers else None
        attention = resolve(config, input_ids.shape[1], several_sequences=position_ids is not None)
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embeddings(input_ids, segment_ids, position_ids, deterministic)
        return run_layers(self, Layer, (config, attention, deterministic, collect_layers), x, sequence_ids)


def pool_cls_packed(reads: Sequence[str], hidden: jax.Array, sequence_ids: jax.Array, sequences: int) -> jax.Array:
    """What stands for each sequence of a row, as `pool_cls` for a row of one.

    Args:
      reads, hidden: as in `pool_cls`.
      sequence_ids: [B, L] int32.
      sequences: that a row has at most; of those it does not have, there is something finite.

    Returns:
      [B, sequences, D].
    """
    member = sequence_ids[:, None] == 1 + jnp.arange(sequences)[:, None]  # [B, sequences, L]
    first = jnp.argmax(member, axis=-1)
    last = jnp.maximum(first + jnp.sum(member, axis=-1) - 1, 0)

    def of(part: jax.Array, direction: str) -> jax.Array:
        return jnp.take_along_axis(part, (last if direction == LEFT else first)[..., None], axis=1)

    parts = jnp.split(hidden, len(reads), axis=-1)
    return jnp.concatenate([of(part, direction) for part, direction in zip(parts, reads, strict=True)], -1)


def pool_cls(reads: Sequence[str], hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """What stands for a whole row: of each part of its states, that of the token which has seen all others.

    That is the first token, [CLS], but the last one, [SEP], of what sees its left alone.

    Args:
      reads: the directions in which equal parts of the states know a row, see `Architecture.reads`.
      hidden: [B, L, D].
      input_mask: [B, L] int32, 1 for a row's tokens, which come first.

    Returns:
      [B, D].
    """
    last = jnp.maximum(jnp.sum(input_mask, axis=1) - 1, 0)

    def of(part: jax.Array, direction: str) -> jax.Array:
        return jnp.take_along_axis(part, last[:, None, None], axis=1)[:, 0] if direction == LEFT else part[:, 0]

    parts = jnp.split(hidden, len(reads), axis=-1)
    return jnp.concatenate([of(part, direction) for part, direction in zip(parts, reads, strict=True)], -1)


class Pooler(nn.Module):
    """Dense and tanh over the hidden state of `pool_cls`: [..., D] to [..., D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, whole_row: jax.Array) -> jax.Array:
        width = self.config.hidden_size
        return jnp.tanh(Dense(self.config, (width, width), ("embed", "pooled"), name="dense")(whole_row))
