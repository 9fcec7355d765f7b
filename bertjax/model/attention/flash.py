"""Flash attention for NVIDIA GPUs (Dao, arXiv 2307.08691): scores and dropout masks are never written to memory.

The kernels compute the same values and gradients as `xla_attention`, with the same dropout masks
(`model/dropout.py`). Each program processes one block of queries (or keys) of one head, and loops over blocks of keys
(or queries). Sequences are contiguous, so each query attends to an interval of keys, which depends on packing, padding,
direction and window. Programs skip blocks outside all intervals. The output at padding positions is 0. Axis letters:
see `encoder.py`; N: number of blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bertjax.model.attention.xla import MASKED_LOGIT, AttentionMask
from bertjax.model.dropout import BITS, DropoutSpec, dropout_scale, dropout_threshold, hash_positions, kernel_dropout
from bertjax.model.partitioning import platform_kernel, shard_over_mesh

_LOG2_E = math.log2(math.e)
# Minimum size of each axis of a matrix product in Triton.
_MIN_BLOCK = 16
_OPPOSITE = {"both": "both", "left": "right", "right": "left"}


class _BlockSizes(NamedTuple):  # block sizes of a kernel, powers of 2
    queries: int
    keys: int


# Block sizes of the forward pass, the query gradients, and the key and value gradients.
_BLOCK_SIZES = (_BlockSizes(128, 64), _BlockSizes(64, 64), _BlockSizes(64, 64))


class _Options(NamedTuple):
    """Static options: row length before padding, scale of the logits, dropout rate (0: no dropout), block sizes."""

    length: int
    scale: float
    rate: float
    block_sizes: tuple[_BlockSizes, ...]


def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Computes the same attention as `xla_attention`. For GPUs; slow on CPU and TPU. Implements `Attention`."""
    rows, length, heads, size = query.shape
    rate, seeds = kernel_dropout(drop, (rows, heads))
    max_block = max(_MIN_BLOCK, pl.next_power_of_2(length))
    block_sizes = tuple(_BlockSizes(*(min(size, max_block) for size in sizes)) for sizes in _BLOCK_SIZES)
    # Pad the length to whole blocks and the head size to a power of 2, because the kernels require both.
    row_padding = -length % max(block for sizes in block_sizes for block in sizes)
    size_padding = max(_MIN_BLOCK, pl.next_power_of_2(size)) - size
    padded = [jnp.pad(array, ((0, 0), (0, row_padding), (0, 0), (0, size_padding))) for array in (query, key, value)]
    ids = jnp.pad(mask.sequence_ids, ((0, 0), (0, row_padding)))
    keys = _intervals(ids, mask.direction, mask.window)
    queries = _intervals(ids, _OPPOSITE[mask.direction], mask.window)
    bounds = [_block_intervals(keys, sizes.queries, sizes.keys) for sizes in block_sizes[:2]]
    bounds.append(_block_intervals(queries, block_sizes[2].keys, block_sizes[2].queries))
    attend = jax.custom_gradient(functools.partial(_attention, _Options(length, size**-0.5, rate, block_sizes)))
    states, per_row = ("batch", None, "heads", None), ("batch", None)
    axes = (states, states, states, ("batch", "heads", None), per_row, per_row)
    on_mesh = shard_over_mesh(attend, rows, heads, axes, states)
    return on_mesh(*padded, jnp.stack(seeds, axis=-1), keys, bounds)[:, :length, :, :size]


def _intervals(ids: jax.Array, direction: str, window: int) -> tuple[jax.Array, jax.Array]:
    """Returns the interval [first, last) of the positions that each position attends to, as two arrays [B, L].

    Padding positions have the empty interval [L, 0), so that they do not extend the interval of their block.
    """
    length = ids.shape[1]
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    change = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(change[:, :-1], position, 0), axis=1)
    last = jax.lax.cummin(jnp.where(change[:, 1:], position + 1, length), axis=1, reverse=True)
    if window:
        first, last = jnp.maximum(first, position - window // 2), jnp.minimum(last, position + window // 2 + 1)
    elif direction == "left":
        last = position + 1
    elif direction == "right":
        first = position
    return jnp.where(ids == 0, length, first), jnp.where(ids == 0, 0, last)


def _block_intervals(interval: tuple[jax.Array, jax.Array], size: int, other_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks of `other_size` positions that each block of `size` positions attends to.

    The result is two arrays [B, N]: index of the first block, and 1 + index of the last block.
    """
    first, last = (array.reshape(len(array), -1, size) for array in interval)
    return first.min(-1) // other_size, -(-last.max(-1) // other_size)


def _attention(options: _Options, query, key, value, seeds, interval, bounds) -> tuple[jax.Array, Callable]:
    """Returns the context and its gradient function, for `jax.custom_gradient`."""
    forward_sizes, query_sizes, key_sizes = options.block_sizes
    rows, length, heads, _ = query.shape
    outputs = query, jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
    arrays = *bounds[0], *interval, seeds, query, key, value
    context, log_sum = _call_kernel(functools.partial(_forward, options), forward_sizes.queries, arrays, outputs)

    def gradients(gradient: jax.Array) -> tuple:
        # Mean gradient of each query's probabilities, weighted by them. The gradient of the softmax subtracts it.
        mean = jnp.einsum("BLHK,BLHK->BHL", gradient, context, preferred_element_type=jnp.float32)
        shared = *interval, seeds, log_sum, mean / dropout_scale(options.rate)
        kernel = functools.partial(_backward, options, False)
        arrays = *bounds[1], *shared, query, gradient, key, value
        (d_query,) = _call_kernel(kernel, query_sizes.queries, arrays, (query,))
        kernel = functools.partial(_backward, options, True)
        arrays = *bounds[2], *shared, key, value, query, gradient
        d_key, d_value = _call_kernel(kernel, key_sizes.keys, arrays, (key, value))
        return d_query, d_key, d_value, None, None, None

    return context, gradients


def _call_kernel(kernel: Any, block: int, inputs: tuple, outputs: tuple) -> list[jax.Array]:
    """Runs a kernel over a grid of blocks, heads and rows.

    Arrays are [B, N], [B, L], [B, H, L] or [B, L, H, K]. Each program reads one head of one row, and writes one block.
    """

    def spec(array: Any, block: int = 0) -> pl.BlockSpec:
        axes = {2: "BL", 3: "BHL", 4: "BLHK"}[array.ndim]
        sizes = {"B": None, "H": None} | ({"L": block} if block else {})
        shape = [sizes.get(axis, size) for axis, size in zip(axes, array.shape, strict=True)]

        def indices(program: int, head: int, row: int) -> tuple[int, ...]:
            return tuple({"B": row, "H": head, "L": program if block else 0}.get(axis, 0) for axis in axes)

        return pl.BlockSpec(shape, indices)

    rows, length, heads, _ = outputs[0].shape
    make_kernel = functools.partial(
        pl.pallas_call,
        kernel,
        grid=(length // block, heads, rows),
        in_specs=[spec(array) for array in inputs],
        out_specs=[spec(array, block) for array in outputs],
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    )
    return platform_kernel("cuda", make_kernel)(*inputs)


def _forward(options: _Options, start, stop, first, last, seeds, query, key, value, context, log_sum) -> None:
    sizes, program = options.block_sizes[0], pl.program_id(0)
    rows = pl.ds(program * sizes.queries, sizes.queries)
    states, seed = query[rows, :], (seeds[0], seeds[1])
    limits = first[rows][:, None], last[rows][:, None]

    def attend(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weighted, maximum, total = carry
        columns = pl.ds(block * sizes.keys, sizes.keys)
        row, column = _positions(program, sizes.queries)[:, None], _positions(block, sizes.keys)[None]
        logits = _logits(options, _dot(states, key[columns, :], 1), column, *limits)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=1))
        exponentials = jnp.exp2(logits - new_maximum[:, None])
        decay = jnp.exp2(maximum - new_maximum)
        dropped = _drop(options, seed, row, column)(exponentials).astype(value.dtype)
        weighted = weighted * decay[:, None] + _dot(dropped, value[columns, :])
        return weighted, new_maximum, total * decay + jnp.sum(exponentials, axis=1)

    # Start the maximum above MASKED_LOGIT, so that the exponentials of masked keys are always 0.
    maximum = jnp.full(sizes.queries, MASKED_LOGIT / 2, jnp.float32)
    carry = jnp.zeros((sizes.queries, query.shape[1]), jnp.float32), maximum, jnp.zeros(sizes.queries, jnp.float32)
    weighted, maximum, total = jax.lax.fori_loop(start[program], stop[program], attend, carry)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    context[...] = (weighted * (dropout_scale(options.rate) / total)[:, None]).astype(context.dtype)
    log_sum[...] = maximum + jnp.log(total) * _LOG2_E


def _backward(options: _Options, by_key: bool, start, stop, first, last, seeds, log_sum, mean, *refs) -> None:
    """Computes the query gradients of a block of queries or, if `by_key`, the gradients of a block of keys and values.

    If `by_key`, the logits are transposed: their rows are keys.
    """
    left, left_partner, right, right_partner, *gradients = refs
    sizes, program = options.block_sizes[1 + by_key], pl.program_id(0)
    size, other_size = (sizes.keys, sizes.queries) if by_key else (sizes.queries, sizes.keys)
    own = pl.ds(program * size, size)
    states, partners, seed = left[own, :], left_partner[own, :], (seeds[0], seeds[1])

    def load_queries(block: jax.Array) -> list[jax.Array]:
        rows = pl.ds(block * sizes.queries, sizes.queries)
        vectors = _positions(block, sizes.queries), log_sum[rows], mean[rows], first[rows], last[rows]
        return [jnp.expand_dims(vector, 0 if by_key else 1) for vector in vectors]

    own_queries = None if by_key else load_queries(program)

    def add(block: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        other = pl.ds(block * other_size, other_size)
        others, other_partners = right[other, :], right_partner[other, :]
        row, log_sums, means, *limits = own_queries or load_queries(block)
        column = jnp.expand_dims(_positions(program if by_key else block, sizes.keys), 1 if by_key else 0)
        drop = _drop(options, seed, row, column)
        probabilities = jnp.exp2(_logits(options, _dot(states, others, 1), column, *limits) - log_sums)
        d_logits = probabilities * (drop(_dot(partners, other_partners, 1)) - means)
        factors = (d_logits, others), (drop(probabilities), other_partners)
        return [total + _dot(x.astype(y.dtype), y) for total, (x, y) in zip(totals, factors, strict=False)]

    totals = [jnp.zeros((size, left.shape[1]), jnp.float32) for _ in gradients]
    totals = jax.lax.fori_loop(start[program], stop[program], add, totals)
    for total, gradient, scale in zip(totals, gradients, (options.scale, 1.0), strict=False):
        gradient[...] = (total * (scale * dropout_scale(options.rate))).astype(gradient.dtype)


def _positions(block: jax.Array, size: int) -> jax.Array:
    return block * size + jnp.arange(size, dtype=jnp.int32)


def _logits(options: _Options, products: jax.Array, column: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Scales and masks products of queries and keys. GPUs compute powers of 2, so logits are multiplied by log2(e)."""
    return jnp.where((column >= first) & (column < last), products * (options.scale * _LOG2_E), MASKED_LOGIT)


def _drop(options: _Options, seed: tuple, row: jax.Array, column: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that zeroes the elements that `dropout` drops. It does not scale kept elements."""
    if not options.rate:
        return lambda values: values
    half = -(-options.length // 2)
    is_second = column >= half
    position = row * half + jnp.where(is_second, column - half, column)
    words = hash_positions(position.astype(jnp.uint32), *seed)
    # As in `dropout`, the first half of a row uses the lower 16 bits (here shifted up), the second half the upper 16.
    bits = words << jnp.where(is_second, 0, BITS).astype(jnp.uint32)
    keep = bits >= np.uint32(int(dropout_threshold(options.rate)) << BITS)
    return lambda values: jnp.where(keep, values, 0.0)


def _dot(left: jax.Array, right: jax.Array, right_axis: int = 0) -> jax.Array:
    """Multiplies matrices with float32 accumulation. Products of float32 matrices are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = ((1,), (right_axis,)), ((), ())
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)
