"""Kernels against the plain function: values, gradients and dropout's draws, also where devices share the work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.mesh import MeshConfig
from bertjax.model.attention.cudnn import cudnn_attention
from bertjax.model.attention.fused import fused_attention
from bertjax.model.attention.mask import AttentionMask
from bertjax.model.attention.splash import splash_attention
from bertjax.model.attention.xla import plain_attention
from bertjax.training.sharding import make_mesh, replicated
from bertjax.training.step import in_mesh


def inputs(rows: int, length: int, heads: int, size: int, dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Query, key, value and the gradient of what comes out, and sequence ids.

    The first row is full, the second is padding alone, others have up to three sequences and padding.
    """
    shape = (rows, length, heads, size)
    states = [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)]
    ids = np.zeros((rows, length), np.int32)
    ids[0] = 1
    rng = np.random.default_rng(rows)
    for row in range(2, rows):
        used = length - rng.integers(0, length // 3)
        cuts = rng.integers(0, used, 2)
        ids[row, :used] = 1 + (np.arange(used)[:, None] >= cuts).sum(1)
    return *states, jnp.asarray(ids)


@functools.partial(jax.jit, static_argnames=("attention", "direction", "rate"))
def results(attention, direction, rate, query, key, value, gradient, ids, seed=7):
    """What comes out, and the gradients of query, key and value."""

    def attend(query, key, value):
        return attention(
            query,
            key,
            value,
            AttentionMask(direction, ids),
            dropout_rate=rate,
            dropout_key=jax.random.key(seed) if rate else None,
            mesh=jax.sharding.get_abstract_mesh(),
        )

    context, back = jax.vjp(attend, query, key, value)
    return context, *back(gradient)


@pytest.mark.parametrize(
    ("rows", "length", "heads", "size", "direction", "rate"),
    [
        (3, 24, 4, 16, "both", 0.0),
        (3, 24, 4, 16, "both", 0.1),
        # No size is a multiple of anything.
        (3, 17, 3, 8, "left", 0.3),
        # Two heads a program, and several rows.
        (4, 64, 4, 64, "both", 0.1),
        (2, 130, 3, 64, "right", 0.1),
    ],
)
def test_it_computes_what_the_plain_function_computes(rows, length, heads, size, direction, rate):
    arrays = inputs(rows, length, heads, size)
    for found, expected in zip(
        results(fused_attention, direction, rate, *arrays),
        results(plain_attention, direction, rate, *arrays),
        strict=True,
    ):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=3e-6)


def test_half_precision_differs_by_its_rounding():
    arrays = inputs(3, 32, 2, 64, jnp.bfloat16)
    exact = results(plain_attention, "both", 0.1, *(array.astype(jnp.float32) for array in arrays[:4]), arrays[4])
    halves = [results(attention, "both", 0.1, *arrays) for attention in (fused_attention, plain_attention)]
    for found, plain, expected in zip(*halves, exact, strict=True):
        assert found.dtype == jnp.bfloat16
        error, plain_error = (np.abs(np.float32(array) - expected).mean() for array in (found, plain))
        assert 0 < error < 1.1 * plain_error


def test_each_row_head_and_key_has_draws_of_its_own():
    query, key, value, gradient, _ = inputs(3, 32, 4, 16)
    # One key that all see alike: what comes out tells how much of each query's weights was kept.
    same = jnp.zeros_like(query), jnp.zeros_like(key), jnp.ones_like(value), gradient, jnp.ones((3, 32), jnp.int32)
    kept = [np.asarray(results(fused_attention, "both", 0.5, *same, seed=seed)[0])[..., 0] for seed in (7, 8)]
    columns = np.concatenate([draws.transpose(0, 2, 1).reshape(-1, 32) for draws in kept])
    assert len({column.tobytes() for column in columns}) == 2 * 3 * 4
    assert np.concatenate(kept).mean() == pytest.approx(1, abs=0.03)


@pytest.mark.devices
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
def test_any_mesh_gives_the_same_bits(sizes):
    arrays = inputs(8, 16, 4, 8)
    alone = results(fused_attention, "both", 0.1, *arrays)
    mesh = make_mesh(MeshConfig(*sizes))
    on_mesh = jax.jit(in_mesh(functools.partial(results.__wrapped__, fused_attention, "both", 0.1), mesh))
    for found, expected in zip(on_mesh(*jax.device_put(arrays, replicated(mesh))), alone, strict=True):
        np.testing.assert_array_equal(found, expected)


# What cuDNN computes, without it.
by_length = functools.partial(cudnn_attention, implementation="xla")


def assert_same_where_there_are_tokens(found: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...], direction: str):
    query, key, value, gradient, ids = arrays
    context, *gradients = found
    expected, *expected_gradients = results(plain_attention, direction, 0.0, query, key, value, gradient, ids)
    assert np.isfinite(context).all()
    there = np.asarray(ids != 0)
    np.testing.assert_allclose(np.asarray(context)[there], np.asarray(expected)[there], atol=3e-6)
    for one, wanted in zip(gradients, expected_gradients, strict=True):
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(one, wanted, atol=3e-6)


@pytest.mark.parametrize(
    ("attention", "length", "direction"),
    [
        # Two blocks, and one.
        (splash_attention, 384, "both"),
        (splash_attention, 384, "left"),
        (splash_attention, 256, "right"),
        (by_length, 40, "both"),
        (by_length, 40, "left"),
    ],
)
def test_those_without_dropout_compute_what_the_plain_function_computes(attention, length, direction):
    query, key, value, gradient, ids = inputs(3, length, 2, 16)
    if attention is by_length:
        ids = jnp.minimum(ids, 1)
    # What comes out where there is padding is nobody's.
    gradient = jnp.where((ids != 0)[..., None, None], gradient, 0)
    arrays = query, key, value, gradient, ids
    assert_same_where_there_are_tokens(results(attention, direction, 0.0, *arrays), arrays, direction)


@pytest.mark.devices
@pytest.mark.parametrize("attention", [splash_attention, by_length])
def test_devices_share_the_work_of_those_without_dropout(attention):
    query, key, value, gradient, ids = inputs(4, 128, 2, 16)
    ids = jnp.minimum(ids, 1)
    arrays = query, key, value, jnp.where((ids != 0)[..., None, None], gradient, 0), ids
    mesh = make_mesh(MeshConfig(2, 2, 2))
    on_mesh = jax.jit(in_mesh(functools.partial(results.__wrapped__, attention, "left", 0.0), mesh))
    assert_same_where_there_are_tokens(on_mesh(*jax.device_put(arrays, replicated(mesh))), arrays, "left")


@pytest.mark.parametrize("attention", [splash_attention, cudnn_attention])
def test_those_without_dropout_do_not_pass_over_it(attention):
    with pytest.raises(ValueError, match="no dropout"):
        results(attention, "both", 0.1, *inputs(2, 128, 2, 16))
