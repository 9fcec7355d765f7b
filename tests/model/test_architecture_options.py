"""Options of the architecture besides those of BERT: local attention, rotary positions, norms, heads."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.convert.families import FAMILIES
from bertjax.convert.portable import model_config
from bertjax.errors import UsageError
from bertjax.inference.encode import pooler_states
from bertjax.model.attention import xla
from bertjax.model.attention.xla import AttentionMask, attention_mask, xla_attention
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.models import SequenceModel
from bertjax.training.freezing import Freezing, merge

TOLERANCE = 1e-5
LENGTH, NUM_TOKENS = 40, 60
MODERNBERT = dataclasses.replace(
    model_config(
        FAMILIES["modernbert"],
        {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"intermediate_size": 48, "local_attention": 8},
        Path("config.json"),
    ),
    initializer_range=0.2,
)


@pytest.mark.ci
def test_packed_rows_with_local_attention_equal_separate_rows():
    config = dataclasses.replace(MODERNBERT, hidden_dropout_prob=0.0)
    encoder = Encoder(config)
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, (1, LENGTH), np.int32)
    lengths = (22, 15)
    sequence_ids = np.repeat([1, 2, 0], [*lengths, LENGTH - sum(lengths)])[None].astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in (*lengths, LENGTH - sum(lengths))])[None]
    params = jax.jit(encoder.init)(jax.random.key(0), ids, 0 * ids, sequence_ids)
    packed = jax.jit(encoder.apply)(params, ids, 0 * ids, sequence_ids, positions.astype(np.int32))[0][0]
    start = 0
    for length in lengths:
        row = ids[:, start : start + length]
        states = encoder.apply(params, row, 0 * row, np.ones_like(row))[0][0]
        np.testing.assert_allclose(packed[start : start + length], states, atol=TOLERANCE)
        start += length


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{"scan_layers": "true"}, {"remat": "full"}, {"remat": "attention"}])
def test_layout_does_not_change_states_and_gradients(changes):
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, (2, LENGTH), np.int32)

    def states_and_gradients(config):
        encoder = Encoder(config)
        params = jax.jit(encoder.init)(jax.random.key(0), ids, 0 * ids, np.ones_like(ids))

        def loss(params):
            states = encoder.apply(params, ids, 0 * ids, np.ones_like(ids))[0]
            return jnp.sum(jnp.sin(states)), states

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    gradients, states = states_and_gradients(MODERNBERT)
    other_gradients, other_states = states_and_gradients(dataclasses.replace(MODERNBERT, **changes))
    np.testing.assert_allclose(states, other_states, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients, other_gradients)


@pytest.mark.ci
def test_frozen_layers_stay_local_or_global():
    model = SequenceModel(MODERNBERT, 2)
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, (2, LENGTH), np.int32)
    batch = {"input_ids": ids, "segment_ids": 0 * ids, "input_mask": np.ones_like(ids)}
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), batch))["params"]
    logits = model.apply({"params": params}, batch)
    for layers in (1, 2):
        params_in_parts = merge(*Freezing(layers).split(params))
        np.testing.assert_allclose(model.apply({"params": params_in_parts}, batch), logits, atol=1e-6)


def test_attention_by_blocks_of_queries_equals_attention_with_a_mask(monkeypatch):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 37, 2, 4)), jnp.float32) for _ in range(3)]
    ids = np.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7], np.int32)
    options = {"dropout_rate": 0.0, "dropout_key": None, "mesh": jax.sharding.get_abstract_mesh()}

    def loss(arrays):
        context = xla_attention(*arrays, AttentionMask("both", ids), **options)
        return jnp.sum(jnp.sin(context)), context

    expected, plain = jax.grad(loss, has_aux=True)(arrays)
    monkeypatch.setattr(xla, "_LONG_ROW", 16)
    monkeypatch.setattr(xla, "_QUERY_BLOCK", 8)
    gradients, blocks = jax.grad(loss, has_aux=True)(arrays)
    np.testing.assert_allclose(blocks, plain, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected)


def test_local_attention_in_blocks_equals_attention_with_a_mask():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 37, 2, 4)), jnp.float32) for _ in range(3))
    ids = np.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7], np.int32)
    options = {"dropout_rate": 0.0, "dropout_key": None, "mesh": jax.sharding.get_abstract_mesh()}
    blocks = xla_attention(query, key, value, AttentionMask("both", ids, window=6), **options)
    logits = jnp.einsum("BLHK,BMHK->BHLM", query, key) / 2
    allowed = attention_mask("both", ids[:, None, :, None], ids[:, None, None, :], 6)
    probabilities = jax.nn.softmax(jnp.where(allowed, logits, -1e9), axis=-1)
    expected = jnp.einsum("BHLM,BMHK->BLHK", probabilities, value)
    np.testing.assert_allclose(blocks[ids > 0], expected[ids > 0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"encoder": "lstm", "gated_mlp": True}, "gated_mlp"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 32, "position_embedding_type": "rotary"}, "even head size"),
        ({"local_attention": 1}, "local_attention"),
        ({"norm": "rms_norm", "norm_bias": True}, "norm_bias"),
        ({"local_attention": 8, "attention_direction": "left"}, "attention_direction"),
    ],
)
def test_conflicting_options_are_refused(changes, word):
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
    loaded = SimpleNamespace(config=config, params=params)
    pooled = pooler_states(loaded, np.asarray(hidden)[mask > 0], lengths)
    logits = pooled @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(logits, model.apply({"params": params}, batch), atol=TOLERANCE)
