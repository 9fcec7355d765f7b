"""NVIDIA's cuDNN attention through `jax.nn`: one sequence per row, half precision, no dropout."""

import functools

import jax
import jax.numpy as jnp

from bertjax.model.attention.mask import AttentionMask
from bertjax.model.attention.shard_map import shard_over_mesh


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
    implementation: str = "cudnn",
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(K)) V with a float32 softmax, as an `AttentionFn`.

    The mask is passed as row lengths, since JAX would convert a boolean mask to a bias and compute its unused gradient.

    Args:
      implementation: implementation of `jax.nn.dot_product_attention`; `xla` computes the same on any platform.
    """
    if dropout_rate and dropout_key is not None:
        raise ValueError("cudnn attention does not support dropout")
    rows, _, heads, _ = query.shape
    states = ("batch", None, "heads", None)
    attend = shard_over_mesh(
        functools.partial(_attend_on_device, mask.direction, implementation),
        mesh,
        {"batch": rows, "heads": heads},
        (states, states, states, ("batch", None)),
        states,
    )
    return attend(query, key, value, mask.sequence_ids)


def _attend_on_device(
    direction: str, implementation: str, query: jax.Array, key: jax.Array, value: jax.Array, sequence_ids: jax.Array
) -> jax.Array:
    lengths = jnp.sum(sequence_ids != 0, axis=-1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=direction == "left",
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
