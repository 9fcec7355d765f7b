"""Masks as descriptions, and which implementation computes what."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import one_device

from bertjax.config.mesh import MeshConfig
from bertjax.errors import UsageError
from bertjax.model.attention import dispatch as resolver
from bertjax.model.attention.dispatch import Implementation, resolve
from bertjax.model.attention.mask import DIRECTIONS, allowed
from bertjax.model.attention.xla import plain_attention
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.training.sharding import make_mesh
from bertjax.training.step import in_mesh

# Two sequences and a position of padding.
SEQUENCES = jnp.array([[1, 1, 1, 2, 2, 0]])
MODEL = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=12,
    dtype="float32",
)


@pytest.mark.parametrize(
    ("asked", "on", "length", "taken"),
    [
        ("auto", "tpu", 512, "fused"),
        ("auto", "cpu", 512, "plain"),
        ("auto", "gpu", 512, "plain"),
        ("auto", "tpu", 513, "plain"),
        ("auto", "tpu", 640, "plain"),
        ("plain", "tpu", 512, "plain"),
        ("fused", "cpu", 512, "fused"),
    ],
)
def test_auto_takes_the_fastest_of_the_devices_of_the_mesh(asked, on, length, taken):
    with jax.sharding.use_abstract_mesh(one_device(on)):
        found = resolve(dataclasses.replace(MODEL, attention=asked), length)
    assert found is resolver._IMPLEMENTATIONS[taken].function


def test_without_dropout_long_rows_are_splash_attentions_where_it_takes_them():
    config = dataclasses.replace(MODEL, attention_probs_dropout_prob=0.0)
    for on, length, taken in [("tpu", 640, "splash"), ("tpu", 600, "plain"), ("cpu", 640, "plain")]:
        with jax.sharding.use_abstract_mesh(one_device(on)):
            assert resolve(config, length) is resolver._IMPLEMENTATIONS[taken].function


@pytest.mark.parametrize(
    ("changes", "on", "why"),
    [
        ({"attention": "cudnn"}, "gpu", "attention_probs_dropout_prob=0.1"),
        ({"attention": "cudnn", "attention_probs_dropout_prob": 0.0}, "gpu", "dtype=float32, only bfloat16"),
        (
            {"attention": "cudnn", "attention_probs_dropout_prob": 0.0, "dtype": "bfloat16"},
            "cpu",
            "devices that are cpu",
        ),
        (
            {"attention": "splash", "attention_probs_dropout_prob": 0.0},
            "tpu",
            "rows of 100 tokens, only multiples of 128",
        ),
        ({"attention": "flash"}, "tpu", "'flash'; known: auto, plain, fused, splash, cudnn, and package"),
        ({"attention": "nosuch.module.function"}, "tpu", "No module named 'nosuch'; known"),
        ({"attention": "math.nosuch"}, "tpu", "no attribute 'nosuch'; known"),
        ({"attention": "math.pi"}, "tpu", "is no function, but float; known"),
    ],
)
def test_what_an_implementation_does_not_take_is_named(changes, on, why):
    with jax.sharding.use_abstract_mesh(one_device(on)), pytest.raises(UsageError, match=f"model.attention.*{why}"):
        resolve(dataclasses.replace(MODEL, **changes), 100)


def test_cudnn_is_taken_where_it_can():
    config = dataclasses.replace(MODEL, attention="cudnn", attention_probs_dropout_prob=0.0, dtype="bfloat16")
    with jax.sharding.use_abstract_mesh(one_device("gpu")):
        assert resolve(config, 100) is resolver._IMPLEMENTATIONS["cudnn"].function


def seeing_nothing(query, key, value, mask, **options):
    return 0 * value


def test_a_function_of_the_users_own_is_taken_by_its_path():
    config = dataclasses.replace(MODEL, attention=f"{__name__}.seeing_nothing")
    ids, ones = jnp.arange(1, 7)[None], jnp.ones((1, 6), jnp.int32)
    encoder = Encoder(config)
    params = encoder.init(jax.random.key(0), ids, 0 * ids, ones)
    before, after = (encoder.apply(params, tokens, 0 * ids, ones)[0][0] for tokens in (ids, ids.at[0, 3].set(15)))
    assert set(np.flatnonzero(np.any(before != after, axis=-1))) == {3}


def failing(query, key, value, mask, **options):
    raise ValueError("no such kernel\nand more")


def narrowing(query, key, value, mask, **options):
    return value[:, :3]


def rounding(query, key, value, mask, **options):
    return value.astype(jnp.bfloat16)


def forgetting(query, key, value, mask, **options):
    pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("failing", "fails: ValueError: no such kernel; --log_level=debug prints the traceback"),
        ("narrowing", r"returns float32\[1,3,2,8\], and is to return float32\[1,6,2,8\]"),
        ("rounding", r"returns bfloat16\[1,6,2,8\], and is to return float32\[1,6,2,8\]"),
        ("forgetting", "returns NoneType, and is to return"),
    ],
)
def test_a_function_of_the_users_own_that_fails_is_named(name, why):
    path = f"{__name__}.{name}"
    config = dataclasses.replace(MODEL, attention=path)
    ids, ones = jnp.arange(1, 7)[None], jnp.ones((1, 6), jnp.int32)
    with pytest.raises(UsageError, match=f"config.model.attention={path} .*{why}"):
        Encoder(config).init(jax.random.key(0), ids, 0 * ids, ones)


def test_a_row_that_is_too_long_for_what_is_asked_for_is_refused():
    with pytest.raises(UsageError, match="model.attention=fused takes no rows of 513 tokens, 512 at most"):
        resolve(dataclasses.replace(MODEL, attention="fused"), 513)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_position_sees_its_own_sequence_in_the_direction_of_the_mask(direction):
    query, key = np.arange(5)[:, None], np.arange(6)
    expected = np.asarray(SEQUENCES)[0, :5, None] == np.asarray(SEQUENCES)[0]
    if direction != "both":
        expected &= key <= query if direction == "left" else key >= query
    seen = np.asarray(allowed(direction, SEQUENCES[:, :, None], SEQUENCES[:, None]))[0]
    np.testing.assert_array_equal(seen[:5], expected)
    assert not seen[:, 5].any()


@pytest.mark.parametrize(("direction", "moved"), [("both", range(6)), ("left", range(3, 6)), ("right", range(4))])
def test_another_token_moves_the_states_that_may_see_it_and_no_other(direction, moved):
    config = dataclasses.replace(MODEL, attention_direction=direction)
    ids, ones = jnp.arange(1, 7)[None], jnp.ones((1, 6), jnp.int32)
    encoder = Encoder(config)
    params = encoder.init(jax.random.key(0), ids, 0 * ids, ones)
    before, after = (encoder.apply(params, tokens, 0 * ids, ones)[0][0] for tokens in (ids, ids.at[0, 3].set(15)))
    assert set(np.flatnonzero(np.any(before != after, axis=-1))) == {*moved}


@pytest.mark.devices
def test_an_implementation_is_taken_for_what_it_can_and_gets_the_mesh(monkeypatch):
    calls = []

    def narrow(*args, mesh, **options):
        calls.append(mesh)
        return plain_attention(*args, mesh=mesh, **options)

    able = Implementation(narrow, ("both",), dropout=False, several_sequences=False)
    monkeypatch.setattr(resolver, "_IMPLEMENTATIONS", resolver._IMPLEMENTATIONS | {"narrow": able})
    monkeypatch.setattr(resolver, "_BY_SPEED", ("narrow", "plain"))
    config = dataclasses.replace(MODEL, attention_probs_dropout_prob=0.0)
    for asked, several in [
        (config, False),
        (MODEL, False),
        (dataclasses.replace(config, attention_direction="left"), False),
        (config, True),
    ]:
        wanted = narrow if asked is config and not several else plain_attention
        assert resolve(asked, 6, several) is wanted
        if wanted is plain_attention:
            # Past the check of configs, to which it is not known.
            named = dataclasses.replace(asked)
            object.__setattr__(named, "attention", "narrow")
            with pytest.raises(UsageError, match="model.attention=narrow takes no (attention_|several sequences)"):
                resolve(named, 6, several)

    mesh = make_mesh(MeshConfig(data=8))
    ids = jnp.ones((1, 6), jnp.int32)
    jax.eval_shape(in_mesh(Encoder(config).init, mesh), jax.random.key(0), ids, ids, ids)
    assert calls and all(given == mesh.abstract_mesh for given in calls)
