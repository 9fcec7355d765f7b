"""Attention kernels compared with `xla_attention`: values, gradients and dropout masks, on one device and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import one_device

from bertjax.config.mesh import MeshConfig
from bertjax.model.attention.flash import flash_attention
from bertjax.model.attention.fused import fused_attention
from bertjax.model.attention.splash import splash_attention
from bertjax.model.attention.xla import AttentionMask, cudnn_attention, xla_attention
from bertjax.training.sharding import make_mesh, replicated
from bertjax.training.step import traced_with_mesh


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
def results(attention, direction, rate, query, key, value, gradient, ids, seed=7, window=0):
    """Returns the output and the gradients of query, key and value."""

    def attend(query, key, value):
        return attention(
            query,
            key,
            value,
            AttentionMask(direction, ids, window),
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
        # Row length and head size are not multiples of the size of a TPU's vector register.
        (3, 17, 3, 8, "left", 0.3),
        # Each program of the kernel processes two heads and several rows.
        (4, 64, 4, 64, "both", 0.1),
        (2, 130, 3, 64, "right", 0.1),
    ],
)
def test_fused_attention_equals_xla_attention(rows, length, heads, size, direction, rate):
    arrays = inputs(rows, length, heads, size)
    for actual, expected in zip(
        results(fused_attention, direction, rate, *arrays),
        results(xla_attention, direction, rate, *arrays),
        strict=True,
    ):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(actual, expected, atol=3e-6)


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


@pytest.mark.parametrize("attention", [fused_attention, flash_attention])
def test_dropout_masks_differ_between_rows_heads_and_queries(attention):
    query, key, value, gradient, _ = inputs(3, 32, 4, 16)
    # With uniform probabilities and values of 1, the output is the fraction of kept keys, divided by 1 - rate.
    uniform = jnp.zeros_like(query), jnp.zeros_like(key), jnp.ones_like(value), gradient, jnp.ones((3, 32), jnp.int32)
    outputs = [np.asarray(results(attention, "both", 0.5, *uniform, seed=seed)[0])[..., 0] for seed in (7, 8)]
    columns = np.concatenate([output.transpose(0, 2, 1).reshape(-1, 32) for output in outputs])
    assert len({column.tobytes() for column in columns}) == 2 * 3 * 4
    assert np.concatenate(outputs).mean() == pytest.approx(1, abs=0.03)


@pytest.mark.devices
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
# XLA compiles the interpreted loop of `flash_attention` differently for each shape.
@pytest.mark.parametrize(("attention", "atol"), [(fused_attention, 0), (flash_attention, 2e-6)])
def test_kernels_on_a_mesh_equal_those_on_one_device(sizes, attention, atol):
    arrays = inputs(8, 16, 4, 8)
    single_device = results(attention, "both", 0.1, *arrays)
    mesh = make_mesh(MeshConfig(*sizes))
    on_mesh = jax.jit(traced_with_mesh(functools.partial(results.__wrapped__, attention, "both", 0.1), mesh))
    for actual, expected in zip(on_mesh(*jax.device_put(arrays, replicated(mesh))), single_device, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# The same computation as `cudnn_attention`, compiled by XLA on any platform.
xla_by_length = functools.partial(cudnn_attention, implementation="xla")


def assert_equal_except_padding(
    actual: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...], direction: str, rate: float = 0.0, window: int = 0
):
    *_, ids = arrays
    context, *gradients = actual
    expected, *expected_gradients = results(xla_attention, direction, rate, *arrays, window=window)
    assert np.isfinite(context).all()
    is_token = np.asarray(ids != 0)
    np.testing.assert_allclose(np.asarray(context)[is_token], np.asarray(expected)[is_token], atol=3e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert np.abs(expected_gradient).max() > 0.1
        np.testing.assert_allclose(gradient, expected_gradient, atol=3e-6)


@pytest.mark.parametrize(
    ("attention", "length", "direction"),
    [
        # Splash attention uses blocks of 128 tokens for length 384 and of 256 for length 256. It pads 300 to 512.
        (splash_attention, 384, "both"),
        (splash_attention, 384, "left"),
        (splash_attention, 256, "right"),
        (splash_attention, 300, "both"),
        (xla_by_length, 40, "both"),
        (xla_by_length, 40, "left"),
    ],
)
def test_kernels_without_dropout_equal_xla_attention(attention, length, direction):
    query, key, value, gradient, ids = inputs(3, length, 2, 16)
    if attention is xla_by_length:
        ids = jnp.minimum(ids, 1)
    # The output at padding positions is arbitrary, so its gradient is set to 0.
    gradient = jnp.where((ids != 0)[..., None, None], gradient, 0)
    arrays = query, key, value, gradient, ids
    assert_equal_except_padding(results(attention, direction, 0.0, *arrays), arrays, direction)


@pytest.mark.parametrize(
    ("length", "size", "direction", "window", "rate"),
    [
        (24, 8, "both", 0, 0.1),
        # Several blocks, of which windows and directions skip some. Row lengths and head sizes are not powers of 2.
        (301, 24, "both", 0, 0.3),
        (300, 16, "left", 0, 0.1),
        (300, 16, "right", 0, 0.0),
        (300, 16, "both", 40, 0.1),
    ],
)
def test_flash_attention_equals_xla_attention(length, size, direction, window, rate):
    *states, gradient, ids = inputs(4, length, 2, size)
    arrays = *states, jnp.where((ids != 0)[..., None, None], gradient, 0), ids
    actual = results(flash_attention, direction, rate, *arrays, window=window)
    assert_equal_except_padding(actual, arrays, direction, rate, window)


@pytest.mark.parametrize(("length", "size"), [(512, 64), (500, 80)])
def test_flash_attention_is_lowered_to_triton(length, size):
    """Runs Pallas's conversion to Triton's dialect, which needs no GPU."""
    states = jax.ShapeDtypeStruct((2, length, 2, size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    with jax.sharding.use_abstract_mesh(one_device("gpu", "NVIDIA H100")):
        traced = results.trace(flash_attention, "both", 0.1, states, states, states, states, ids)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@__gpu$xla.gpu.triton") == 3


@pytest.mark.devices
@pytest.mark.parametrize("attention", [splash_attention, xla_by_length])
def test_kernels_without_dropout_run_on_a_mesh(attention):
    query, key, value, gradient, ids = inputs(4, 128, 2, 16)
    ids = jnp.minimum(ids, 1)
    arrays = query, key, value, jnp.where((ids != 0)[..., None, None], gradient, 0), ids
    mesh = make_mesh(MeshConfig(2, 2, 2))
    on_mesh = jax.jit(traced_with_mesh(functools.partial(results.__wrapped__, attention, "left", 0.0), mesh))
    assert_equal_except_padding(on_mesh(*jax.device_put(arrays, replicated(mesh))), arrays, "left")


@pytest.mark.parametrize("attention", [splash_attention, cudnn_attention])
def test_kernels_without_dropout_refuse_a_dropout_rate(attention):
    with pytest.raises(ValueError, match="does not support dropout"):
        results(attention, "both", 0.1, *inputs(2, 128, 2, 16))
