"""Splash attention, JAX's TPU kernel that processes long rows in blocks. It does not support dropout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from bertjax.model.attention.xla import AttentionMask
from bertjax.model.dropout import DropoutSpec
from bertjax.model.partitioning import platform_kernel, shard_over_mesh

# Block sizes are 128, 256 or 512 tokens, whichever is the largest that divides the row length. If none does, rows are
# padded to a multiple of 512 tokens.
_MIN_BLOCK, _MAX_BLOCK = 128, 512
_BLOCKS = (
    *("block_q", "block_kv", "block_kv_compute"),
    *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
)
# For each direction, the numbers of keys that a query attends to on its left and on its right (None: all keys).
_WINDOWS = {"left": (None, 0), "right": (0, None)}


def splash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Computes the same attention as `xla_attention`. For TPUs; slow on CPU and GPU. Implements `Attention`."""
    rows, length, heads, size = query.shape
    padding = ((0, 0), (0, -length % _MAX_BLOCK if length % _MIN_BLOCK else 0))
    sides = (mask.window // 2,) * 2 if mask.window else _WINDOWS.get(mask.direction)

    def attend(query: jax.Array, *inputs: jax.Array, interpret: bool) -> jax.Array:
        """Runs the kernel on states [B, H, L, K] and ids [B, L]. Padding attends to padding, so outputs are finite."""
        heads, length = query.shape[1:3]
        block = _MIN_BLOCK * int(np.gcd(length // _MIN_BLOCK, _MAX_BLOCK // _MIN_BLOCK))
        head_mask = splash.LocalMask((length, length), sides, 0) if sides else splash.FullMask((length, length))
        blocks: dict[str, Any] = dict.fromkeys(_BLOCKS, block)
        kernel: Any = splash.make_splash_mha(
            splash.MultiHeadMask([head_mask] * heads),
            block_sizes=splash.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, splash.SegmentIds(ids, ids)))(query, *inputs)

    states = ("batch", "heads", None, None)
    run = platform_kernel("tpu", lambda interpret: functools.partial(attend, interpret=interpret))
    on_mesh = shard_over_mesh(run, rows, heads, (states, states, states, ("batch", None)), states)
    # Scale the queries, because the kernel does not scale the logits.
    padded = [jnp.pad(array, (*padding, (0, 0), (0, 0))) for array in (query * size**-0.5, key, value)]
    by_head = [array.transpose(0, 2, 1, 3) for array in padded]
    return on_mesh(*by_head, jnp.pad(mask.sequence_ids, padding)).transpose(0, 2, 1, 3)[:, :length]
