"""Output layers, and the model of the paper's pre-training. Axis letters: see `encoder.py`."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.errors import UsageError
from bertjax.model.architecture import TRANSFORMER
from bertjax.model.config import ModelConfig
from bertjax.model.dot import product
from bertjax.model.dropout import dropout
from bertjax.model.encoder import Encoder, Pooler, pool_cls, pool_cls_packed
from bertjax.model.feature_head import CACHED_FEATURES, FeatureHead, token_representations
from bertjax.model.layers import Dense, LayerNorm, activation, constant_init
from bertjax.model.partitioning import placed

_INPUTS = ("input_ids", "input_mask", "segment_ids", "sequence_ids", "position_ids", CACHED_FEATURES)


class MaskedLmHead(nn.Module):
    """Transform, then the projection tied to the token embeddings (google-research/bert `run_pretraining.py`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, token_table: jax.Array) -> jax.Array:
        """[B, P, D] and [V, D] to float32 logits [B, P, V]; padded vocabulary rows have probability zero."""
        config = self.config
        width = config.hidden_size
        x = Dense(config, (width, width), ("embed", "pooled"), name="transform")(hidden)
        x = LayerNorm(config, name="norm")(activation(config)(x))
        x = placed(x, ("shared_batch", "length", "embed"))
        # From a part of each vector to whole vectors of a part of the vocabulary, and its gradient back.
        table = placed(placed(token_table.astype(config.dtype), ("vocab", "embed_part")), ("vocab_part", "embed"))
        bias = self.param("bias", constant_init(0.0, ("vocab_part",)), (config.padded_vocab_size,))

        logits = product(x, table.T, dtype=jnp.float32)
        # An outer product rather than a broadcast: its gradient is a matrix product, which XLA's CPU backend does 30
        # times faster than the sum over so many columns.
        logits = logits + product(jnp.ones((*logits.shape[:-1], 1)), bias[None])
        logits = placed(logits, ("shared_batch", "length", "vocab_part"))
        if config.padded_vocab_size > config.vocab_size:
            real = jnp.arange(config.padded_vocab_size) < config.vocab_size
            logits = jnp.where(real, logits, jnp.finfo(jnp.float32).min)
        return logits


class NextSentenceHead(nn.Module):
    """[..., D] pooled to float32 logits [..., 2]: 0 IsNext, 1 NotNext."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        logits = Dense(self.config, (self.config.hidden_size, 2), ("embed", None), name="dense")(pooled)
        return logits.astype(jnp.float32)


class EncoderModel(nn.Module):
    """Encoder and pooler, without any output layer."""

    KIND: ClassVar[str] = "encoder"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """`input_ids`, `input_mask`, `segment_ids` [B, L] int32 to hidden states [B, L, D] and pooled [B, D]."""
        encoder = Encoder(self.config, name="encoder")
        hidden, _ = encoder(batch["input_ids"], batch["segment_ids"], batch["input_mask"], deterministic=deterministic)
        return hidden, Pooler(self.config, name="pooler")(pool_cls(self.config.reads, hidden, batch["input_mask"]))


class PretrainingModel(nn.Module):
    """Encoder, pooler and both pre-training heads."""

    KIND: ClassVar[str] = "pretraining"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Masked-LM and next-sentence logits.

        Args:
          batch: `input_ids`, `input_mask`, `segment_ids` [B, L] and `masked_lm_positions` [B, P], int32. Rows of up to
            K sequences have `sequence_ids` and `position_ids` [B, L] for the mask; K is the width of their
            `next_sentence_labels`.
          deterministic: no dropout; otherwise a `dropout` rng is needed.

        Returns:
          float32 [B, P, V], and [B, 2], or [B, K, 2] of several sequences.
        """
        encoder = Encoder(self.config, name="encoder")
        packed = "sequence_ids" in batch
        sequence_ids = batch["sequence_ids" if packed else "input_mask"]
        hidden, _ = encoder(
            batch["input_ids"],
            batch["segment_ids"],
            sequence_ids,
            batch["position_ids"] if packed else None,
            deterministic=deterministic,
        )
        # Gathered before the projection: 15 % of positions is all that the largest matrix of the model sees.
        masked = jnp.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)  # [B, P, D]
        masked_lm_logits = MaskedLmHead(self.config, name="masked_lm")(masked, *encoder.token_tables)
        if packed:
            whole = pool_cls_packed(self.config.reads, hidden, sequence_ids, batch["next_sentence_labels"].shape[1])
        else:
            whole = pool_cls(self.config.reads, hidden, sequence_ids)
        pooled = Pooler(self.config, name="pooler")(whole)
        return masked_lm_logits, NextSentenceHead(self.config, name="next_sentence")(pooled)


class LanguageModel(nn.Module):
    """An encoder that sees one side of a position, or each side by itself, with what comes on the other to predict.

    The left-to-right model of the paper's Table 5, and both directions of ELMo's form (Figure 3).
    """

    KIND: ClassVar[str] = "language_model"

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> dict[str, jax.Array]:
        """Logits of each position's neighbour on the side that is not seen.

        Args:
          batch: `input_ids`, `input_mask`, `segment_ids` [B, L], int32.
          deterministic: no dropout; otherwise a `dropout` rng is needed.

        Returns:
          What is seen, `left` or `right`, to float32 [B, L, V].
        """
        reads = self.config.reads
        encoder = Encoder(self.config, name="encoder")
        hidden, _ = encoder(batch["input_ids"], batch["segment_ids"], batch["input_mask"], deterministic=deterministic)
        # A head's own sizes; what reads the row is no matter to it.
        width = self.config.hidden_size // len(reads)
        of_part = dataclasses.replace(self.config, encoder=TRANSFORMER, hidden_size=width, num_attention_heads=1)
        parts = zip(reads, jnp.split(hidden, len(reads), axis=-1), encoder.token_tables, strict=True)
        return {
            direction: MaskedLmHead(of_part, name=f"{direction}_lm")(states, table)
            for direction, states, table in parts
        }


class SequenceModel(nn.Module):
    """An encoder, what is above it, and one new layer over a row's pool_cls (paper, Figure 4 a and b).

    With nothing between, there is the pooler. Rows of several sequences, [B, C, L], are choices: one score each, [B, C]
    (section 4.4). Rows that K examples share have `sequence_ids` and `position_ids` [B, L] for the mask; K is the width
    of their `labels`, and there are [B, K, num_outputs].
    """

    KIND: ClassVar[str] = "sequence"

    config: ModelConfig
    num_outputs: int
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """`input_ids`, `input_mask`, `segment_ids` [..., L] int32 to float32 [..., num_outputs]; [B, C, L] to [B, C]."""
        config, feature_head = self.config, self.feature_head
        *leading, length = batch["input_ids"].shape
        flat = {name: batch[name].reshape(-1, *batch[name].shape[len(leading) :]) for name in _INPUTS if name in batch}
        hidden = token_representations(config, feature_head, flat, deterministic, partial(self.make_rng, "dropout"))
        if "sequence_ids" in flat:
            whole = pool_cls_packed(feature_head.reads(config), hidden, flat["sequence_ids"], batch["labels"].shape[1])
        else:
            whole = pool_cls(feature_head.reads(config), hidden, flat["input_mask"])
        if not feature_head.is_there:
            whole = Pooler(config, name="pooler")(whole)
        whole = dropout(whole, config.hidden_dropout_prob, None if deterministic else self.make_rng("dropout"))
        logits = Dense(config, (feature_head.width(config), self.num_outputs), ("embed", None), name="classifier")(
            whole
        )
        logits = logits.astype(jnp.float32)
        return logits.reshape(leading) if len(leading) > 1 else logits


class TokenModel(nn.Module):
    """An encoder, what is above it, and one new layer over every token (paper, Figure 4 c and d): spans, or tags.

    Attributes:
      head_dropout: tags have dropout before the layer, spans have none (google-research/bert `run_squad.py`).
    """

    KIND: ClassVar[str] = "tokens"

    config: ModelConfig
    num_outputs: int
    head_dropout: bool
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """`input_ids`, `input_mask`, `segment_ids` [B, L] int32 to float32 [B, L, num_outputs]."""
        config, feature_head = self.config, self.feature_head
        hidden = token_representations(config, feature_head, batch, deterministic, partial(self.make_rng, "dropout"))
        if self.head_dropout and not deterministic:
            hidden = dropout(hidden, config.hidden_dropout_prob, self.make_rng("dropout"))
        shape = (feature_head.width(config), self.num_outputs)
        return Dense(config, shape, ("embed", None), name="classifier")(hidden).astype(jnp.float32)


_MODELS: dict[str, type[nn.Module]] = {
    model.KIND: model for model in (EncoderModel, PretrainingModel, LanguageModel, SequenceModel, TokenModel)
}


def model_kind(model: nn.Module) -> dict[str, Any]:
    """Describes a model of this file as JSON, so that `build_model` can rebuild it from a checkpoint's metadata.

    Returns:
      `kind`: `encoder`, `pretraining`, `language_model`, `sequence` or `tokens`.
      `num_outputs`: width of the output layer, or None for kinds without one.
      `feature_head`: fields of the `FeatureHead`, or None for kinds without one.
      `head_dropout`: only for `tokens`.
    """
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    if head := options.get("feature_head"):
        options["feature_head"] = dataclasses.asdict(head)
    names = ("num_outputs", "feature_head") + (("head_dropout",) if "head_dropout" in options else ())
    return {"kind": model.KIND} | {name: options.get(name) for name in names}


def build_model(kind: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Builds the Flax module that `model_kind` describes.

    Raises:
      UsageError: the kind is unknown, for example because a newer version wrote it.
    """
    if kind["kind"] not in _MODELS:
        raise UsageError(f"unknown kind of model: {kind['kind']!r}; known: {', '.join(_MODELS)}")
    options = {name: value for name, value in kind.items() if name != "kind" and value is not None}
    if "feature_head" in options:
        options["feature_head"] = FeatureHead(**options["feature_head"])
    return _MODELS[kind["kind"]](config, **options)
