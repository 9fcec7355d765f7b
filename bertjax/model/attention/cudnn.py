"""NVIDIA's cuDNN through `jax.nn`: one sequence a row, half precision, without dropout."""

import functools

import jax
import jax.numpy as jnp

from bertjax.model.attention.mask import AttentionMask
from bertjax.model.attention.shard_map import on_each_device


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
    """softmax(Q K^T / sqrt(K)) V with the softmax in float32; an `AttentionFn`.

    Rows are described by their lengths: a boolean mask would become a bias, whose gradient JAX computes for nothing.

    Args:
      implementation: of `jax.nn.dot_product_attention`; `xla` computes the same anywhere.

    Raises:
      ValueError: dropout is asked for.
    """
    if dropout_rate and dropout_key is not None:
        raise ValueError("cuDNN's attention has no dropout here")
    rows, _, heads, _ = query.shape
    states = ("batch", None, "heads", None)
    of_device = on_each_device(
        functools.partial(_of_device, mask.direction, implementation),
        mesh,
        {"batch": rows, "heads": heads},
        (states, states, states, ("batch", None)),
        states,
    )
    return of_device(query, key, value, mask.sequence_ids)


def _of_device(
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
