"""A hash of arrays: the same on the host, on one device and spread over any mesh.

Each element's bits are mixed with its place in its array, and the results are added, which may be done in any order.
Since mixing is far from linear, changes do not cancel each other: not the flipped signs of a whole matrix, and not two
elements that have changed places. No shield against someone who sets out to find two trees of one hash.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SLICE_BYTES = 16 << 20
# 32-bit sums kept side by side, with keys of their own.
_LANES = 2
_LITTLE_BYTES = 1 << 20


def fingerprint(tree: Any) -> str:
    """16 hexadecimal digits that change with any bit, name, shape or dtype of the arrays, on whatever devices they are.

    Args:
      tree: of arrays with elements of 4 bytes.
    """
    total = np.zeros(_LANES, np.uint32)
    for seeds, leaf in _with_seeds(tree):
        # Fetched before the next begins: sums of many arrays over many devices of one CPU, all under way at once, may
        # wait for each other until XLA gives up.
        if getattr(leaf, "is_fully_addressable", True) and leaf.nbytes <= _LITTLE_BYTES:
            total += _little_sum(np.asarray(leaf), seeds)
        else:
            total += jax.device_get(_leaf_sum(leaf, seeds, np.uint32(0)))
    return _digits(total)


def fingerprint_on_host(tree: Any) -> str:
    """The same, of arrays on the host, a slice after the other, so that little is held twice."""
    total = np.zeros(_LANES, np.uint32)
    for seeds, leaf in _with_seeds(tree):
        if leaf.nbytes <= _LITTLE_BYTES:
            total += _little_sum(leaf, seeds)
            continue
        rows = max(1, _SLICE_BYTES * len(leaf) // leaf.nbytes)
        for row in range(0, len(leaf), rows):
            first = np.uint32(row * (leaf.size // len(leaf)) % 2**32)
            total += jax.device_get(_leaf_sum(leaf[row : row + rows], seeds, first))
    return _digits(total)


def _little_sum(x: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """`_leaf_sum` of a whole array, without the compilation that each shape takes."""
    bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    place = np.arange(bits.size, dtype=np.uint32)
    return np.array([np.sum(_mixed(bits ^ _mixed(place ^ seed)), dtype=np.uint32) for seed in seeds])


def _digits(sums: np.ndarray) -> str:
    return "".join(f"{int(lane):08x}" for lane in sums)


def _with_seeds(tree: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Each array with a key for each lane, uint32 [lanes], that its name, shape and dtype give."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"{jax.tree_util.keystr(path)} {tuple(leaf.shape)} {leaf.dtype.name}"
        digest = hashlib.blake2b(name.encode(), digest_size=4 * _LANES).digest()
        yield np.frombuffer(digest, "<u4").astype(np.uint32), leaf


# For each array by itself: moments have the shapes of parameters, and most models most shapes of another.
@jax.jit
def _leaf_sum(x: jax.Array, seeds: jax.Array, first: jax.Array) -> jax.Array:
    """uint32 [lanes] of an array, or of a slice of one that begins at element `first`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    place = jnp.full_like(bits, first)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.stack([jnp.sum(_mixed(bits ^ _mixed(place ^ seeds[lane])), dtype=jnp.uint32) for lane in range(_LANES)])


def _mixed(x: Any) -> Any:
    """The last step of MurmurHash3 for 32 bits (Appleby): a permutation in which each bit sways all others."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
