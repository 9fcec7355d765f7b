"""Published sizes, and options besides those of BERT: local attention, rotary positions, norms, heads."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.optimizer import OptimizerConfig
from bertjax.convert.families import FAMILIES
from bertjax.errors import UsageError
from bertjax.inference.encode import pooler_states
from bertjax.model.attention import xla
from bertjax.model.attention.xla import AttentionMask, attention_mask, xla_attention
from bertjax.model.config import ModelConfig, size_fields
from bertjax.model.dropout import NO_DROPOUT
from bertjax.model.encoder import Encoder
from bertjax.model.models import EncoderModel, SequenceModel
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.training.freezing import merge_frozen, split_frozen

TOLERANCE = 1e-5
LENGTH, NUM_TOKENS = 40, 60
MODERNBERT = dataclasses.replace(
    FAMILIES["modernbert"].model_config(
        {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"intermediate_size": 48, "local_attention": 8},
        Path("config.json"),
    ),
    initializer_range=0.2,
)


@pytest.mark.ci
def test_frozen_layers_stay_local_or_global():
    model = SequenceModel(MODERNBERT, 2)
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, (2, LENGTH), np.int32)
    batch = {"input_ids": ids, "segment_ids": 0 * ids, "input_mask": np.ones_like(ids)}
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), batch))["params"]
    logits = model.apply({"params": params}, batch)
    for layers in (1, 2):
        params_in_parts = merge_frozen(*split_frozen(params, OptimizerConfig(freeze_layers=layers)))
        np.testing.assert_allclose(model.apply({"params": params_in_parts}, batch), logits, atol=1e-6)


@pytest.mark.parametrize("layer", [0, 1])
def test_first_layer_is_global_and_second_is_local(layer):
    encoder = Encoder(dataclasses.replace(MODERNBERT, num_hidden_layers=2))
    ids = np.full((1, LENGTH), 7, np.int32)
    params = nn.unbox(encoder.init(jax.random.key(0), ids, 0 * ids, np.ones_like(ids)))["params"]
    # Without its attention, the other layer moves nothing between positions.
    kernel = params["layers"]["attention"]["output"]["kernel"]
    params["layers"]["attention"]["output"]["kernel"] = kernel.at[1 - layer].set(0)
    changed = np.where(np.arange(LENGTH) == 20, 9, ids)
    states = [encoder.apply({"params": params}, tokens, 0 * ids, np.ones_like(ids))[0] for tokens in (ids, changed)]
    differs = np.flatnonzero(np.any(states[0] != states[1], axis=(0, 2)))
    assert [*differs] == [*(range(LENGTH) if layer == 0 else range(16, 25))]


@pytest.mark.parametrize("window", [0, 6])
def test_attention_in_blocks_equals_attention_with_a_mask(monkeypatch, window):
    monkeypatch.setattr(xla, "_LONG_ROW", 16)
    monkeypatch.setattr(xla, "_QUERY_BLOCK", 8)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 37, 2, 4)), jnp.float32) for _ in range(3)]
    ids = np.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7], np.int32)

    def in_blocks(*arrays):
        return xla_attention(*arrays, AttentionMask("both", ids, window), NO_DROPOUT)

    def with_mask(query, key, value):
        logits = jnp.einsum("BLHK,BMHK->BHLM", query, key) / 2
        allowed = attention_mask("both", ids[:, None, :, None], ids[:, None, None], window)
        return jnp.einsum("BHLM,BMHK->BLHK", jax.nn.softmax(jnp.where(allowed, logits, -1e9)), value)

    def loss(arrays, attend):
        context = attend(*arrays) * (ids > 0)[..., None, None]
        return jnp.sum(jnp.sin(context)), context

    results, expected = (jax.grad(loss, has_aux=True)(arrays, attend) for attend in (in_blocks, with_mask))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results, expected)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        # Fields that have no effect with the value of another field.
        ({"global_rope_theta": 10_000.0}, "global_rope_theta does not apply to position_embedding_type=absolute"),
        ({"pooler_act": "", "pooler_norm": True}, "pooler_norm"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 32, "position_embedding_type": "rotary"}, "even head size"),
        ({"local_attention": 1}, "local_attention"),
        ({"norm": "rms_norm", "norm_bias": True}, "norm_bias"),
        ({"local_attention": 8, "attention_direction": "left"}, "attention_direction"),
    ],
)
def test_conflicting_options_are_rejected(changes, word):
    with pytest.raises(UsageError, match=word):
        ModelConfig(**{"hidden_size": 32, "num_attention_heads": 4, **changes})


@pytest.mark.ci
@pytest.mark.parametrize("pooling", ["cls", "mean", "late"])
def test_pooled_states_are_the_inputs_of_the_output_layer(pooling):
    config = dataclasses.replace(MODERNBERT, classifier_pooling=pooling)
    lengths = np.array([9, 6])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int32)
    ids = mask * np.random.default_rng(0).integers(5, NUM_TOKENS, mask.shape, np.int32)
    batch = {"input_ids": ids, "segment_ids": 0 * ids, "input_mask": mask}
    model = SequenceModel(config, 3)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), batch)["params"])
    hidden = Encoder(config).apply({"params": params["encoder"]}, ids, 0 * ids, mask)[0]
    loaded = SimpleNamespace(config=config, nested_params=params)
    pooled = pooler_states(loaded, np.asarray(hidden)[mask > 0], lengths)
    logits = pooled @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(logits, model.apply({"params": params}, batch), atol=TOLERANCE)
    del params["classifier"]
    np.testing.assert_allclose(pooled, EncoderModel(config).apply({"params": params}, batch)[1], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("size", "vocab_size", "encoder_and_pooler", "complete"),
    [
        ("tiny", 30_522, 4_385_920, 4_433_468),
        ("mini", 30_522, 11_170_560, 11_267_900),
        ("small", 30_522, 28_763_648, 29_058_876),
        ("medium", 30_522, 41_373_184, 41_668_412),
        ("base", 30_522, 109_482_240, 110_106_428),
        ("large", 30_522, 335_141_888, 336_226_108),
        # The cased vocabulary.
        ("base", 28_996, 108_310_272, 108_932_934),
    ],
)
def test_published_sizes_have_the_published_parameter_counts(size, vocab_size, encoder_and_pooler, complete):
    masked_lm = MaskedLm.for_model(ModelConfig(**size_fields(size), vocab_size=vocab_size, pad_vocab_to_multiple_of=1))
    params = nn.unbox(jax.eval_shape(masked_lm.init_params, jax.random.key(0)))

    def count(*trees: dict) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(trees))

    assert (count(params["encoder"], params["pooler"]), count(params)) == (encoder_and_pooler, complete)


def test_size_may_contain_the_number_of_heads():
    assert [size_fields(size)["num_attention_heads"] for size in ("L6_H768", "L6_H768_A3", "base")] == [12, 3, 12]


@pytest.mark.parametrize("size", ["L4_H256_B2", "L12_H768_A7", "L0_H64"])
def test_invalid_sizes_are_rejected(size):
    with pytest.raises(UsageError):
        ModelConfig(**size_fields(size))
