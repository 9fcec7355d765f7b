"""Dropout whose random bits are a hash of the random key and each element's position.

The forward pass and the backward pass each compute the bits, fused into the surrounding operations, so no mask is
stored in memory. `tests/benchmarks/dropout_bits.py` compares the cost of the hash with the cost of `jax.random`'s
generators. A position is an index into the global array, so all meshes and all attention kernels use the same mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

# Random bits per element. Two elements share a 32-bit word, and rates are multiples of 2^-16.
BITS = 16
# Odd multipliers that mix bits well, from the golden ratio and MurmurHash3's finalizer (Appleby, public domain).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


class DropoutSpec(NamedTuple):
    """Dropout of attention probabilities. If the rate is 0 or the key is None, dropout is disabled."""

    rate: float
    key: jax.Array | None


NO_DROPOUT = DropoutSpec(0.0, None)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes each element of `x` [..., M, N] with probability `rate`, and divides kept elements by 1 - `rate`.

    Returns `x` unchanged if `key` is None. The rate is rounded to a multiple of 2^-16 (0.1 becomes 0.100006). Use a
    different key for each call.
    """
    if key is None or rate == 0.0:
        return x

    def drop(x: jax.Array, seeds: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, columns = x.shape[-2:]
        # Each 32-bit hash provides the bits of two elements, one in each half of a row. The hash is computed twice,
        # once for each element, because computing it once and concatenating the two halves would need memory.
        half = np.uint32(-(-columns // 2))
        column = _iota((rows, columns), 1)
        in_second_half = column >= half
        position = _iota((rows, columns), 0) * half + jnp.where(in_second_half, column - half, column)
        words = hash_positions(position, *(seed[..., None, None] for seed in seeds))
        bits = jnp.where(in_second_half, words >> BITS, words & 0xFFFF)
        # Scale in float32, because a bfloat16 scale would bias kept elements by -0.16 % at a rate of 0.1.
        scaled = x.astype(jnp.float32) * dropout_scale(rate)
        return jnp.where(bits >= dropout_threshold(rate), scaled, 0).astype(x.dtype)

    # With `jax.checkpoint`, the backward pass recomputes the hash instead of storing a mask.
    return jax.checkpoint(drop)(x, dropout_seeds(key, x.shape[:-2]))


def dropout_threshold(rate: float) -> np.uint32:
    """Returns the dropout threshold: an element is dropped if its 16 random bits are below this number."""
    return np.uint32(round(rate * 2**BITS))


def dropout_scale(rate: float) -> float:
    """Returns the scale factor of kept elements, 1 / (1 - rate), with `rate` rounded to 16 bits."""
    return 2**BITS / (2**BITS - round(rate * 2**BITS))


def gumbel_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns standard Gumbel noise, float32, whose random bits are a hash of key and position, as in `dropout`."""
    # Use only 23 bits, so that float32 represents every number exactly and rounds none to 0 or 1.
    uniform = ((dropout_seeds(key, shape)[0] >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def dropout_seeds(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns two seeds for each matrix [M, N] of an array [*shape, M, N], as two uint32 arrays of shape `shape`."""
    first, second, *block = jax.random.key_data(key).reshape(-1).astype(jnp.uint32)
    position = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = _iota(shape, axis)
        if axis == 0 and jax.random.key_impl(key) == _BLOCK_KEY:
            index = index * block[1] + block[0]
        position = position * np.uint32(size) + index
    return hash_positions(position, first, second), hash_positions(position, second ^ np.uint32(_GOLDEN), first)


def kernel_dropout(drop: DropoutSpec, shape: tuple[int, ...]) -> tuple[float, tuple[jax.Array, jax.Array]]:
    """Returns the rate (0 without a key) and the seeds for dropout in an attention kernel, see `dropout_seeds`."""
    if drop.key is None or not drop.rate:
        return 0.0, (jnp.zeros(shape, jnp.uint32),) * 2
    return drop.rate, dropout_seeds(drop.key, shape)


def hash_positions(position: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Hashes each position, with the seeds `first` and `second`, to 32 random bits (uint32)."""
    x = position * np.uint32(_GOLDEN) + first
    x = (x ^ (x >> 16)) * np.uint32(_FIRST)
    x = (x ^ (x >> 13) ^ second) * np.uint32(_SECOND)
    return x ^ (x >> 16)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, axis)


def block_key(key: jax.Array, block: jax.Array, num_blocks: int) -> jax.Array:
    """Returns a key for a block of a batch. With it, `dropout` uses the same mask as for these rows in the full batch.

    Row i of the block is row i * `num_blocks` + `block` of the batch. Arrays must have at least three axes.
    """
    block_data = jnp.stack([jnp.uint32(block), jnp.uint32(num_blocks)])
    data = jnp.concatenate([jax.random.key_data(key).reshape(-1)[:2], block_data])
    return jax.random.wrap_key_data(data, impl=_BLOCK_KEY)


def _on_key(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Extends a function of Threefry keys, such as `fold_in`, to block keys (`_BLOCK_KEY`). The block is kept."""

    def apply(data: jax.Array, argument: Any) -> jax.Array:
        words = jax.random.key_data(function(jax.random.wrap_key_data(data[:2], impl="threefry2x32"), argument))
        return jnp.concatenate([words, jnp.broadcast_to(data[2:], words.shape)], axis=-1)

    return apply


def _unsupported(*arguments: Any) -> jax.Array:
    raise NotImplementedError("block keys support only split, fold_in and `bertjax.model.dropout`")


# A block key has four words: two of a Threefry key, the index of the block, and the number of blocks. Flax derives
# module keys from it.
_BLOCK_KEY = jax.extend.random.define_prng_impl(
    key_shape=(4,),
    seed=_unsupported,
    split=_on_key(jax.random.split),
    random_bits=_unsupported,
    fold_in=_on_key(jax.random.fold_in),
    name="bertjax_block",
)
