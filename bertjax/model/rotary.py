"""Rotary position embeddings (RoFormer, arXiv 2104.09864). Axis letters: see `encoder.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.config import ABSOLUTE, ROTARY, ModelConfig


def rotations(config: ModelConfig, position_ids: jax.Array) -> jax.Array | None:
    """Computes cosines and sines of the rotary angles of positions [B, L].

    Returns:
      float32 [2, 2, B, L, 1, K / 2], cosines and sines for the thetas of global and of local layers. None for learned
        position embeddings.
    """
    if config.position_embedding_type == ABSOLUTE:
        return None
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / config.head_size
    frequencies = np.stack([1.0 / theta**exponents for theta in (config.global_rope_theta, config.local_rope_theta)])
    angles = position_ids[..., None].astype(jnp.float32) * frequencies.astype(np.float32)[:, None, None]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)[..., None, :]


def rotate(config: ModelConfig, states: jax.Array, rotations: jax.Array, is_local: jax.Array | None) -> jax.Array:
    """Rotates queries or keys [B, L, H, K] by the angles of their positions. `is_local` is a bool scalar or None."""
    cosine, sine = rotations[0 if is_local is None else is_local.astype(jnp.int32)]  # [B, L, 1, K / 2] each
    if config.position_embedding_type == ROTARY:
        first, second = jnp.split(states.astype(jnp.float32), 2, axis=-1)
    else:  # rotary_pairs
        pairs = states.astype(jnp.float32).reshape(*states.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    rotated = first * cosine - second * sine, second * cosine + first * sine
    join = jnp.concatenate if config.position_embedding_type == ROTARY else jnp.stack
    return join(rotated, axis=-1).reshape(states.shape).astype(states.dtype)
