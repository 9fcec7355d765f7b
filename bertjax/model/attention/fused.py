"""Fused self-attention TPU kernel: scores, softmax and dropout of a row's heads stay in VMEM.

The kernel computes the same values and gradients as `xla_attention`, with the same dropout masks
(`model/dropout.py`). Each program of the grid processes entire rows for some heads. So the softmax needs no running
maximum, but rows are limited to 512 tokens. The backward pass uses only the kernel's inputs and recomputes the scores.
Axis letters: see `encoder.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.model.attention.xla import MASKED_LOGIT, AttentionMask, attention_mask
from bertjax.model.dropout import BITS, DropoutSpec, dropout_scale, dropout_threshold, hash_positions, kernel_dropout
from bertjax.model.partitioning import current_device, platform_kernel, shard_over_mesh

# Width of a vector register. The width of a block must be a multiple of this number, or the array's full width.
_REGISTER_WIDTH = 128
# Minimum tokens per program. With fewer tokens, the cost of starting programs would dominate.
_MIN_TOKENS = 512
# Devices whose kernels support only float32 matmuls. The inputs are still rounded to the compute dtype.
_FLOAT32_ONLY = ("TPU v2", "TPU v3")


class _Options(NamedTuple):
    """Static options of the kernel; `direction` and `window` are fields of `AttentionMask`."""

    size: int  # head size, K
    direction: str
    window: int
    rate: float  # dropout rate (0: no dropout)
    float32_products: bool


def fused_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Computes the same attention as `xla_attention`. For TPUs; slow on CPU and GPU. Implements `Attention`."""
    rows, length, heads, size = query.shape
    rate, seeds = kernel_dropout(drop, (rows, heads))
    float32_products = current_device().device_kind in _FLOAT32_ONLY
    options = _Options(size, mask.direction, mask.window, rate, float32_products)

    @jax.custom_gradient
    def attend(*inputs: jax.Array) -> tuple[jax.Array, Callable]:
        (context,) = _call_kernel(_forward, options, 1, *inputs)
        return context, lambda gradient: (None, None, *_call_kernel(_backward, options, 3, *inputs, gradient))

    states = ("batch", None, "heads")
    axes = (("batch", None), ("batch", "heads", None), states, states, states)
    on_mesh = shard_over_mesh(attend, rows, heads, axes, states)
    flat = [array.reshape(rows, length, heads * size) for array in (query, key, value)]
    return on_mesh(mask.sequence_ids, jnp.stack(seeds, axis=-1), *flat).reshape(query.shape)


def _call_kernel(
    kernel: Callable[..., None],
    options: _Options,
    num_outputs: int,
    sequence_ids: jax.Array,
    seeds: jax.Array,
    *states: jax.Array,
) -> list[jax.Array]:
    """Runs a kernel over a grid of rows and heads; states and outputs are [B, L, H * K], and seeds are [B, H, 2]."""
    rows, length, _ = states[0].shape
    heads = seeds.shape[1]
    program_heads = math.lcm(options.size, _REGISTER_WIDTH) // options.size
    program_heads = program_heads if heads % program_heads == 0 else heads
    program_rows = math.gcd(rows, max(1, _MIN_TOKENS // length))
    block = pl.BlockSpec((program_rows, length, program_heads * options.size), lambda row, head: (row, 0, head))
    # Number of matmuls with L * L * K multiplications per head: two in the forward pass, five in the backward pass.
    num_products = 2 if num_outputs == 1 else 5
    num_scores = rows * heads * length * length
    make_kernel = functools.partial(
        pl.pallas_call,
        functools.partial(kernel, options),
        grid=(rows // program_rows, heads // program_heads),
        in_specs=[
            pl.BlockSpec((program_rows, 1, 2 * heads), lambda row, head: (row, 0, 0), memory_space=pltpu.SMEM),
            # The sequence ids of queries form a column, and the sequence ids of keys form a row.
            pl.BlockSpec((program_rows, length, 1), lambda row, head: (row, 0, 0)),
            pl.BlockSpec((program_rows, 1, length), lambda row, head: (row, 0, 0)),
            *[block] * len(states),
        ],
        out_specs=[block] * num_outputs,
        out_shape=[jax.ShapeDtypeStruct(states[0].shape, states[0].dtype)] * num_outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products * num_scores * options.size,
            transcendentals=num_scores,
            bytes_accessed=(len(states) + num_outputs) * states[0].nbytes,
        ),
        name=f"attention_{kernel.__name__.strip('_')}",
    )
    run = platform_kernel("tpu", make_kernel)
    return run(seeds.reshape(rows, 1, -1), sequence_ids[:, :, None], sequence_ids[:, None, :], *states)


def _forward(options: _Options, seeds, query_ids, key_ids, query, key, value, context) -> None:
    def write_head(row: Any, columns: slice, mask: jax.Array, probabilities: jax.Array, keep: jax.Array | None) -> None:
        dropped = _apply_dropout(probabilities, keep, options.rate).astype(value.dtype)
        context[row, :, columns] = _dot(options, dropped, value[row, :, columns]).astype(context.dtype)

    _for_each_head(options, seeds, query_ids, key_ids, query, key, write_head)


def _backward(
    options: _Options, seeds, query_ids, key_ids, query, key, value, gradient, d_query, d_key, d_value
) -> None:
    def write_head(row: Any, columns: slice, mask: jax.Array, probabilities: jax.Array, keep: jax.Array | None) -> None:
        dtype = query.dtype
        d_context = gradient[row, :, columns]
        dropped = _apply_dropout(probabilities, keep, options.rate).astype(dtype)
        d_value[row, :, columns] = _dot(options, dropped, d_context, 0, 0).astype(dtype)
        d_dropped = _dot(options, d_context, value[row, :, columns], 1, 1)
        d_probabilities = _apply_dropout(d_dropped, keep, options.rate)
        mean = jnp.sum(d_probabilities * probabilities, axis=-1, keepdims=True)
        # Apply the mask again, because in fully masked rows, the probabilities of masked keys are not 0.
        d_logits = jnp.where(mask, probabilities * (d_probabilities - mean), 0.0).astype(dtype)
        scale = options.size**-0.5
        d_query[row, :, columns] = (_dot(options, d_logits, key[row, :, columns]) * scale).astype(dtype)
        scaled = query[row, :, columns] * jnp.asarray(scale, dtype)
        d_key[row, :, columns] = _dot(options, d_logits, scaled, 0, 0).astype(dtype)

    _for_each_head(options, seeds, query_ids, key_ids, query, key, write_head)


def _for_each_head(options: _Options, seeds, query_ids, key_ids, query, key, write_head) -> None:
    """Calls `write_head` for each head of each row, with the head's columns, masks and probabilities."""
    program_rows, length, width = query.shape
    size, num_heads = options.size, width // options.size
    first_head = pl.program_id(1) * num_heads

    def process_row(row: jax.Array | int, _: None) -> None:
        mask = attention_mask(options.direction, query_ids[row], key_ids[row], options.window)
        for head in range(num_heads):
            columns = slice(head * size, (head + 1) * size)
            scaled = query[row, :, columns] * jnp.asarray(size**-0.5, query.dtype)
            logits = jnp.where(mask, _dot(options, scaled, key[row, :, columns], 1, 1), MASKED_LOGIT)
            exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
            probabilities = exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)
            keep = None
            if options.rate:
                seed = 2 * (first_head + head)
                keep = _dropout_mask(length, seeds[row, 0, seed], seeds[row, 0, seed + 1], options.rate)
            write_head(row, columns, mask, probabilities, keep)

    if program_rows == 1:
        process_row(0, None)
    else:
        jax.lax.fori_loop(0, program_rows, process_row, None)


def _dropout_mask(length: int, first_seed: jax.Array, second_seed: jax.Array, rate: float) -> jax.Array:
    """Returns a bool mask [L, L], True for the elements of a head's probabilities that `dropout` keeps."""
    half = -(-length // 2)
    shape = length, half
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    words = hash_positions(row * np.uint32(half) + column, first_seed, second_seed)
    bits = jnp.concatenate([words & 0xFFFF, words >> BITS], axis=-1)[:, :length]
    return bits >= dropout_threshold(rate)


def _apply_dropout(values: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    return values if keep is None else jnp.where(keep, values * dropout_scale(rate), 0.0)


def _dot(options: _Options, left: jax.Array, right: jax.Array, left_axis: int = 1, right_axis: int = 0) -> jax.Array:
    """Contracts one axis of two matrices with float32 accumulation."""
    if options.float32_products:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jax.lax.dot_general(
        left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32
    )
