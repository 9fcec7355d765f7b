"""Dropout whose random bits are a function of where an element stands: of key, row, head and place in the row.

The bits are hashed anew wherever they are needed, forwards and backwards, inside whatever else is done with an element
there: nothing of them is kept, or moved through memory. Since they depend on places in the whole array alone, they are
the same on every mesh, and the same in every implementation of attention.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Of a rate: it is a multiple of 2^-16, as two elements share a word of 32 bits.
BITS = 16
# Odd constants of good mixing: of the golden ratio, and of MurmurHash3's finaliser (Appleby, public domain).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest; the identity without a key.

    The rate is taken as a multiple of 2^-16 (0.1 becomes 0.100006), and the rest is scaled by exactly that.

    Args:
      x: [..., M, N].
      key: of this array; two that are to have other draws have other keys.
    """
    if key is None or rate == 0.0:
        return x

    def dropped(x: jax.Array, seeds: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, columns = x.shape[-2:]
        # The two halves of a row share words; each hashes them for itself, since putting them together would take an
        # array in memory.
        half = np.uint32(-(-columns // 2))
        column = _iota((rows, columns), 1)
        second = column >= half
        place = _iota((rows, columns), 0) * half + jnp.where(second, column - half, column)
        words = hashed(place, *(seed[..., None, None] for seed in seeds))
        bits = jnp.where(second, words >> BITS, words & 0xFFFF)
        # In float32: a factor of bfloat16 would make all that is kept 0.16 % too small at a rate of 0.1.
        scaled = x.astype(jnp.float32) * kept_scale(rate)
        return jnp.where(bits >= threshold(rate), scaled, 0).astype(x.dtype)

    # The backward pass hashes again, and keeps no mask.
    return jax.checkpoint(dropped)(x, seeds_of(key, x.shape[:-2]))


def threshold(rate: float) -> np.uint32:
    """An element whose 16 bits are below is dropped."""
    return np.uint32(round(rate * 2**BITS))


def kept_scale(rate: float) -> float:
    """What the others are multiplied by."""
    return 2**BITS / (2**BITS - round(rate * 2**BITS))


def seeds_of(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Two words for each of `shape`, such as rows and heads: uint32 of that shape, both."""
    first, second = jax.random.key_data(key).reshape(-1)[:2].astype(jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * np.uint32(size) + _iota(shape, axis)
    return hashed(place, first, second), hashed(place, second ^ np.uint32(_GOLDEN), first)


def hashed(place: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """uint32: 32 bits of each place, for each pair of seeds."""
    x = place * np.uint32(_GOLDEN) + first
    x = (x ^ (x >> 16)) * np.uint32(_FIRST)
    x = (x ^ (x >> 13) ^ second) * np.uint32(_SECOND)
    return x ^ (x >> 16)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
