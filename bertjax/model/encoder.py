"""BERT encoder: embeddings and a stack of layers.

Axis letters in shape comments of this package:

    B batch    L row length    D hidden size    H heads    K head size    F feed-forward size
    V vocabulary (padded)    P masked positions per row    N layers

A row contains one or several sequences. `sequence_ids` contains the number of each token's sequence, or 0 for padding.
`position_ids` counts from 0 within each sequence. For rows of one sequence, `sequence_ids` is the input mask.

Logical axes of activations (`ACTIVATION_RULES` of `training/sharding.py`): `batch` is sharded over `data` and `fsdp`,
`shared_batch` over `data` only; `embed_part` is D, sharded over `fsdp`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.attention.dispatch import select_attention
from bertjax.model.config import LSTM, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.layer_stack import run_layers
from bertjax.model.layers import SAVED_NAMES, TransformerLayer, kernel_init, layer_norm
from bertjax.model.lstm import LstmReader
from bertjax.model.partitioning import ACTIVATION_AXES, with_logical_constraint


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then LayerNorm and dropout (paper, Figure 2).

    The tables are plain parameters, because checkpoints store `embeddings/token`. `nn.Embed` would nest them deeper.
    """

    config: ModelConfig

    def setup(self) -> None:
        config, width = self.config, self.config.hidden_size

        def table(name: str, num_rows: int, axis: str) -> jax.Array:
            return self.param(name, kernel_init(config, (axis, "embed")), (num_rows, width))

        self.token_table = table("token", config.padded_vocab_size, "vocab")
        self.segment_table = table("segment", config.type_vocab_size, "segment")
        self.position_table = table("position", config.max_position_embeddings, "position")
        # Recomputation would save no memory, because the float32 input is as large as the intermediate values.
        self.norm = layer_norm(config, recompute=False)

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array, deterministic: bool
    ) -> jax.Array:
        # All-gather the ids over `fsdp` instead of the large token table, which stays sharded along D. The sum of the
        # embeddings is first sharded along D, and then along the batch.
        input_ids, segment_ids, position_ids = (
            with_logical_constraint(ids, ("shared_batch", "length")) for ids in (input_ids, segment_ids, position_ids)
        )
        x = jnp.take(with_logical_constraint(self.token_table, ("vocab", "embed_part")), input_ids, axis=0)  # [B, L, D]
        # For two segments, a matmul with one-hot rows is faster than a gather, in the forward and the backward pass.
        x += jax.nn.one_hot(segment_ids, self.config.type_vocab_size, dtype=x.dtype) @ self.segment_table
        x += jnp.take(self.position_table, position_ids, axis=0)
        x = with_logical_constraint(x, ("shared_batch", "length", "embed_part"))
        x = self.norm(with_logical_constraint(x, ACTIVATION_AXES))
        key = None if deterministic else self.make_rng("dropout")
        return dropout(x, self.config.hidden_dropout_prob, key)


class Encoder(nn.Module):
    """Embeddings and a stack of Transformer or LSTM layers.

    Parameters of all layers are stacked on a leading axis N. Scanned and unrolled layers use the same parameters. With
    `optimizer.freeze_layers`, the train step passes the lowest layers as a second stack (`Frozen.model_params`). The
    backward pass then stops above them.
    """

    config: ModelConfig

    def setup(self) -> None:
        if self.config.encoder == LSTM:
            self.left, self.right = (LstmReader(self.config, direction) for direction in self.config.reads)
        else:
            self.embeddings = Embeddings(self.config)

    @property
    def token_tables(self) -> tuple[jax.Array, ...]:
        """Float32 token embeddings for tied output layers: [V, D], or one [V, D / 2] for each direction of an LSTM."""
        if self.config.encoder == LSTM:
            return self.left.embeddings.token_table, self.right.embeddings.token_table
        return (self.embeddings.token_table,)

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
        """Encodes a batch of rows.

        Args:
          input_ids: [B, L] int32.
          segment_ids: [B, L] int32.
          sequence_ids: [B, L] int32, sequence of each token, 0 for padding.
          position_ids: [B, L] int32, position of each token in its sequence. Required for packed rows of several
            sequences (default: None, positions 0, 1, 2, ...).
          deterministic: whether to disable dropout. If False, a `dropout` rng is required.
          collect_layers: whether to also return the output of the embeddings and of every layer.

        Returns:
          Hidden states of the last layer, [B, L, D], in the config's dtype.
          Hidden states of the embeddings and all layers, [N + 1, B, L, D]. None without `collect_layers`.
        """
        config = self.config
        if config.encoder == LSTM:
            outputs = [
                reader(input_ids, sequence_ids, deterministic, collect_layers) for reader in (self.left, self.right)
            ]
            hidden, states = zip(*outputs, strict=True)
            return jnp.concatenate(hidden, -1), jnp.concatenate(states, -1) if collect_layers else None
        attention = select_attention(config, input_ids.shape[1], several_sequences=position_ids is not None)
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embeddings(input_ids, segment_ids, position_ids, deterministic)
        layer_fields = (config, attention, deterministic)
        return run_layers(self, TransformerLayer, layer_fields, SAVED_NAMES, x, sequence_ids, collect=collect_layers)
