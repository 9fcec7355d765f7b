"""Matrix products with parameters and in attention, in the form that each platform computes fastest.

CPUs with bfloat16 units (AMX, AVX-512 BF16) compute a bfloat16 product with a float32 result faster than a float32
product. XLA uses the units only for some forms of a product, so `_bfloat16_einsum` computes all products and their
gradients in these forms. `tests/model/test_products.py` runs each form.
"""

import math
import string
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bertjax.model.partitioning import platform


def dot(x: jax.Array, kernel: jax.Array, num_inputs: int = 1, dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts the last `num_inputs` axes of `x` with the first axes of a kernel.

    `dtype` is the dtype of the accumulation and the output (default: the result type of `x` and the kernel). On CPU,
    the kernel is reshaped to a matrix. On TPU, this would move 7 % more bytes per step (BASE at 512 tokens).

    On CPU, a float32 kernel of a bfloat16 `x` is rounded to bfloat16, but its gradient is not.
    """
    if platform() != "cpu":
        return jnp.tensordot(x, kernel, num_inputs, preferred_element_type=dtype)
    leading, trailing = x.shape[: x.ndim - num_inputs], kernel.shape[num_inputs:]
    contracted = math.prod(kernel.shape[:num_inputs])
    matrix = kernel.reshape(contracted, math.prod(trailing))
    dtype = dtype or x.dtype
    if x.dtype == jnp.bfloat16:
        # Use two or more leading axes, because XLA does not use bfloat16 units for gradients that contract one axis.
        rows = x.reshape(*leading, contracted) if len(leading) > 1 else x.reshape(1, -1, contracted)
        axes = string.ascii_lowercase[: rows.ndim - 1]
        product = _bfloat16_einsum(f"{axes}I,IO->{axes}O", rows, matrix)
        return product.astype(dtype).reshape(*leading, *trailing)
    rows = x.reshape(math.prod(leading), contracted)
    return _matmul(rows.astype(dtype), matrix.astype(dtype)).reshape(*leading, *trailing)


def cast_parameter(parameter: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Casts a float32 parameter to `dtype`. On CPU, `dot` casts it instead, so that its gradient is float32."""
    return parameter if platform() == "cpu" else parameter.astype(dtype)


def einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies two arrays like `jnp.einsum`. Each letter must occur in at least two of `x`, `y` and the result."""
    if platform() == "cpu" and jnp.result_type(x, y) == jnp.bfloat16:
        return _bfloat16_einsum(subscripts, x, y).astype(jnp.bfloat16)
    return jnp.einsum(subscripts, x, y)


def dot_transposed(x: jax.Array, table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `x` [B, P, D] times the transpose of a table [V, D], as [B, P, V] in `dtype`."""
    if platform() == "cpu" and x.dtype == jnp.bfloat16:
        return _bfloat16_einsum("BPD,VD->BPV", x, table).astype(dtype)
    return dot(x, table.T, dtype=dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a bias to the trailing axes of `x`."""
    if platform() == "cpu" and x.dtype == jnp.bfloat16:
        return _bfloat16_add_bias(x.reshape(*x.shape[: x.ndim - bias.ndim], -1), bias.reshape(-1)).reshape(x.shape)
    return x + bias


def _bfloat16_einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Rounds two arrays to bfloat16 and returns their product in float32. Also rounds the cotangent to bfloat16.

    The gradient of a float32 array is float32.
    """
    inputs, out = subscripts.split("->")
    first, second = inputs.split(",")

    @jax.custom_gradient
    def multiply(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Callable]:
        def gradients(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            gradient = gradient.astype(jnp.bfloat16)
            x_gradient = _bfloat16_einsum(f"{out},{second}->{first}", gradient, y)
            y_gradient = _bfloat16_einsum(f"{first},{out}->{second}", x, gradient)
            return x_gradient.astype(x.dtype), y_gradient.astype(y.dtype)

        left, axes = x.astype(jnp.bfloat16), first
        if batch_axes := [axis for axis in out if axis in first and axis in second]:
            left, axes = _with_contracted_axis_last(left, first, "".join(batch_axes), second)
        right = y.astype(jnp.bfloat16)
        return jnp.einsum(f"{axes},{second}->{out}", left, right, preferred_element_type=jnp.float32), gradients

    return multiply(x, y)


def _with_contracted_axis_last(x: jax.Array, axes: str, batch_axes: str, other_axes: str) -> tuple[jax.Array, str]:
    """Copies the first operand of a product so that its batch axes come first, and its contracted axis comes last.

    Returns the copy and its axes. `other_axes` are the axes of the second operand.
    """
    contracted = "".join(axis for axis in axes if axis not in batch_axes and axis in other_axes)
    own = "".join(axis for axis in axes if axis not in other_axes)
    target = batch_axes + own + contracted
    if target == axes:
        return x, axes
    # The axis of size 1 and the barriers keep XLA from merging the transpose into the product.
    barrier = jax.lax.optimization_barrier
    order = [axes.index(axis) for axis in target]
    order.insert(len(batch_axes), x.ndim)
    return barrier(barrier(x[..., None]).transpose(order)).reshape(
        [x.shape[axes.index(axis)] for axis in target]
    ), target


@jax.custom_gradient
def _bfloat16_add_bias(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, Callable]:
    """Adds a bias [O] to `x` [..., O]. The gradient of the bias is a product with ones instead of a slow sum."""

    def gradients(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        # Multiply by a matrix of ones and use one row, because XLA does not use the bfloat16 units for vectors.
        total = _bfloat16_einsum("MN,NO->MO", jnp.ones((8, len(rows)), rows.dtype), rows)
        return gradient, total[0].astype(gradient.dtype)

    return x + bias, gradients


@jax.custom_gradient
def _matmul(rows: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Callable]:
    """Multiplies `rows` [N, I] by `kernel` [I, O]. Defines a gradient of the kernel that is fast on CPU.

    JAX's own gradient contracts the first axes of two matrices, which is slow on CPU. This gradient transposes one of
    the two matrices first.
    """

    def gradients(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Use barriers, because XLA would otherwise fuse the transposes into the matmuls.
        barrier = jax.lax.optimization_barrier
        if kernel.shape[0] <= kernel.shape[1]:
            kernel_gradient = barrier(barrier(rows.T) @ gradient)
        else:
            kernel_gradient = barrier(barrier(gradient.T) @ rows).T
        return gradient @ kernel.T, kernel_gradient

    return rows @ kernel, gradients
