"""Pooling and output layers that models share. Axis letters: see `encoder.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.layers import Dense, activation, constant_init, kernel_init, make_norm
from bertjax.model.matmul import cast_parameter, dot, dot_transposed
from bertjax.model.partitioning import resolve_layout, with_logical_constraint

_MIN_SQUARED_NORM = 1e-24


def first_maximum(logits: jax.Array) -> jax.Array:
    """Returns the index of the maximum of logits [..., V], int32 [...]."""
    # Avoid `argmax`, because for a sharded vocabulary, XLA would all-gather an index array as large as the logits.
    classes = jnp.arange(logits.shape[-1])
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == maximum, classes, classes.size), axis=-1)


def unit(vectors: jax.Array) -> jax.Array:
    """Scales vectors [..., D] to length 1. Vectors of zeros stay zeros, with zero gradients."""
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
        table = cast_parameter(token_table, resolve_layout(config).dtype)
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
    """Dense layer, activation (in BERT, tanh) and optional norm on states of sequences: [..., D] to [..., D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        config = self.config
        if not config.pooler_act:
            return state
        dense = Dense(config, (config.hidden_size,), ("embed", "pooled"), use_bias=config.head_bias, name="dense")
        pooled = activation(config, config.pooler_act, recompute=False)(dense(state))
        return make_norm(config, "norm")(pooled) if config.pooler_norm else pooled


class NextSentenceHead(nn.Module):
    """Dense layer from pooled states [..., D] to float32 logits [..., 2] for IsNext (0) and NotNext (1)."""

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
