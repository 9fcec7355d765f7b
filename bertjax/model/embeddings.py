"""Embeddings below the layers of an encoder. Axis letters: see `encoder.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.layers import Dense, kernel_init, make_norm
from bertjax.model.partitioning import resolve_auto, with_logical_constraint


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then norm and dropout (paper, Figure 2).

    For LSTMs, embeds only the tokens, in half the hidden size. The tables are plain parameters with paths such as
    `embeddings/token`. `nn.Embed` would add a level to these paths.
    """

    config: ModelConfig
    # Embeddings whose tables and norm this module uses (default: None, own tables and norm). ELECTRA's generator
    # (`ReplacedTokenModel`) uses those of the encoder, followed by its own projection.
    tied_embeddings: "Embeddings | None" = None

    def setup(self) -> None:
        config = self.config
        if config.embedding_size:
            self.projection = Dense(config, (config.hidden_size,), (None, "embed"))
        if self.tied_embeddings is not None:
            for name in ("token_table", "segment_table", "position_table", "norm"):
                setattr(self, name, getattr(self.tied_embeddings, name, None))  # None if the config has no such table
            return

        def table(name: str, num_rows: int, axis: str) -> jax.Array:
            shape = num_rows, config.embedding_width // len(config.context_sides)
            return self.param(name, kernel_init(config, (axis, "embed")), shape)

        self.token_table = table("token", config.padded_vocab_size, "vocab")
        if config.num_segments:
            self.segment_table = table("segment", config.num_segments, "segment")
        if config.has_position_embeddings:
            self.position_table = table("position", config.max_position_embeddings, "position")
        if config.embedding_norm:
            # The layers' norms recompute their float32 intermediate values in the backward pass. Here, this would save
            # no memory, because the input is float32 as well.
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
        # Multiply by one-hot rows, because for two segments, this is faster than a gather, forward and backward. Set
        # `precision`, because accelerators would otherwise multiply with less than float32 precision.
        config = self.config
        if config.num_segments and not config.has_pair_segments:  # All tokens have segment 0, as in RoBERTa.
            x += self.segment_table[:1]
        elif config.num_segments:
            one_hot = jax.nn.one_hot(segment_ids, config.num_segments, dtype=x.dtype)
            x += jnp.matmul(one_hot, self.segment_table, precision="highest")
        if config.has_position_embeddings:
            if offset := config.position_offset:  # In RoBERTa, [PAD] has token id 1 and position 1, both `offset - 1`.
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
    """Returns RoBERTa's positions [B, L]: -1 for [PAD], even inside a text. Other positions do not count [PAD].

    For example, the positions of a text "a [PAD] b" are 0, -1 and 1.
    """
    counts = jnp.cumsum(is_pad, axis=1)
    first = jnp.arange(is_pad.shape[1]) - position_ids  # index of the first token of each sequence
    counts -= jnp.take_along_axis(counts - is_pad, first, axis=1)
    return jnp.where(is_pad, -1, position_ids - counts)
