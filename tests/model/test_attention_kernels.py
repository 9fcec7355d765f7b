"""Attention kernels compared with `xla_attention`: values, gradients and dropout masks, on one device and meshes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import one_device

from bertjax.config.mesh import MeshConfig
from bertjax.model.attention.flash import flash_attention
from bertjax.model.attention.fused import fused_attention
from bertjax.model.attention.splash import splash_attention
from bertjax.model.attention.xla import AttentionMask, cudnn_attention, xla_attention
from bertjax.model.dropout import DropoutSpec
from bertjax.training.sharding import make_mesh, replicated, under_mesh


def inputs(rows: int, length: int, heads: int, size: int, dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Returns random query, key, value, output gradient and sequence ids.

    The first row has no padding and the second only padding. Other rows have up to three sequences and padding.
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


@functools.partial(jax.jit, static_argnames=("attention", "direction", "rate", "window"))
def results(attention, direction, rate, query, key, value, gradient, ids, window=0):
    """Returns the output and the gradients of query, key and value."""

    def attend(query, key, value):
        drop = DropoutSpec(rate, jax.random.key(7) if rate else None)
        return attention(query, key, value, AttentionMask(direction, ids, window), drop)

    context, back = jax.vjp(attend, query, key, value)
    return context, *back(gradient)


def xla_by_length(*arguments) -> jax.Array:
    """Computes the same as `cudnn_attention`, compiled by XLA on any platform."""
    original = jax.nn.dot_product_attention

    def in_xla(*states, **options) -> jax.Array:
        return original(*states, **options | {"implementation": "xla"})

    with mock.patch.object(jax.nn, "dot_product_attention", in_xla):
        return cudnn_attention(*arguments)


def masked_inputs(attention, *shape: int) -> tuple[jax.Array, ...]:
    """Returns `inputs` that a kernel supports. The output at padding may be arbitrary, so its gradient is 0."""
    *states, gradient, ids = inputs(*shape)
    if attention is fused_attention:  # Its output at padding equals that of `xla_attention`.
        return *states, gradient, ids
    ids = jnp.minimum(ids, 1) if attention is xla_by_length else ids
    return *states, jnp.where((ids != 0)[..., None, None], gradient, 0), ids


def assert_equal_to_xla_attention(attention, actual, arrays, direction, rate=0.0, window=0):
    context, *gradients = actual
    expected, *expected_gradients = results(xla_attention, direction, rate, *arrays, window=window)
    assert np.isfinite(context).all()
    is_token = np.asarray(arrays[-1] != 0) | (attention is fused_attention)
    pairs = [(np.asarray(context)[is_token], np.asarray(expected)[is_token])]
    for value, exact in [*pairs, *zip(gradients, expected_gradients, strict=True)]:
        assert np.abs(exact).max() > 0.1
        np.testing.assert_allclose(value, exact, atol=3e-6)


@pytest.mark.parametrize(
    ("attention", "shape", "direction", "rate", "window"),
    [
        (fused_attention, (3, 24, 4, 16), "both", 0.0, 0),
        (fused_attention, (3, 24, 4, 16), "both", 0.1, 0),
        # Row length and head size are not multiples of the size of a TPU's vector register.
        (fused_attention, (3, 17, 3, 8), "left", 0.3, 0),
        # Each program of the kernel processes two heads and several rows.
        (fused_attention, (4, 64, 4, 64), "both", 0.1, 0),
        (fused_attention, (2, 130, 3, 64), "right", 0.1, 0),
        # Splash attention uses blocks of 128 tokens for length 384 and of 256 for length 256. It pads 300 to 512.
        (splash_attention, (3, 384, 2, 16), "both", 0.0, 0),
        (splash_attention, (3, 384, 2, 16), "left", 0.0, 0),
        (splash_attention, (3, 256, 2, 16), "right", 0.0, 0),
        (splash_attention, (3, 300, 2, 16), "both", 0.0, 0),
        (xla_by_length, (3, 40, 2, 16), "both", 0.0, 0),
        (xla_by_length, (3, 40, 2, 16), "left", 0.0, 0),
        (flash_attention, (4, 24, 2, 8), "both", 0.1, 0),
        # Several blocks, of which windows and directions skip some. Row lengths and head sizes are not powers of 2.
        (flash_attention, (4, 301, 2, 24), "both", 0.3, 0),
        (flash_attention, (4, 300, 2, 16), "left", 0.1, 0),
        (flash_attention, (4, 300, 2, 16), "right", 0.0, 0),
        (flash_attention, (4, 300, 2, 16), "both", 0.1, 40),
    ],
)
def test_kernels_equal_xla_attention(attention, shape, direction, rate, window):
    arrays = masked_inputs(attention, *shape)
    actual = results(attention, direction, rate, *arrays, window=window)
    assert_equal_to_xla_attention(attention, actual, arrays, direction, rate, window)


@pytest.mark.parametrize("attention", [fused_attention, flash_attention])
def test_kernels_are_as_accurate_as_xla_attention_in_bfloat16(attention):
    *states, gradient, ids = inputs(3, 32, 2, 64, jnp.bfloat16)
    arrays = *states, jnp.where((ids != 0)[..., None, None], gradient, 0), ids
    exact = results(xla_attention, "both", 0.1, *(array.astype(jnp.float32) for array in arrays[:4]), arrays[4])
    halves = [results(attention, "both", 0.1, *arrays) for attention in (attention, xla_attention)]
    is_token = (ids != 0)[..., None, None]
    for actual, plain, expected in zip(*halves, exact, strict=True):
        assert actual.dtype == jnp.bfloat16
        error, plain_error = (np.abs(is_token * (np.float32(array) - expected)).mean() for array in (actual, plain))
        assert 0 < error < 1.1 * plain_error


@pytest.mark.devices
@pytest.mark.parametrize(
    ("attention", "shape", "direction", "rate"),
    [
        (fused_attention, (8, 16, 4, 8), "both", 0.1),
        (flash_attention, (8, 16, 4, 8), "both", 0.1),
        (splash_attention, (4, 128, 2, 16), "left", 0.0),
        (xla_by_length, (4, 128, 2, 16), "left", 0.0),
    ],
)
def test_kernels_on_a_mesh_equal_xla_attention(attention, shape, direction, rate):
    arrays, mesh = masked_inputs(attention, *shape), make_mesh(MeshConfig(2, 2, 2))
    on_mesh = jax.jit(under_mesh(functools.partial(results.__wrapped__, attention, direction, rate), mesh))
    actual = on_mesh(*jax.device_put(arrays, replicated(mesh)))
    assert_equal_to_xla_attention(attention, actual, arrays, direction, rate)


def test_flash_attention_is_lowered_to_triton():
    """Runs Pallas's conversion to Triton's dialect, which needs no GPU."""
    states = jax.ShapeDtypeStruct((2, 500, 2, 80), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 500), jnp.int32)
    with jax.sharding.use_abstract_mesh(one_device("gpu", "NVIDIA H100")):
        traced = results.trace(flash_attention, "both", 0.1, states, states, states, states, ids)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@__gpu$xla.gpu.triton") == 3
