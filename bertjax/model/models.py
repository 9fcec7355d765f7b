"""Complete models, and their JSON descriptions. Axis letters: see `encoder.py`.

Models map a batch to float32 logits or, without an output layer, to states or vectors. They read these int32 arrays:

    input_ids, segment_ids                [B, L]
    input_mask                            [B, L], only for rows of one sequence: 1 for tokens, 0 for padding at the end
    sequence_ids, position_ids            [B, L], only for packed rows of several sequences; see `encoder.py`
    masked_lm_positions                   [B, P]
    masked_lm_ids, masked_lm_weights      [B, P], only for `ReplacedTokenModel`; the weights are float32
    next_sentence_labels, labels, texts   [B, S], only for packed rows, and only their width S is used
    features                              float32 [B, L, C, D], only for cached features; see `feature_head.py`
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.errors import UsageError
from bertjax.model.config import LEFT, RIGHT, TRANSFORMER, ModelConfig
from bertjax.model.dropout import dropout, gumbel_noise
from bertjax.model.encoder import ENCODER, Encoder, encoder_inputs, is_packed
from bertjax.model.feature_head import CACHED_FEATURES, FeatureHead, encode_with_head
from bertjax.model.heads import (
    DiscriminatorHead,
    LmHead,
    NextSentenceHead,
    Pooler,
    apply_pooler,
    first_maximum,
    mean_states,
    sequence_states,
    unit,
)
from bertjax.model.layers import Dense

_INPUTS = ("input_ids", "input_mask", "segment_ids", "sequence_ids", "position_ids", CACHED_FEATURES)


class EncoderModel(nn.Module):
    """Encoder and pooler without an output layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states [B, L, D] and each row's pooled state [B, D], in the config's dtype."""
        tokens, _ = Encoder(self.config, name=ENCODER)(*encoder_inputs(batch), deterministic=deterministic)
        return tokens, apply_pooler(Pooler(self.config, name="pooler"), tokens, batch)


class PretrainingModel(nn.Module):
    """Encoder, masked-LM head and, if the config has two or more segments, pooler and next-sentence head."""

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Returns masked-LM logits [B, P, V], and next-sentence logits [B, 2] (packed: [B, S, 2]; no head: zeros)."""
        num_sequences = batch["next_sentence_labels"].shape[-1] if is_packed(batch) else 1
        encoder = Encoder(self.config, name=ENCODER)
        tokens, _ = encoder(*encoder_inputs(batch), deterministic=deterministic)
        # Gather masked positions first, so that the vocabulary projection runs only on these.
        masked = jnp.take_along_axis(tokens, batch["masked_lm_positions"][..., None], axis=1)  # [B, P, D]
        masked_lm_logits = LmHead(self.config, name="masked_lm")(masked, *encoder.token_tables)
        if self.config.type_vocab_size < 2:
            return masked_lm_logits, jnp.zeros((len(tokens), *[num_sequences] * is_packed(batch), 2))
        pooled = apply_pooler(Pooler(self.config, name="pooler"), tokens, batch, num_sequences)  # [B, D] or [B, S, D]
        return masked_lm_logits, NextSentenceHead(self.config, name="next_sentence")(pooled)


class ReplacedTokenModel(nn.Module):
    """ELECTRA (arXiv 2003.10555): encoder and head that detect which tokens a small generator replaced."""

    config: ModelConfig
    generator_size: float = 0.25  # width of the generator, as a fraction of the encoder's width

    @property
    def generator_config(self) -> ModelConfig:
        """Config of the generator, which uses the encoder's embeddings for its inputs and as its decoder."""
        config = self.config
        heads = max(1, round(self.generator_size * config.num_attention_heads))
        return dataclasses.replace(
            config,
            hidden_size=heads * config.head_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads and math.gcd(heads, config.num_key_value_heads),
            intermediate_size=config.intermediate_size * heads // config.num_attention_heads,
            embedding_size=config.embedding_width,
            lm_head="transform",
            tie_word_embeddings=True,
        )

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, ...]:
        """Returns logits of the generator [B, P, V] and the discriminator [B, L], and replaced tokens, bool [B, L].

        If `deterministic`, the generator's samples use the same random numbers in each call.
        """
        inputs, ids = encoder_inputs(batch), batch["input_ids"]
        encoder = Encoder(self.config, name=ENCODER)
        generator = Encoder(self.generator_config, encoder.embeddings, name="generator")
        states, _ = generator(*inputs, deterministic=deterministic)
        masked = jnp.take_along_axis(states, batch["masked_lm_positions"][..., None], axis=1)
        generator_logits = LmHead(self.generator_config, name="generator_lm")(masked, *generator.token_tables)
        # The Gumbel-max trick samples from the softmax. Token ids have no gradient.
        key = jax.random.key(0) if deterministic else self.make_rng("dropout")
        samples = first_maximum(generator_logits + gumbel_noise(key, generator_logits.shape))
        # Set the positions of unused predictions to the row length, so that `at[].set` drops their values.
        positions = jnp.where(batch["masked_lm_weights"] > 0, batch["masked_lm_positions"], ids.shape[1])
        write = jax.vmap(lambda row, positions, values: row.at[positions].set(values, mode="drop"))
        original, corrupted = (write(ids, positions, values) for values in (batch["masked_lm_ids"], samples))
        states, _ = encoder(corrupted, *inputs[1:], deterministic=deterministic)
        logits = DiscriminatorHead(self.config, name="discriminator")(states)
        return generator_logits, logits, corrupted != original


class LanguageModel(nn.Module):
    """Encoder with one language-model head per context direction.

    With Transformer layers that attend to the left, the model is LTR & No NSP in Table 5 of the paper. With LSTMs, the
    model is like ELMo (Figure 3).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> dict[str, jax.Array]:
        """Returns float32 logits [B, L, V], keyed by context direction.

        Logits of `left` predict the next token from the left context. Logits of `right` predict the previous token.
        """
        logits, sides = {}, self.config.context_sides
        encoder = Encoder(self.config, name=ENCODER)
        tokens, _ = encoder(*encoder_inputs(batch), deterministic=deterministic)
        # The input of each direction's head is the part of the hidden state that has only context from this direction.
        parts = jnp.split(tokens, len(sides), axis=-1)
        for side, states, token_table in zip(sides, parts, encoder.token_tables, strict=True):
            width = states.shape[-1]
            config = dataclasses.replace(self.config, encoder=TRANSFORMER, hidden_size=width, num_attention_heads=1)
            logits[side] = LmHead(config, name=f"{side}_lm")(states, token_table)
        return logits


class SequenceModel(nn.Module):
    """Encoder, optional feature head, and a dense layer on one state of each sequence (paper, Figure 4 a, b).

    `classifier_pooling` selects the state, and a pooler precedes the dense layer. With a feature head,
    `sequence_states` selects the state, and there is no pooler. Three input forms are supported:

    - rows [B, L]: logits [B, num_outputs];
    - packed rows [B, L] with `labels` [B, S], for up to S sequences per row: logits [B, S, num_outputs];
    - choices [B, C, L] with `num_outputs=1`: one score per choice, [B, C] (section 4.4).
    """

    config: ModelConfig
    num_outputs: int
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """Returns float32 logits. The class docstring lists their shapes."""
        config, head, make_rng = self.config, self.feature_head, partial(self.make_rng, "dropout")
        *leading, _ = batch["input_ids"].shape
        rows = {name: batch[name].reshape(-1, *batch[name].shape[len(leading) :]) for name in _INPUTS if name in batch}
        num_sequences = batch["labels"].shape[1] if is_packed(batch) else 1
        tokens = encode_with_head(config, head, rows, deterministic, make_rng)
        if head.is_used:
            state = sequence_states(head.context_sides(config), tokens, rows)
        else:
            state = apply_pooler(Pooler(config, name="pooler"), tokens, rows, num_sequences)
        state = dropout(state, config.hidden_dropout_prob, None if deterministic else make_rng())
        logits = Dense(config, (self.num_outputs,), ("embed", None), name="classifier")(state).astype(jnp.float32)
        return logits.reshape(leading) if len(leading) > 1 else logits


class TokenModel(nn.Module):
    """Encoder, optional feature head, and a dense layer on each token's state (paper, Figure 4 c and d)."""

    config: ModelConfig
    num_outputs: int
    head_dropout: bool  # dropout before the dense layer; False for spans, as in google-research/bert `run_squad.py`
    feature_head: FeatureHead = FeatureHead()

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """Returns float32 logits [B, L, num_outputs]."""
        config, feature_head = self.config, self.feature_head
        hidden = encode_with_head(config, feature_head, batch, deterministic, partial(self.make_rng, "dropout"))
        if config.token_pooler and not feature_head.is_used:
            hidden = Pooler(config, name="pooler")(hidden)
        if self.head_dropout and not deterministic:
            hidden = dropout(hidden, config.hidden_dropout_prob, self.make_rng("dropout"))
        return Dense(config, (self.num_outputs,), ("embed", None), name="classifier")(hidden).astype(jnp.float32)


class EmbeddingModel(nn.Module):
    """Text embedder: encoder, pooling, and optionally a dense layer and normalization. Returns one vector per text."""

    config: ModelConfig
    pooling: str = "mean"  # or `cls` (first token) or `last` (last token)
    dense: int = 0  # width of the dense layer (0: no dense layer)
    dense_activation: str = "identity"  # activation of the dense layer: `identity` or `tanh`
    normalize: bool = True  # whether to scale vectors to length 1

    @property
    def width(self) -> int:
        """Number of components of a vector, D."""
        return self.dense or self.config.hidden_size

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], *, deterministic: bool = True) -> jax.Array:
        """Returns float32 vectors [B, D] or, for packed rows with `texts` [B, S], [B, S, D]."""
        num_sequences = batch["texts"].shape[1] if is_packed(batch) else 1
        tokens, _ = Encoder(self.config, name=ENCODER)(*encoder_inputs(batch), deterministic=deterministic)
        if self.pooling == "mean":
            states = mean_states(tokens, batch, num_sequences)
        else:
            side = LEFT if self.pooling == "last" else RIGHT
            states = sequence_states((side,), tokens, batch, num_sequences)
        if self.dense:
            states = Dense(self.config, (self.dense,), ("embed", None), name="dense")(states)
            states = jnp.tanh(states) if self.dense_activation == "tanh" else states
        vectors = states.astype(jnp.float32)
        return unit(vectors) if self.normalize else vectors


MODELS: dict[str, type[nn.Module]] = {
    "encoder": EncoderModel,
    "pretraining": PretrainingModel,
    "replaced_tokens": ReplacedTokenModel,
    "language_model": LanguageModel,
    "sequence": SequenceModel,
    "tokens": TokenModel,
    "embedding": EmbeddingModel,
}


def model_description(model: nn.Module) -> dict[str, Any]:
    """Returns a JSON description of a model. `build_model` accepts descriptions of the models in this file.

    Returns:
      `kind`: `KIND` of the module's class, else the key of its class or a base class in `MODELS`, else the class name.
      `num_outputs`, `feature_head` (None if the module has no such field) and other fields except the config.
    """
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    options = {name: value for name, value in options.items() if name not in ("config", "parent", "name")}
    if head := options.get("feature_head"):
        options["feature_head"] = dataclasses.asdict(head)
    kinds = {known: kind for kind, known in MODELS.items()}
    known = next((kinds[base] for base in type(model).__mro__ if base in kinds), type(model).__name__)
    kind = getattr(model, "KIND", known)
    return {"kind": kind, "num_outputs": None, "feature_head": None} | options


def build_model(description: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Builds the Flax module that `model_description` describes.

    Raises:
      UsageError: the kind is unknown, for example in a checkpoint that a newer version of bertjax wrote.
    """
    if description["kind"] not in MODELS:
        raise UsageError(f"unknown kind of model: {description['kind']!r}; use one of {', '.join(MODELS)}")
    options = {name: value for name, value in description.items() if name != "kind" and value is not None}
    if "feature_head" in options:
        options["feature_head"] = FeatureHead(**options["feature_head"])
    return MODELS[description["kind"]](config, **options)
