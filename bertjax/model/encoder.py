"""Transformer encoders of BERT and newer models: embeddings and a stack of layers.

Axis letters in shape comments of this package:

    B batch    L row length    D hidden size    H heads    K head size    F feed-forward size
    V vocabulary (padded)    P masked positions per row    N layers    E width of the embeddings (in BERT, D)
    S maximum sequences per row

A row contains one or several sequences. `sequence_ids` contains the index of each token's sequence, starting at 1, or 0
for padding. `position_ids` counts from 0 within each sequence. For rows of one sequence, `sequence_ids` is the input
mask.

Axis names in `with_logical_constraint` (`ACTIVATION_RULES` of `training/sharding.py`):

    batch              B, sharded over the mesh axes `data` and `fsdp`
    batch_over_data    B, sharded over `data` only
    embed              D, not sharded
    embed_over_fsdp    D, or E of the token table, sharded over `fsdp`
    length             L, not sharded
    heads, mlp, vocab  H, F and V, sharded over `tensor`

Parameters have separate rules (`RULES` of the same file), which shard `embed` over `fsdp`, and `vocab` over `tensor`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.attention.dispatch import select_attention
from bertjax.model.config import ABSOLUTE, LSTM, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.layers import Dense, TransformerLayer, kernel_init, layer_inputs, make_norm, run_layers
from bertjax.model.lstm import LstmEncoder
from bertjax.model.partitioning import resolve_auto, with_logical_constraint

# Name of the encoder's Flax module.
ENCODER = "encoder"


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then norm and dropout (paper, Figure 2).

    The tables are plain parameters with paths such as `embeddings/token`. `nn.Embed` would add a level to these paths.
    """

    config: ModelConfig
    # Embeddings of the encoder, whose tables and norm ELECTRA's generator (`ReplacedTokenModel`) uses below a
    # projection of its own (default: None, own tables and norm).
    tied_embeddings: "Embeddings | None" = None

    def setup(self) -> None:
        config = self.config
        if config.embedding_size:
            self.projection = Dense(config, (config.hidden_size,), (None, "embed"))
        if self.tied_embeddings is not None:
            for name in ("token_table", "segment_table", "position_table", "norm"):
                setattr(self, name, getattr(self.tied_embeddings, name, None))  # None: the config has no such table
            return

        def table(name: str, num_rows: int, axis: str) -> jax.Array:
            return self.param(name, kernel_init(config, (axis, "embed")), (num_rows, config.embedding_width))

        self.token_table = table("token", config.padded_vocab_size, "vocab")
        if config.type_vocab_size:
            self.segment_table = table("segment", config.type_vocab_size, "segment")
        if config.position_embedding_type == ABSOLUTE:
            self.position_table = table("position", config.max_position_embeddings, "position")
        if config.embedding_norm:
            # The norms of the layers recompute their float32 intermediate values in the backward pass. Here, this would
            # save no memory, because the input is float32 as well.
            self.norm = make_norm(config, recompute=False)

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array, deterministic: bool
    ) -> jax.Array:
        # `fsdp` shards both the rows of the batch and the columns E of the token table. Do not all-gather the table:
        # (1) all-gather the ids, which are smaller; (2) look them up in each device's own columns; (3) exchange columns
        # for rows in an all-to-all, so that each device has all columns of its own rows.
        # (1)
        input_ids, segment_ids, position_ids = (
            with_logical_constraint(ids, ("batch_over_data", "length"))
            for ids in (input_ids, segment_ids, position_ids)
        )
        # (2)
        table = with_logical_constraint(self.token_table, ("vocab", "embed_over_fsdp"))  # [V, E]
        x = jnp.take(table, input_ids, axis=0)  # float32 [B, L, E]
        # Multiply by one-hot rows, because for two segments, this is faster than a gather, forward and backward.
        config = self.config
        if config.type_vocab_size == 1:  # Both texts of a pair have this segment, as in RoBERTa.
            x += self.segment_table
        elif config.type_vocab_size:
            x += jax.nn.one_hot(segment_ids, config.type_vocab_size, dtype=x.dtype) @ self.segment_table
        if config.position_embedding_type == ABSOLUTE:
            if offset := config.position_offset:  # In RoBERTa, [PAD] is token 1 = offset - 1, and has this position.
                position_ids = _roberta_positions(input_ids == offset - 1, position_ids)
            x += jnp.take(self.position_table, position_ids + offset, axis=0)
        x = with_logical_constraint(x, ("batch_over_data", "length", "embed_over_fsdp"))
        # (3)
        x = with_logical_constraint(x, ("batch", "length", "embed"))
        x = self.norm(x) if config.embedding_norm else x.astype(resolve_auto(config).dtype)
        # Do not use `nn.Dropout`, because it would save its mask for the backward pass. `dropout` recomputes it.
        key = None if deterministic else self.make_rng("dropout")
        x = dropout(x, config.hidden_dropout_prob, key)
        return self.projection(x) if config.embedding_size else x


def _roberta_positions(is_pad: jax.Array, position_ids: jax.Array) -> jax.Array:
    """Returns RoBERTa's positions [B, L]: -1 for [PAD], even inside a text; others as if there were no [PAD] tokens."""
    counts = jnp.cumsum(is_pad, axis=1)
    first = jnp.arange(is_pad.shape[1]) - position_ids  # index of the first token of each sequence
    counts -= jnp.take_along_axis(counts - is_pad, first, axis=1)
    return jnp.where(is_pad, -1, position_ids - counts)


class Encoder(nn.Module):
    """Embeddings and a stack of Transformer layers. Part of the models in `models.py`, such as `PretrainingModel`.

    Parameters of all layers are stacked on a leading axis N, whether the layers are scanned or unrolled. With
    `optimizer.freeze_layers`, the train step passes the lowest layers as a second stack, `frozen_layers`, which
    `run_layers` applies first. The backward pass then stops at the lowest trainable layer.
    """

    config: ModelConfig
    tied_embeddings: Embeddings | None = None

    def setup(self) -> None:
        # Create the embeddings in `setup`, so that models can read `token_tables` outside of `__call__`.
        self.embeddings = Embeddings(self.config, self.tied_embeddings)

    @property
    def token_tables(self) -> tuple[jax.Array, ...]:
        """Token embedding tables for tied output layers: one, float32 [V, E]. `LstmEncoder` has one per direction."""
        return (self.embeddings.token_table,)

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
          input_ids: [B, L] int32.
          segment_ids: [B, L] int32.
          sequence_ids: [B, L] int32, index of each token's sequence, starting at 1, or 0 for padding.
          position_ids: [B, L] int32, position of each token in its sequence (default: None, each row counts from 0).
            Required for packed rows. If it is None, the encoder assumes that rows are not packed. It then accepts
            attention implementations that do not support packed rows, such as `cudnn`.
          deterministic: whether to disable dropout. If False, a `dropout` rng is required.
          collect_layers: whether to also return the output of the embeddings and of every layer.

        Returns:
          Hidden states of the last layer, [B, L, D], in the config's dtype.
          Hidden states of the embeddings and all layers, [N + 1, B, L, D]. With `norm_first`, the last entry is the
            output of the final norm. None if `collect_layers` is False.
        """
        config = self.config
        attention = select_attention(config, input_ids.shape[1], is_packed=position_ids is not None)
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embeddings(input_ids, segment_ids, position_ids, deterministic)
        layer_fields = {"config": config, "attention": attention, "deterministic": deterministic}
        # Apply `TransformerLayer(**layer_fields)` N times, as the submodule `layers` of this module. `per_layer` are
        # its inputs that differ between layers, with an axis N. `shared` are the same for all layers.
        per_layer, shared = layer_inputs(config, sequence_ids, position_ids)
        x, layers = run_layers(self, TransformerLayer, layer_fields, x, per_layer, shared, collect=collect_layers)
        if config.norm_first:
            x = make_norm(config, "final_norm")(x)
            layers = None if layers is None else jnp.concatenate([layers[:-1], x[None]])
        return x, layers


def make_encoder(config: ModelConfig, name: str | None = None) -> Encoder | LstmEncoder:
    """Builds the encoder module that `model.encoder` selects."""
    return (LstmEncoder if config.encoder == LSTM else Encoder)(config, name=name)


class EncoderOutputs(NamedTuple):
    """Encoder outputs that heads use.

    Attributes:
      tokens: [B, L, D], hidden states of the last layer.
      token_tables: token embedding tables for tied output layers, see `Encoder.token_tables`.
      layers: [N + 1, B, L, D], outputs of the embeddings and all layers. None if they were not collected.
    """

    tokens: jax.Array
    token_tables: tuple[jax.Array, ...]
    layers: jax.Array | None


def is_packed(batch: Mapping[str, jax.Array]) -> bool:
    """Returns whether rows may contain several sequences.

    Such batches have `sequence_ids` instead of `input_mask`, and `position_ids`.
    """
    return "sequence_ids" in batch


def encoder_inputs(batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the arguments `input_ids`, `segment_ids`, `sequence_ids` and `position_ids` of an encoder."""
    sequence_ids = batch["sequence_ids" if is_packed(batch) else "input_mask"]
    return batch["input_ids"], batch["segment_ids"], sequence_ids, batch.get("position_ids")


def encode(
    config: ModelConfig, batch: Mapping[str, jax.Array], deterministic: bool, collect_layers: bool = False
) -> EncoderOutputs:
    """Applies an encoder to a batch inside the calling module, under the name ENCODER.

    Args:
      config: model config.
      batch: arrays that `models.py` describes.
      deterministic: whether to disable dropout.
      collect_layers: whether to return the outputs of all layers.
    """
    encoder = make_encoder(config, name=ENCODER)
    tokens, layers = encoder(*encoder_inputs(batch), deterministic=deterministic, collect_layers=collect_layers)
    return EncoderOutputs(tokens, encoder.token_tables, layers)
