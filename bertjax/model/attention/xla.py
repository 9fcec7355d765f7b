"""Attention masks, self-attention in plain JAX, and NVIDIA's cuDNN kernel. Axis letters: see `encoder.py`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.dropout import NO_DROPOUT, DropoutSpec, dropout
from bertjax.model.matmul import einsum
from bertjax.model.partitioning import shard_over_mesh

# Logit of masked keys. It is finite, so that the softmax of a row of padding is uniform rather than NaN.
MASKED_LOGIT = -1e9
# Rows of at least this many tokens are processed in blocks of queries.
_LONG_ROW, _QUERY_BLOCK = 2048, 512


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Attention mask: positions attend to positions of the same sequence, in one or both directions."""

    direction: str  # side to attend to: `both`, `left` or `right`. Tokens always attend to themselves.
    # [B, L] int32, index of each position's sequence, starting at 1, or 0 for padding. Sequences are contiguous, and no
    # token attends to padding. The output at padding positions may be any finite value.
    sequence_ids: jax.Array
    # Number of tokens that a token attends to besides itself, half of them on each side (default: 0, no limit).
    window: int = 0


def attention_mask(direction: str, query_ids: jax.Array, key_ids: jax.Array, window: int = 0) -> jax.Array:
    """Returns a bool mask [..., L, L] of the keys that each query attends to.

    Padding queries attend to all tokens of the row. For rows of one sequence, the output therefore equals that of
    google-research/bert, even at padding positions. Arguments are as in `AttentionMask`, with sequence ids [..., L, 1]
    of queries and [..., 1, L] of keys.
    """
    mask = (key_ids != 0) & ((query_ids == key_ids) | (query_ids == 0))
    if direction == "both" and not window:
        return mask
    shape = query_ids.shape[-2], key_ids.shape[-1]
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    if window:
        return mask & (jnp.abs(query - key) <= window // 2)
    return mask & (query >= key if direction == "left" else query <= key)


def xla_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(head size)) V with the softmax in float32. Implements `Attention`."""
    query = query * query.shape[-1] ** -0.5
    has_dropout = drop.rate > 0 and drop.key is not None
    # Do not divide rows into blocks in exports, because their row length is symbolic.
    length = query.shape[1] if isinstance(query.shape[1], int) else 0
    if mask.window and length > 2 * mask.window and not has_dropout:
        return _attend_in_blocks(query, key, value, mask)
    if length >= _LONG_ROW and mask.direction == "both" and not (mask.window or has_dropout):
        return _attend_by_queries(query, key, value, mask.sequence_ids)
    ids = mask.sequence_ids
    allowed = attention_mask(mask.direction, ids[:, :, None], ids[:, None], mask.window)
    return _attend((query, key, value), allowed, drop)


def _attend(states: Sequence[jax.Array], allowed: jax.Array, drop: DropoutSpec = NO_DROPOUT) -> jax.Array:
    """Computes attention of scaled queries [B, L, H, K] to keys and values [B, M, H, K] with a mask [B, L, M]."""
    query, key, value = states
    logits = einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(allowed[:, None], logits, MASKED_LOGIT), axis=-1).astype(query.dtype)
    return einsum("BHLM,BMHK->BLHK", dropout(probabilities, *drop), value)


def _blocks(x: jax.Array, size: int, margin: int = 0) -> jax.Array:
    """Pads [B, L, ...] with `margin` positions at both ends, and splits it into blocks [B, N, size, ...]."""
    padding = [(0, 0), (margin, margin + -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:])


def _attend_by_queries(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """Computes attention for one block of queries at a time, in memory proportional to L.

    The backward pass recomputes a block's probabilities.
    """

    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, query_ids = block
        return _attend((queries, key, value), attention_mask("both", query_ids[:, :, None], ids[:, None]))

    blocks = [_blocks(x, _QUERY_BLOCK).swapaxes(0, 1) for x in (query, ids)]  # [N, B, Q, ...]
    context = jax.lax.map(jax.checkpoint(attend), tuple(blocks))
    return context.swapaxes(0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, : query.shape[1]]


def _attend_in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask) -> jax.Array:
    """Computes local attention in time and memory proportional to L * window instead of L * L.

    Each block of `window` queries attends to the keys of the block and of half a window on each side.
    """
    half = mask.window // 2
    size = 2 * half

    def blocks(x: jax.Array) -> jax.Array:  # [B, L, ...] to [B * N, size, ...]
        return _blocks(x, size).reshape(-1, size, *x.shape[2:])

    def neighbors(x: jax.Array) -> jax.Array:  # [B, L, ...] to [B * N, 2 * size, ...]
        shifted = _blocks(x, size, half)
        pairs = jnp.concatenate([shifted[:, :-1], shifted[:, 1:]], axis=2)
        return pairs.reshape(-1, 2 * size, *x.shape[2:])

    ids = mask.sequence_ids
    distance = np.arange(size)[:, None] - (np.arange(2 * size) - half)
    allowed = attention_mask("both", blocks(ids)[..., None], neighbors(ids)[:, None]) & (np.abs(distance) <= half)
    context = _attend((blocks(query), neighbors(key), neighbors(value)), allowed)
    return context.reshape(query.shape[0], -1, *query.shape[2:])[:, : query.shape[1]]


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Computes the same attention as `xla_attention`. Implements `Attention`.

    The mask is passed as row lengths, because JAX would convert a bool mask to a bias and compute its gradient.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        lengths = jnp.sum(sequence_ids != 0, axis=-1, dtype=jnp.int32)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=mask.direction == "left",
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

    rows, _, heads, _ = query.shape
    states = ("batch", None, "heads", None)
    on_mesh = shard_over_mesh(attend, rows, heads, (states, states, states, ("batch", None)), states)
    return on_mesh(query, key, value, mask.sequence_ids)
