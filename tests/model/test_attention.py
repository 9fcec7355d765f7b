"""Attention masks, and the selection of an attention implementation."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import one_device
from helpers.tiny_config import tiny_config

from bertjax.errors import UsageError
from bertjax.model.attention.dispatch import select_attention
from bertjax.model.attention.xla import attention_mask
from bertjax.model.config import DIRECTIONS
from bertjax.model.encoder import Encoder

# Two sequences and one padding position.
SEQUENCES = jnp.array([[1, 1, 1, 2, 2, 0]])
MODEL = tiny_config(max_position_embeddings=12)
IDS, ONES = jnp.arange(1, 7)[None], jnp.ones((1, 6), jnp.int32)


@pytest.mark.parametrize(
    ("attention", "dropout", "platform", "length", "expected"),
    [
        ("auto", 0.1, "tpu", 512, "fused"),
        ("auto", 0.1, "tpu", 513, "xla"),
        ("auto", 0.0, "tpu", 600, "splash"),
        ("auto", 0.0, "cpu", 640, "xla"),
        ("auto", 0.1, "gpu NVIDIA H200", 1000, "flash"),
        ("auto", 0.1, "gpu Tesla T4", 1000, "xla"),
        ("xla", 0.1, "tpu", 512, "xla"),
        ("fused", 0.1, "cpu", 512, "fused"),
        ("cudnn", 0.0, "gpu", 100, "cudnn"),
    ],
)
def test_auto_selects_the_first_supported_implementation(attention, dropout, platform, length, expected):
    config = dataclasses.replace(MODEL, attention=attention, attention_probs_dropout_prob=dropout, dtype="auto")
    with jax.sharding.use_abstract_mesh(one_device(*platform.split(" ", 1))):
        assert select_attention(config, length).__name__ == f"{expected}_attention"


@pytest.mark.parametrize(
    ("attention", "platform", "changes", "message"),
    [
        ("cudnn", "gpu", {"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob=0.1"),
        ("cudnn", "gpu", {"dtype": "float32"}, "dtype=float32"),
        ("cudnn", "cpu", {}, r"platform cpu \(only gpu\)"),
        ("cudnn", "gpu", {"attention_direction": "right"}, "attention_direction=right"),
        ("cudnn", "gpu", {"local_attention": 8}, "local_attention=8"),
        ("cudnn", "gpu", {"is_packed": True}, "packing=True"),
        ("fused", "cpu", {}, r"fused does not support rows of 513 tokens \(maximum: 512\)"),
        ("flash", "gpu", {"dtype": "float32"}, "dtype=float32"),
        ("math.pi", "tpu", {}, "float is not a function; use one of"),
        ("nosuch", "tpu", {}, "nosuch cannot be imported: .*; use one of auto, fused, .* or package"),
    ],
)
def test_unknown_or_unsupported_attention_is_rejected(attention, platform, changes, message):
    fields = {"attention_probs_dropout_prob": 0.0, "dtype": "bfloat16", **changes}
    is_packed = fields.pop("is_packed", False)
    config = dataclasses.replace(MODEL, attention=attention, **fields)
    with (
        jax.sharding.use_abstract_mesh(one_device(platform)),
        pytest.raises(UsageError, match=f"model.attention.*{message}"),
    ):
        select_attention(config, 513, is_packed)


def attend_to_nothing(query, key, value, mask, *, mesh, dropout_rate, dropout_key):
    assert mesh == jax.sharding.get_abstract_mesh() != jax.sharding.AbstractMesh((), ())
    assert dropout_rate == 0.1
    return 0 * value if dropout_key is None else value


@pytest.mark.ci
def test_user_function_is_imported_by_path_and_receives_mesh_and_dropout_key():
    config = dataclasses.replace(MODEL, attention=f"{__name__}.attend_to_nothing", hidden_dropout_prob=0.0)
    encoder = Encoder(config)
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        params, apply = jax.jit(encoder.init)(jax.random.key(0), IDS, 0 * IDS, ONES), jax.jit(encoder.apply)
        before, after = (apply(params, ids, 0 * IDS, ONES)[0][0] for ids in (IDS, IDS.at[0, 3].set(15)))
        rngs = {"dropout": jax.random.key(1)}
        with_dropout, _ = encoder.apply(params, IDS, 0 * IDS, ONES, deterministic=False, rngs=rngs)
    assert np.flatnonzero(np.any(before != after, axis=-1)).tolist() == [3]
    assert np.any(with_dropout[0] != before)  # Only then, the function returns the values.


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (jnp.ones((1, 3, 2, 8)), r"returns float32\[1,3,2,8\]; it must return float32\[1,6,2,8\]"),
        (jnp.ones((1, 6, 2, 8), jnp.bfloat16), r"returns bfloat16\[1,6,2,8\]; it must return float32\[1,6,2,8\]"),
        (None, "returns NoneType; it must return"),
    ],
)
def test_wrong_output_of_a_user_function_is_an_error_that_names_the_config_field(result, message, monkeypatch):
    config = dataclasses.replace(MODEL, attention=f"{__name__}.attend_to_nothing")
    monkeypatch.setattr(sys.modules[__name__], "attend_to_nothing", lambda *arrays, **options: result)
    with pytest.raises(UsageError, match=f"config.model.attention={config.attention} .*{message}"):
        Encoder(config).init(jax.random.key(0), IDS, 0 * IDS, ONES)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mask_allows_keys_of_the_same_sequence_in_the_attention_direction(direction):
    query, key = np.arange(5)[:, None], np.arange(6)
    expected = np.asarray(SEQUENCES)[0, :5, None] == np.asarray(SEQUENCES)[0]
    if direction != "both":
        expected &= key <= query if direction == "left" else key >= query
    mask = np.asarray(attention_mask(direction, SEQUENCES[:, :, None], SEQUENCES[:, None]))[0]
    np.testing.assert_array_equal(mask[:5], expected)
    assert not mask[:, 5].any()
