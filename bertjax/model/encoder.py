"""Encoders: embeddings and a stack of Transformer layers, as in BERT and newer models, or LSTMs.

Axis letters in shape comments of this package:

    B batch    L row length    D hidden size    H heads    K head size    F feed-forward size
    V vocabulary (padded)    P masked positions per row    N layers    E width of the embeddings (in BERT, D)
    S maximum sequences per row

A row contains one or several sequences. `sequence_ids` contains the index of each token's sequence, starting at 1, or 0
for padding. `position_ids` counts from 0 within each sequence. For rows of one sequence, `sequence_ids` is the input
mask.

`partitioning.py` lists the logical axis names, such as "embed", that define the sharding of these axes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.attention.dispatch import Attention, select_attention
from bertjax.model.attention.xla import AttentionMask
from bertjax.model.config import LSTM, ModelConfig
from bertjax.model.dropout import DropoutSpec, dropout
from bertjax.model.embeddings import Embeddings
from bertjax.model.layers import (
    CONTEXT,
    MLP_IN,
    QKV,
    RESIDUAL,
    Dense,
    activation,
    has_layer_remat,
    make_norm,
    run_layers,
    save_inputs_only,
)
from bertjax.model.lstm import LstmReader
from bertjax.model.partitioning import ACTIVATION_AXES, with_logical_constraint
from bertjax.model.rotary import rotate, rotations

# Name of the encoder's Flax module.
ENCODER = "encoder"


class SharedInputs(NamedTuple):
    """Inputs that all layers share."""

    sequence_ids: jax.Array  # [B, L] int32
    rotations: jax.Array | None  # cosines and sines of `rotary.rotations` (None: no RoPE)


class LayerInputs(NamedTuple):
    """Inputs that differ between layers: bool [N] in the encoder, a bool scalar in a layer."""

    is_local: Any  # whether attention is local (None: in no layer)
    has_attention_norm: Any  # with `norm_first`, whether a norm precedes the attention (None: in all layers)


class Encoder(nn.Module):
    """Embeddings and a stack of layers. Part of the models in `models.py`, such as `PretrainingModel`.

    With `encoder=lstm`, concatenates the hidden states of one `LstmReader` per direction.

    Parameters of all layers are stacked on a leading axis N, even if `nn.scan` is unrolled (`scan_layers=false`). If
    the lowest layers are frozen, the train step passes their parameters as a second stack.
    """

    config: ModelConfig
    # Embeddings whose tables this encoder shares (default: None, own tables). Used by ELECTRA's generator.
    tied_embeddings: Embeddings | None = None

    def setup(self) -> None:
        # Create the embeddings in `setup`, so that models can read `token_tables` outside `__call__`.
        if self.config.encoder == LSTM:
            self.left, self.right = (LstmReader(self.config, side) for side in self.config.context_sides)
        else:
            self.embeddings = Embeddings(self.config, self.tied_embeddings)

    @property
    def token_tables(self) -> tuple[jax.Array, ...]:
        """Token embedding tables for tied output layers: one float32 [V, E], or one [V, D / 2] per LSTM direction."""
        owners = (self.left, self.right) if self.config.encoder == LSTM else (self,)
        return tuple(owner.embeddings.token_table for owner in owners)

    @nn.compact  # because `run_layers` creates the layers in this call
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
        """Encodes a batch of rows.

        Args:
          input_ids, segment_ids, sequence_ids: [B, L] int32.
          position_ids: [B, L] int32, position of each token in its sequence. None (default): rows are not packed, and
            positions count from 0.
          deterministic: whether to disable dropout. If False, a `dropout` rng is required.
          collect_layers: whether to also return the output of the embeddings and of every layer.

        Returns:
          Hidden states [B, L, D] after the last layer and, with `norm_first`, the final norm, in the config's dtype.
          Hidden states after the embeddings and after each layer, [N + 1, B, L, D], or None if `collect_layers` is
            False. The last entry equals the first result.
        """
        config, is_packed = self.config, position_ids is not None
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        if config.encoder == LSTM:
            ids = input_ids, segment_ids, position_ids
            readers = (self.left, self.right)
            outputs = [reader(ids, sequence_ids, deterministic, collect_layers) for reader in readers]
            hidden, layers = zip(*outputs, strict=True)
            return jnp.concatenate(hidden, -1), (jnp.concatenate(layers, -1) if collect_layers else None)
        attention_fn = select_attention(config, input_ids.shape[1], is_packed=is_packed)
        x = self.embeddings(input_ids, segment_ids, position_ids, deterministic)
        is_local = np.array(config.local_layers) if config.local_layers else None
        # ModernBERT has no norm before the attention of the lowest layer.
        has_norm = None if config.first_attention_norm else np.arange(config.num_hidden_layers) > 0
        per_layer = LayerInputs(is_local, has_norm)
        shared = SharedInputs(sequence_ids, rotations(config, position_ids))
        # `run_layers` applies `nn.scan` to the class, so pass the class and its fields instead of a module. Each layer
        # gets its slice of `per_layer` and of the stacked parameters, its own dropout key, and `shared`.
        fields = {
            "config": config,
            "attention_fn": attention_fn,
            "deterministic": deterministic,
            "collect": collect_layers,
        }
        x, layers = run_layers(self, TransformerLayer, fields, x, per_layer, shared)
        if config.norm_first:
            x = make_norm(config, "final_norm")(x)
            layers = None if layers is None else jnp.concatenate([layers[:-1], x[None]])
        return x, layers


class TransformerLayer(nn.Module):
    """Transformer layer: self-attention and feed-forward network, each with a residual connection and a norm."""

    config: ModelConfig
    attention_fn: Attention
    deterministic: bool
    collect: bool

    @nn.compact
    def __call__(self, x: jax.Array, layer: LayerInputs, shared: SharedInputs) -> tuple[jax.Array, jax.Array | None]:
        config = self.config

        def residual(
            x: jax.Array, sublayer: Callable[[jax.Array], jax.Array], norm_name: str, has_norm: jax.Array | None = None
        ) -> jax.Array:
            """Returns norm(x + dropout(sublayer(x))) or, with `norm_first`, x + dropout(sublayer(norm(x))).

            If the bool scalar `has_norm` is False, there is no norm (only with `norm_first`).
            """
            key = None if self.deterministic else self.make_rng("dropout")
            # Recompute the norm in the backward pass, unless `nn.remat` already recomputes the whole layer.
            norm = make_norm(config, norm_name, recompute=not has_layer_remat(config))
            normed = norm(x) if config.norm_first else x
            if has_norm is not None:  # ModernBERT
                normed = jnp.where(has_norm, normed, x)
            total = checkpoint_name(x + dropout(sublayer(normed), config.hidden_dropout_prob, key), RESIDUAL)
            return with_logical_constraint(total if config.norm_first else norm(total), ACTIVATION_AXES)

        attention = SelfAttention(config, self.attention_fn, name="attention")
        attend = partial(attention, layer=layer, shared=shared, deterministic=self.deterministic)
        x = residual(x, attend, "attention_norm", layer.has_attention_norm)
        x = residual(x, partial(feed_forward, config), "mlp_norm")
        return x, x if self.collect else None


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection: [B, L, D] to [B, L, D]."""

    config: ModelConfig
    attention_fn: Attention

    @nn.compact
    def __call__(self, x: jax.Array, layer: LayerInputs, shared: SharedInputs, deterministic: bool) -> jax.Array:
        config = self.config
        dropout_key = None if deterministic else self.make_rng("dropout")
        num_key_value_heads = config.num_key_value_heads or config.num_attention_heads

        def project(name: str, num_heads: int) -> jax.Array:  # [B, L, H, K]
            shape, axes = (num_heads, config.head_size), ("embed", "heads", "head")
            y = Dense(config, shape, axes, flat=True, use_bias=config.attention_bias, name=name)(x)
            # Compute and save [B, L, H * K] (`flat`), because a TPU would pad a short axis K to 128 elements.
            y = checkpoint_name(y, QKV).reshape(*y.shape[:-1], *shape)
            # Each key head serves several query heads.
            repeats = config.num_attention_heads // num_heads
            return jnp.repeat(y, repeats, axis=2) if repeats > 1 else y

        query = project("query", config.num_attention_heads)
        key, value = project("key", num_key_value_heads), project("value", num_key_value_heads)
        if shared.rotations is not None:
            query, key = (rotate(config, states, shared.rotations, layer.is_local) for states in (query, key))

        def attend(window: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            # Tokens attend to all tokens of their sequence (window=0), or to themselves and `window` neighbors, half on
            # each side. The window is static, because kernels need it at compile time.
            mask = AttentionMask(config.attention_direction, shared.sequence_ids, window)
            drop = DropoutSpec(config.attention_probs_dropout_prob, dropout_key)
            return self.attention_fn(query, key, value, mask, drop)

        run = partial(attend, 0)
        if layer.is_local is not None:
            run = partial(jax.lax.cond, layer.is_local, partial(attend, config.local_attention), run)
        if config.remat == "attention":
            run = save_inputs_only(run, config)  # The backward pass recomputes attention from query, key and value.
        context = checkpoint_name(run(query, key, value), CONTEXT)
        axes = ("heads", "head", "embed")
        dense = Dense(config, (config.hidden_size,), axes, use_bias=config.attention_bias, name="output")
        return dense(context)  # contracts H and K


def feed_forward(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Applies the feed-forward network, [B, L, D] to [B, L, D]. Its layers become submodules of the calling module."""

    def project(name: str) -> jax.Array:  # [B, L, F]
        dense = Dense(config, (config.intermediate_size,), ("embed", "mlp"), use_bias=config.mlp_bias, name=name)
        return checkpoint_name(dense(x), MLP_IN)

    y = activation(config, recompute=not has_layer_remat(config))(project("mlp_in"))
    if config.gated_mlp:
        y = y * project("mlp_gate")
    return Dense(config, (config.hidden_size,), ("mlp", "embed"), use_bias=config.mlp_bias, name="mlp_out")(y)


def is_packed(batch: Mapping[str, jax.Array]) -> bool:
    """Returns whether rows are packed. A packed batch has `sequence_ids` and `position_ids` instead of `input_mask`."""
    return "sequence_ids" in batch


def encoder_inputs(batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the arguments `input_ids`, `segment_ids`, `sequence_ids` and `position_ids` of an encoder."""
    sequence_ids = batch["sequence_ids" if is_packed(batch) else "input_mask"]
    return batch["input_ids"], batch["segment_ids"], sequence_ids, batch.get("position_ids")
