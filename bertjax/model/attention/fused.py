"""Self-attention in one TPU kernel: scores, softmax and dropout of a row's heads never leave the chip's near memory.

What the plain function computes, forwards and backwards, dropout's draws included (`model/dropout.py`). A program of
the grid has whole rows of some heads, so there is no running maximum: rows of up to 512 fit. The backward pass keeps
the kernel's inputs alone and computes the scores again. Axis letters: see `encoder.py`.
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

from bertjax.model.attention.mask import NOT_SEEN, AttentionMask, allowed
from bertjax.model.attention.shard_map import on_each_device, tpu_kernel
from bertjax.model.dropout import BITS, hashed, kept_scale, seeds_of, threshold
from bertjax.model.partitioning import device_kind

# Columns of a register: what is read of the hidden size is a multiple of them, or all of it.
_LANES = 128
# Tokens of a program's rows at least, so that starting programs does not cost more than they do.
_TOKENS_A_PROGRAM = 512
# Whose kernels multiply in float32 alone; what is multiplied was rounded before.
_WIDE_PRODUCTS = ("TPU v2", "TPU v3")


class _Shape(NamedTuple):
    """What is compiled for.

    Attributes:
      heads: of the arrays; `heads_at_once` of them in a program.
      rows_at_once: in a program.
      direction: of the mask.
      rate: of dropout; 0 draws nothing.
      wide: products are of float32.
      interpret: run as JAX operations, where there is no TPU.
    """

    heads: int
    heads_at_once: int
    rows_at_once: int
    direction: str
    rate: float
    wide: bool
    interpret: bool


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
) -> jax.Array:
    """softmax(Q K^T / sqrt(K)) V with the softmax in float32; an `AttentionFn`. Elsewhere than on TPUs, slowly."""
    rows, length, heads, size = query.shape
    rate = dropout_rate if dropout_key is not None else 0.0
    seeds = seeds_of(dropout_key, (rows, heads)) if rate else (jnp.zeros((rows, heads), jnp.uint32),) * 2
    wide = device_kind() in _WIDE_PRODUCTS
    # As they lie: heads beside each other in the hidden size.
    flat = [array.reshape(rows, length, heads * size) for array in (query, key, value)]
    states, per_head = ("batch", None, "heads"), ("batch", "heads")
    of_device = on_each_device(
        tpu_kernel(functools.partial(_of_device, mask.direction, rate, wide)),
        mesh,
        {"batch": rows, "heads": heads},
        (states, states, states, ("batch", None), per_head, per_head),
        states,
    )
    return of_device(*flat, mask.sequence_ids, *seeds).reshape(query.shape)


def _of_device(
    direction: str,
    rate: float,
    wide: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    first: jax.Array,
    second: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    rows, length, width = query.shape
    heads = first.shape[1]
    size = width // heads
    at_once = math.lcm(size, _LANES) // size
    at_once = at_once if heads % at_once == 0 else heads
    rows_at_once = math.gcd(rows, max(1, _TOKENS_A_PROGRAM // length))
    shape = _Shape(heads, at_once, rows_at_once, direction, rate, wide, interpret)
    seeds = jnp.stack([first, second], axis=-1).reshape(rows, 1, 2 * heads)
    return _attention(shape, query, key, value, sequence_ids, seeds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    shape: _Shape, query: jax.Array, key: jax.Array, value: jax.Array, sequence_ids: jax.Array, seeds: jax.Array
) -> jax.Array:
    (context,) = _call(_forward, shape, 1, sequence_ids, seeds, query, key, value)
    return context


def _attention_forward(shape: _Shape, *inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _attention(shape, *inputs), inputs


def _attention_backward(shape: _Shape, inputs: tuple[jax.Array, ...], gradient: jax.Array) -> tuple:
    query, key, value, sequence_ids, seeds = inputs
    return *_call(_backward, shape, 3, sequence_ids, seeds, query, key, value, gradient), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _call(
    kernel: Callable[..., None],
    shape: _Shape,
    outputs: int,
    sequence_ids: jax.Array,
    seeds: jax.Array,
    *states: jax.Array,
) -> list[jax.Array]:
    """Runs a kernel over rows and heads: `states` [B, L, H * K] to as many arrays of that shape as it gives."""
    rows, length, width = states[0].shape
    size = width // shape.heads
    at_once = shape.rows_at_once
    block = pl.BlockSpec((at_once, length, shape.heads_at_once * size), lambda row, head: (row, 0, head))
    # Forwards two products of L * L * K multiplications a head, backwards five.
    products = 2 if outputs == 1 else 5
    pairs = rows * shape.heads * length * length
    return pl.pallas_call(
        functools.partial(kernel, shape),
        grid=(rows // at_once, shape.heads // shape.heads_at_once),
        in_specs=[
            pl.BlockSpec((at_once, 1, seeds.shape[-1]), lambda row, head: (row, 0, 0), memory_space=pltpu.SMEM),
            # Of queries as a column, of keys as a row.
            pl.BlockSpec((at_once, length, 1), lambda row, head: (row, 0, 0)),
            pl.BlockSpec((at_once, 1, length), lambda row, head: (row, 0, 0)),
            *[block] * len(states),
        ],
        out_specs=[block] * outputs,
        out_shape=[jax.ShapeDtypeStruct(states[0].shape, states[0].dtype)] * outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * size,
            transcendentals=pairs,
            bytes_accessed=(len(states) + outputs) * states[0].nbytes,
        ),
        interpret=shape.interpret,
        name=f"attention_{kernel.__name__.strip('_')}",
    )(seeds, sequence_ids[:, :, None], sequence_ids[:, None, :], *states)


def _forward(shape: _Shape, seeds, query_ids, key_ids, query, key, value, context) -> None:
    def of_head(row: Any, columns: slice, seen: jax.Array, probabilities: jax.Array, keep: jax.Array | None) -> None:
        dropped = _dropped(probabilities, keep, shape.rate).astype(value.dtype)
        context[row, :, columns] = _product(shape, dropped, value[row, :, columns]).astype(context.dtype)

    _over_heads(shape, seeds, query_ids, key_ids, query, key, of_head)


def _backward(shape: _Shape, seeds, query_ids, key_ids, query, key, value, gradient, d_query, d_key, d_value) -> None:
    def of_head(row: Any, columns: slice, seen: jax.Array, probabilities: jax.Array, keep: jax.Array | None) -> None:
        dtype = query.dtype
        above = gradient[row, :, columns]
        dropped = _dropped(probabilities, keep, shape.rate).astype(dtype)
        d_value[row, :, columns] = _product(shape, dropped, above, 0, 0).astype(dtype)
        of_dropped = _product(shape, above, value[row, :, columns], 1, 1)
        of_probabilities = _dropped(of_dropped, keep, shape.rate)
        mean = jnp.sum(of_probabilities * probabilities, axis=-1, keepdims=True)
        # Unseen keys have probability 0, but where a token sees none all are equal: no gradient may pass there.
        of_logits = jnp.where(seen, probabilities * (of_probabilities - mean), 0.0).astype(dtype)
        scale = above.shape[-1] ** -0.5
        d_query[row, :, columns] = (_product(shape, of_logits, key[row, :, columns]) * scale).astype(dtype)
        scaled = query[row, :, columns] * jnp.asarray(scale, dtype)
        d_key[row, :, columns] = _product(shape, of_logits, scaled, 0, 0).astype(dtype)

    _over_heads(shape, seeds, query_ids, key_ids, query, key, of_head)


def _over_heads(shape: _Shape, seeds, query_ids, key_ids, query, key, of_head) -> None:
    """Calls `of_head` with each row, the columns of each head, and its [L, L]: seen, probabilities, kept."""
    length, width = query.shape[1:]
    size = width // shape.heads_at_once
    program_head = pl.program_id(1) * shape.heads_at_once

    def of_row(row: jax.Array, _: None) -> None:
        seen = allowed(shape.direction, query_ids[row], key_ids[row])
        for nth in range(shape.heads_at_once):
            columns = slice(nth * size, (nth + 1) * size)
            scaled = query[row, :, columns] * jnp.asarray(size**-0.5, query.dtype)
            logits = jnp.where(seen, _product(shape, scaled, key[row, :, columns], 1, 1), NOT_SEEN)
            exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
            probabilities = exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)
            keep = None
            if shape.rate:
                seed = 2 * (program_head + nth)
                keep = _kept(length, seeds[row, 0, seed], seeds[row, 0, seed + 1], shape.rate)
            of_head(row, columns, seen, probabilities, keep)

    if shape.rows_at_once == 1:
        of_row(0, None)
    else:
        jax.lax.fori_loop(0, shape.rows_at_once, of_row, None)


def _kept(length: int, first: jax.Array, second: jax.Array, rate: float) -> jax.Array:
    """Which elements of a head's [L, L] dropout keeps, as `dropout` draws them."""
    half = -(-length // 2)
    shape = length, half
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    words = hashed(row * np.uint32(half) + column, first, second)
    bits = jnp.concatenate([words & 0xFFFF, words >> BITS], axis=-1)[:, :length]
    return bits >= threshold(rate)


def _dropped(values: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    return values if keep is None else jnp.where(keep, values * kept_scale(rate), 0.0)


def _product(shape: _Shape, left: jax.Array, right: jax.Array, left_axis: int = 1, right_axis: int = 0) -> jax.Array:
    """Contracts one axis of two matrices, adding up in float32."""
    if shape.wide:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jax.lax.dot_general(
        left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32
    )
