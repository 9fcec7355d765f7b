"""JAX's own TPU kernel, splash attention: rows of any length in blocks, without dropout."""

import functools

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from bertjax.model.attention.mask import AttentionMask
from bertjax.model.attention.shard_map import on_each_device, tpu_kernel

# Rows are cut into blocks of so many tokens, the most that divides them; the kernel takes multiples of the least.
_LEAST_BLOCK, _LARGEST_BLOCK = 128, 512
_BLOCKS = (
    *("block_q", "block_kv", "block_kv_compute"),
    *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
)
# How many keys a query sees on its left and on its right; None is all.
_WINDOWS = {"left": (None, 0), "right": (0, None)}


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
) -> jax.Array:
    """softmax(Q K^T / sqrt(K)) V with the softmax in float32; an `AttentionFn`. Elsewhere than on TPUs, slowly.

    Raises:
      ValueError: dropout is asked for.
    """
    if dropout_rate and dropout_key is not None:
        raise ValueError("splash attention has no dropout")
    rows, _, heads, size = query.shape
    states = ("batch", "heads", None, None)
    of_device = on_each_device(
        tpu_kernel(functools.partial(_of_device, mask.direction)),
        mesh,
        {"batch": rows, "heads": heads},
        (states, states, states, ("batch", None)),
        states,
    )
    # The kernel does not scale.
    by_head = [array.transpose(0, 2, 1, 3) for array in (query * size**-0.5, key, value)]
    return of_device(*by_head, mask.sequence_ids).transpose(0, 2, 1, 3)


def _of_device(
    direction: str, query: jax.Array, key: jax.Array, value: jax.Array, sequence_ids: jax.Array, *, interpret: bool
) -> jax.Array:
    """Of arrays [B, H, L, K] and [B, L]. A position of padding sees padding, itself at least."""
    heads, length = query.shape[1:3]
    block = _LEAST_BLOCK * int(np.gcd(length // _LEAST_BLOCK, _LARGEST_BLOCK // _LEAST_BLOCK))
    square = length, length
    one = splash.FullMask(square) if direction == "both" else splash.LocalMask(square, _WINDOWS[direction], 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(_BLOCKS, block)),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, splash.SegmentIds(ids, ids)))(query, key, value, sequence_ids)
