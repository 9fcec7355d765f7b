"""Hash of arrays that is equal on the host, on one device and on any mesh.

The bits of each element are mixed with the element's index, and the results are summed. Therefore, the order of
computation does not matter. The mixing is nonlinear, so that changes such as two swapped elements do not cancel. The
hash is not cryptographic.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SLICE_BYTES = 16 << 20
# Number of lanes, which are independent 32-bit sums with different seeds.
_LANES = 2
# Smaller arrays are hashed with NumPy, which needs no compilation.
_SMALL_BYTES = 1 << 20


def fingerprint(tree: Any) -> str:
    """Returns 16 hexadecimal digits that change with any bit, name, shape or dtype of the arrays.

    Args:
      tree: tree of arrays on any devices; elements must have 4 bytes.
    """
    total = np.zeros(_LANES, np.uint32)
    for seeds, leaf in _leaves_with_seeds(tree):
        # Fetch each sum before the next one starts, since concurrent all-reduces over devices of one CPU can deadlock.
        if getattr(leaf, "is_fully_addressable", True) and leaf.nbytes <= _SMALL_BYTES:
            total += _numpy_sum(np.asarray(leaf), seeds)
        else:
            total += jax.device_get(_device_sum(leaf, seeds, np.uint32(0)))
    return _digits(total)


def fingerprint_on_host(tree: Any) -> str:
    """Returns the `fingerprint` of NumPy arrays, computed in slices to save memory."""
    total = np.zeros(_LANES, np.uint32)
    for seeds, leaf in _leaves_with_seeds(tree):
        if leaf.nbytes <= _SMALL_BYTES:
            total += _numpy_sum(leaf, seeds)
            continue
        rows = max(1, _SLICE_BYTES * len(leaf) // leaf.nbytes)
        for row in range(0, len(leaf), rows):
            first = np.uint32(row * (leaf.size // len(leaf)) % 2**32)
            total += jax.device_get(_device_sum(leaf[row : row + rows], seeds, first))
    return _digits(total)


def _numpy_sum(x: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Returns the same as `_device_sum` for an entire array, without a compilation per shape."""
    bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    index = np.arange(bits.size, dtype=np.uint32)
    return np.array([np.sum(_mix(bits ^ _mix(index ^ seed)), dtype=np.uint32) for seed in seeds])


def _digits(sums: np.ndarray) -> str:
    return "".join(f"{int(lane):08x}" for lane in sums)


def _leaves_with_seeds(tree: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Yields seeds and arrays. The seeds (uint32 [lanes]) depend on the name, shape and dtype of the array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"{jax.tree_util.keystr(path)} {tuple(leaf.shape)} {leaf.dtype.name}"
        digest = hashlib.blake2b(name.encode(), digest_size=4 * _LANES).digest()
        yield np.frombuffer(digest, "<u4").astype(np.uint32), leaf


# Jit per array instead of per tree, so that arrays of the same shape share one compilation.
@jax.jit
def _device_sum(x: jax.Array, seeds: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the sums (uint32 [lanes]) of an array or slice. `first` is the index of its first element."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    index = jnp.full_like(bits, first)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.stack([jnp.sum(_mix(bits ^ _mix(index ^ seeds[lane])), dtype=jnp.uint32) for lane in range(_LANES)])


def _mix(x: Any) -> Any:
    """Applies the finalizer of MurmurHash3 (32 bits), a permutation in which each input bit affects all output bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
