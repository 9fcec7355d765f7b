"""Pooling, output layers, complete models, and descriptions of models as JSON. Axis letters: see `encoder.py`.

Every model with an output layer maps a batch to float32 logits. A batch is a dictionary of int32 arrays:

    input_ids, input_mask, segment_ids    [B, L]; the mask is 1 for tokens, 0 for padding at the end
    sequence_ids, position_ids            [B, L], only for packed rows of several sequences; see `encoder.py`
    masked_lm_positions                   [B, P]
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.errors import UsageError
from bertjax.model.config import TRANSFORMER, ModelConfig
from bertjax.model.dropout import dropout
from bertjax.model.encoder import make_encoder
from bertjax.model.feature_head import CACHED_FEATURES, FeatureHead, token_representations
from bertjax.model.layers import Dense, activation, constant_init, layer_norm
from bertjax.model.lstm import LEFT
from bertjax.model.matmul import cast_parameter, dot, dot_transposed
from bertjax.model.partitioning import resolve_layout, with_logical_constraint

_INPUTS = ("input_ids", "input_mask", "segment_ids", "sequence_ids", "position_ids", CACHED_FEATURES)


class TiedLmHead(nn.Module):
    """Dense transform, then a projection tied to the token embeddings (google-research/bert `run_pretraining.py`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, token_table: jax.Array) -> jax.Array:
        """Returns float32 logits [B, P, V] for states [B, P, D] and a token table [V, D].

        Logits of vocabulary padding are the lowest float32 number, so that their probability is 0.
        """
        config = self.config
        x = Dense(config, (config.hidden_size,), ("embed", "pooled"), name="transform")(hidden)
        x = layer_norm(config, "norm")(activation(config)(x))
        x = with_logical_constraint(x, ("batch_over_data", "length", "embed"))
        # Reshard the table from columns to rows with an all-to-all, so that logits are sharded along the vocabulary.
        table = cast_parameter(token_table, resolve_layout(config).dtype)
        table = with_logical_constraint(table, ("vocab", "embed_over_fsdp"))
        table = with_logical_constraint(table, ("vocab_part", "embed"))
        bias = self.param("bias", constant_init(0.0, ("vocab_part",)), (config.padded_vocab_size,))

        logits = dot_transposed(x, table, jnp.float32)
        # Add the bias as an outer product, so that its gradient is a matmul. XLA's CPU backend computes a matmul 30
        # times faster than a sum over all positions.
        logits = logits + dot(jnp.ones((*logits.shape[:-1], 1)), bias[None])
        logits = with_logical_constraint(logits, ("batch_over_data", "length", "vocab_part"))
        if config.padded_vocab_size > config.vocab_size:
            in_vocabulary = jnp.arange(config.padded_vocab_size) < config.vocab_size
            logits = jnp.where(in_vocabulary, logits, jnp.finfo(jnp.float32).min)
        return logits


def lm_head_flops(width: int, vocab_size: int) -> int:
    """Returns the forward FLOPs of `TiedLmHead` per predicted position."""
    return 2 * width * (width + vocab_size)


def pool_cls(context_sides: Sequence[str], hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Selects the hidden state that represents each row: the state of the first token, [CLS].

    For states with only left context, selects the state of the last token, [SEP], whose context is the whole row.

    Args:
      context_sides: context direction of each part of the hidden state, see `Architecture.context_sides`. All parts
        have the same width.
      hidden: [B, L, D].
      input_mask: [B, L] int32, 1 for tokens and 0 for padding at the end.

    Returns:
      [B, D].
    """
    last = jnp.maximum(jnp.sum(input_mask, axis=1) - 1, 0)[:, None, None]
    slices = zip(jnp.split(hidden, len(context_sides), axis=-1), context_sides, strict=True)
    return jnp.concatenate(
        [jnp.take_along_axis(states, last, axis=1)[:, 0] if side == LEFT else states[:, 0] for states, side in slices],
        axis=-1,
    )


def pool_cls_packed(
    context_sides: Sequence[str], hidden: jax.Array, sequence_ids: jax.Array, num_sequences: int
) -> jax.Array:
    """Selects the hidden state that represents each sequence of packed rows, as `pool_cls` does for a whole row.

    Args:
      context_sides, hidden: as in `pool_cls`.
      sequence_ids: [B, L] int32.
      num_sequences: maximum number of sequences per row; missing sequences get an arbitrary finite state.

    Returns:
      [B, num_sequences, D].
    """
    in_sequence = sequence_ids[:, None] == 1 + jnp.arange(num_sequences)[:, None]  # [B, num_sequences, L]
    first = jnp.argmax(in_sequence, axis=-1)
    last = jnp.maximum(first + jnp.sum(in_sequence, axis=-1) - 1, 0)
    slices = zip(jnp.split(hidden, len(context_sides), axis=-1), context_sides, strict=True)
    return jnp.concatenate(
        [jnp.take_along_axis(states, (last if side == LEFT else first)[..., None], axis=1) for states, side in slices],
        axis=-1,
    )


class Pooler(nn.Module):
    """Dense layer and tanh on the state selected by `pool_cls`: [..., D] to [..., D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        return jnp.tanh(Dense(self.config, (self.config.hidden_size,), ("embed", "pooled"), name="dense")(state))


class NextSentenceHead(nn.Module):
    """Dense layer from pooled states [..., D] to float32 logits [..., 2] for IsNext (0) and NotNext (1)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        return Dense(self.config, (2,), ("embed", None), name="dense")(pooled).astype(jnp.float32)


class EncoderModel(nn.Module):
    """Encoder and pooler without an output layer."""

    KIND: ClassVar[str] = "encoder"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states [B, L, D] and each row's pooled state [B, D], in the config's dtype."""
        encoder = make_encoder(self.config, name="encoder")
        hidden, _ = encoder(batch["input_ids"], batch["segment_ids"], batch["input_mask"], deterministic=deterministic)
        return hidden, Pooler(self.config, name="pooler")(
            pool_cls(self.config.context_sides, hidden, batch["input_mask"])
        )


class PretrainingModel(nn.Module):
    """Encoder, pooler, masked-LM head and next-sentence head."""

    KIND: ClassVar[str] = "pretraining"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Returns masked-LM logits [B, P, V] and next-sentence logits [B, 2].

        For packed rows, next-sentence logits are [B, S, 2], where S is the width of `next_sentence_labels`.
        """
        encoder = make_encoder(self.config, name="encoder")
        is_packed = "sequence_ids" in batch
        sequence_ids = batch["sequence_ids" if is_packed else "input_mask"]
        hidden, _ = encoder(
            batch["input_ids"],
            batch["segment_ids"],
            sequence_ids,
            batch["position_ids"] if is_packed else None,
            deterministic=deterministic,
        )
        # Gather masked positions first, so that the vocabulary projection runs on only 15 % of the positions.
        masked = jnp.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)  # [B, P, D]
        masked_lm_logits = TiedLmHead(self.config, name="masked_lm")(masked, *encoder.token_tables)
        if is_packed:
            state = pool_cls_packed(
                self.config.context_sides, hidden, sequence_ids, batch["next_sentence_labels"].shape[1]
            )
        else:
            state = pool_cls(self.config.context_sides, hidden, sequence_ids)
        pooled = Pooler(self.config, name="pooler")(state)
        return masked_lm_logits, NextSentenceHead(self.config, name="next_sentence")(pooled)


class LanguageModel(nn.Module):
    """Encoder with one language-model head per context direction.

    With Transformer layers that attend to the left, the model is LTR & No NSP in Table 5 of the paper. With LSTMs, the
    model is like ELMo (Figure 3).
    """

    KIND: ClassVar[str] = "language_model"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> dict[str, jax.Array]:
        """Returns a dictionary from context direction to float32 logits [B, L, V].

        Logits of `left` predict the next token from the left context. Logits of `right` predict the previous token.
        """
        context_sides = self.config.context_sides
        encoder = make_encoder(self.config, name="encoder")
        hidden, _ = encoder(batch["input_ids"], batch["segment_ids"], batch["input_mask"], deterministic=deterministic)
        # Each direction has its own head, whose input is the slice of the hidden state for that direction.
        width = self.config.hidden_size // len(context_sides)
        head_config = dataclasses.replace(self.config, encoder=TRANSFORMER, hidden_size=width, num_attention_heads=1)
        slices = zip(context_sides, jnp.split(hidden, len(context_sides), axis=-1), encoder.token_tables, strict=True)
        return {
            direction: TiedLmHead(head_config, name=f"{direction}_lm")(states, table)
            for direction, states, table in slices
        }


class SequenceModel(nn.Module):
    """Encoder, optional feature head, and a dense layer on one state of each sequence (paper, Figure 4 a, b).

    This is the state of [CLS], or the one that `pool_cls` selects instead for left context. Without a feature head, a
    pooler precedes the dense layer. Three input forms are supported:

    - rows [B, L]: logits [B, num_outputs];
    - packed rows [B, L] with `labels` [B, S], for up to S sequences per row: logits [B, S, num_outputs];
    - choices [B, C, L] with `num_outputs=1`: one score per choice, [B, C] (section 4.4).
    """

    KIND: ClassVar[str] = "sequence"

    config: ModelConfig
    num_outputs: int
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """Returns float32 logits. The class docstring lists their shapes."""
        *leading, _ = batch["input_ids"].shape
        make_rng = partial(self.make_rng, "dropout")
        state = sequence_states(self.config, self.feature_head, batch, deterministic, make_rng)
        logits = Dense(self.config, (self.num_outputs,), ("embed", None), name="classifier")(state).astype(jnp.float32)
        return logits.reshape(leading) if len(leading) > 1 else logits


def sequence_states(
    config: ModelConfig,
    feature_head: FeatureHead,
    batch: dict[str, jax.Array],
    deterministic: bool,
    make_rng: Callable[[], jax.Array],
) -> jax.Array:
    """Computes a state per sequence inside the calling module: encoder, then feature head or pooler, then dropout.

    Each call of `make_rng` returns a new random key for dropout.

    Returns:
      States [B, D] for rows [B, L], [B, S, D] for packed rows [B, L] of up to S sequences, or [B * C, D] for inputs
      [B, C, L] with C sequences per example.
    """
    *leading, _ = batch["input_ids"].shape
    rows = {name: batch[name].reshape(-1, *batch[name].shape[len(leading) :]) for name in _INPUTS if name in batch}
    hidden = token_representations(config, feature_head, rows, deterministic, make_rng)
    if "sequence_ids" in rows:
        state = pool_cls_packed(
            feature_head.context_sides(config), hidden, rows["sequence_ids"], batch["labels"].shape[1]
        )
    else:
        state = pool_cls(feature_head.context_sides(config), hidden, rows["input_mask"])
    if not feature_head.is_used:
        state = Pooler(config, name="pooler")(state)
    return dropout(state, config.hidden_dropout_prob, None if deterministic else make_rng())


class TokenModel(nn.Module):
    """Encoder, optional feature head, and a dense layer on each token's state (paper, Figure 4 c and d).

    Attributes:
      head_dropout: whether to apply dropout before the dense layer. Tagging applies it. Span prediction does not, as in
        google-research/bert `run_squad.py`.
    """

    KIND: ClassVar[str] = "tokens"

    config: ModelConfig
    num_outputs: int
    head_dropout: bool
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """Returns float32 logits [B, L, num_outputs]."""
        config, feature_head = self.config, self.feature_head
        hidden = token_representations(config, feature_head, batch, deterministic, partial(self.make_rng, "dropout"))
        if self.head_dropout and not deterministic:
            hidden = dropout(hidden, config.hidden_dropout_prob, self.make_rng("dropout"))
        return Dense(config, (self.num_outputs,), ("embed", None), name="classifier")(hidden).astype(jnp.float32)


_MODELS: dict[str, type[nn.Module]] = {
    model.KIND: model for model in (EncoderModel, PretrainingModel, LanguageModel, SequenceModel, TokenModel)
}


def model_description(model: nn.Module) -> dict[str, Any]:
    """Returns a JSON description of a model. `build_model` accepts descriptions of the models in this file.

    Returns:
      `kind`: `KIND` of the module's class, or the class name if the class has no `KIND`.
      `num_outputs`: width of the output layer, or None.
      `feature_head`: fields of the `FeatureHead`, or None.
      Other fields of the module except its config, such as `head_dropout`.
    """
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    options = {name: value for name, value in options.items() if name not in ("config", "parent", "name")}
    if head := options.get("feature_head"):
        options["feature_head"] = dataclasses.asdict(head)
    kind = getattr(model, "KIND", type(model).__name__)
    return {"kind": kind, "num_outputs": None, "feature_head": None} | options


def build_model(description: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Builds the Flax module that `model_description` describes.

    Raises:
      UsageError: the kind is unknown, for example in a checkpoint that a newer version of bertjax wrote.
    """
    if description["kind"] not in _MODELS:
        raise UsageError(f"unknown kind of model: {description['kind']!r}; use one of {', '.join(_MODELS)}")
    options = {name: value for name, value in description.items() if name != "kind" and value is not None}
    if "feature_head" in options:
        options["feature_head"] = FeatureHead(**options["feature_head"])
    return _MODELS[description["kind"]](config, **options)
