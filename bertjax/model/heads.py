"""Pooling and output layers that models share. Axis letters: see `encoder.py`."""

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import LEFT, ModelConfig
from bertjax.model.encoder import is_packed
from bertjax.model.layers import Dense, activation, constant_init, kernel_init, make_norm
from bertjax.model.matmul import cast_parameter, dot, dot_transposed
from bertjax.model.partitioning import resolve_auto, with_logical_constraint

_MIN_SQUARED_NORM = 1e-24


def pooled_states(
    config: ModelConfig, tokens: jax.Array, batch: Mapping[str, jax.Array], num_sequences: int = 1
) -> jax.Array:
    """Pools token states into one state per sequence: that of [CLS], or their mean (`classifier_pooling`).

    See `sequence_states` for the arguments and the shape.
    """
    if config.classifier_pooling == "cls":
        return sequence_states(config.context_sides, tokens, batch, num_sequences)
    return mean_states(tokens, batch, num_sequences)


def sequence_states(
    context_sides: Sequence[str], tokens: jax.Array, batch: Mapping[str, jax.Array], num_sequences: int = 1
) -> jax.Array:
    """Selects the hidden state that represents each sequence: the state of its first token, [CLS].

    For states with only left context, selects the state of the last token, [SEP], whose context is the whole sequence.

    `context_sides` are as in `Architecture.context_sides`, and `models.py` describes the arrays of `batch`.

    Returns:
      [B, D] for tokens [B, L, D]. For packed rows of up to S = `num_sequences` sequences, [B, S, D], where missing
      sequences get an arbitrary finite state.
    """
    if not is_packed(batch) and LEFT not in context_sides:
        return tokens[:, 0]
    mask = _sequence_masks(batch, num_sequences)
    first = jnp.argmax(mask, axis=-1)
    last = jnp.maximum(first + jnp.sum(mask, axis=-1) - 1, 0)
    selected = [
        jnp.take_along_axis(states, (last if side == LEFT else first)[..., None], axis=1)
        for states, side in zip(jnp.split(tokens, len(context_sides), axis=-1), context_sides, strict=True)
    ]
    states = jnp.concatenate(selected, axis=-1)
    return states if is_packed(batch) else states[:, 0]


def mean_states(tokens: jax.Array, batch: Mapping[str, jax.Array], num_sequences: int = 1) -> jax.Array:
    """Averages the states of each sequence's tokens. See `sequence_states` for the arguments and the shape."""
    mask = _sequence_masks(batch, num_sequences)
    weights = mask / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    means = jnp.einsum("BSL,BLD->BSD", weights.astype(jnp.float32), tokens.astype(jnp.float32)).astype(tokens.dtype)
    return means if is_packed(batch) else means[:, 0]


def _sequence_masks(batch: Mapping[str, jax.Array], num_sequences: int) -> jax.Array:
    """Returns a mask of the tokens of each sequence, bool [B, S, L]. S is 1 for rows that are not packed."""
    if is_packed(batch):
        return batch["sequence_ids"][:, None] == 1 + jnp.arange(num_sequences)[:, None]
    return batch["input_mask"][:, None] > 0


def first_maximum(logits: jax.Array) -> jax.Array:
    """Returns the index of the maximum of logits [..., V], int32 [...]."""
    # Avoid `argmax`, because for a sharded vocabulary, XLA would all-gather an index array as large as the logits.
    classes = jnp.arange(logits.shape[-1])
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == maximum, classes, classes.size), axis=-1)


def unit(vectors: jax.Array) -> jax.Array:
    """Scales vectors [..., D] to an L2 norm of 1. Zero vectors stay zero, with zero gradients."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), _MIN_SQUARED_NORM))


class LmHead(nn.Module):
    """Language-model head: dense transform, norm, and a decoder that is tied to the token embeddings by default."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, token_table: jax.Array) -> jax.Array:
        """Returns float32 logits [B, P, V] for states [B, P, D] and a token table [V, E].

        Logits of vocabulary padding are the lowest float32 number, so that their probability is 0.
        """
        config = self.config
        x = hidden
        if config.lm_head == "transform":
            features = (config.embedding_width,)
            x = Dense(config, features, ("embed", "pooled"), use_bias=config.head_bias, name="transform")(x)
            x = make_norm(config, "norm")(activation(config, config.head_act)(x))
        if not config.tie_word_embeddings:
            shape = (config.padded_vocab_size, x.shape[-1])
            token_table = self.param("decoder", kernel_init(config, ("vocab", "embed")), shape)
        x = with_logical_constraint(x, ("batch_over_data", "length", "embed"))
        # Reshard the table from columns to rows with an all-to-all, so that logits are sharded along the vocabulary.
        table = cast_parameter(token_table, resolve_auto(config).dtype)
        table = with_logical_constraint(table, ("vocab", "embed_over_fsdp"))
        table = with_logical_constraint(table, ("vocab_part", "embed"))
        logits = dot_transposed(x, table, jnp.float32)
        if config.decoder_bias:
            bias = self.param("bias", constant_init(0.0, ("vocab_part",)), (config.padded_vocab_size,))
            # Add the bias as an outer product, so that its gradient is a matmul. XLA's CPU backend computes a matmul 30
            # times faster than a sum over all positions.
            logits = logits + dot(jnp.ones((*logits.shape[:-1], 1)), bias[None])
        logits = with_logical_constraint(logits, ("batch_over_data", "length", "vocab_part"))
        if config.padded_vocab_size > config.vocab_size:
            in_vocabulary = jnp.arange(config.padded_vocab_size) < config.vocab_size
            logits = jnp.where(in_vocabulary, logits, jnp.finfo(jnp.float32).min)
        return logits


class Pooler(nn.Module):
    """Dense layer, activation (in BERT, tanh) and optional norm, from states [..., D] to [..., D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        config = self.config
        if not config.pooler_act:
            return state
        dense = Dense(config, (config.hidden_size,), ("embed", "pooled"), use_bias=config.head_bias, name="dense")
        pooled = activation(config, config.pooler_act, recompute=False)(dense(state))
        return make_norm(config, "norm")(pooled) if config.pooler_norm else pooled


def apply_pooler(
    pooler: Pooler, tokens: jax.Array, batch: Mapping[str, jax.Array], num_sequences: int = 1
) -> jax.Array:
    """Pools token states, then applies the pooler. With `classifier_pooling=late`, applies the pooler first.

    See `sequence_states` for the arguments and the shape.
    """
    if pooler.config.classifier_pooling == "late":
        return mean_states(pooler(tokens), batch, num_sequences)
    return pooler(pooled_states(pooler.config, tokens, batch, num_sequences))


class NextSentenceHead(nn.Module):
    """Dense layer from pooled states [..., D] to float32 logits [..., 2], one for each label of a sentence pair."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        return Dense(self.config, (2,), ("embed", None), name="dense")(pooled).astype(jnp.float32)


class DiscriminatorHead(nn.Module):
    """Dense layer, activation, and one float32 logit per token, positive for replaced tokens (arXiv 2003.10555)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = Dense(self.config, (self.config.hidden_size,), ("embed", "pooled"), name="dense")
        x = activation(self.config, recompute=False)(dense(tokens))
        return Dense(self.config, (1,), ("embed", None), name="prediction")(x)[..., 0].astype(jnp.float32)
