"""Layers on top of each other, whose parameters are stacked on a leading axis N, the lowest first."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bertjax.model.config import ModelConfig

# Names of the stacked parameters of all layers, and of the lowest ones where these are given apart; the first is also
# the logical name of the leading axis of both.
LAYERS, FROZEN_LAYERS = "layers", "frozen_layers"
# Of a layer, by the names that `kept` gives: a token's width of them each, but four of MLP_IN.
PROJECTIONS, CONTEXT, SUMS, MLP_IN = "projections", "context", "sums", "mlp_in"
_KEPT = {
    "elementwise": (PROJECTIONS, CONTEXT, SUMS, MLP_IN),
    "projections": (CONTEXT, SUMS, MLP_IN),
    "full": (),
}
kept = checkpoint_name


def recomputes(config: ModelConfig) -> bool:
    """Whether the backward pass computes each layer again, but for what has a name that it keeps."""
    return config.remat in _KEPT


def run_layers(
    parent: nn.Module, layer: type[nn.Module], arguments: tuple[Any, ...], x: jax.Array, sequence_ids: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """A stack of layers in a module that has a `config` and is being called.

    Args:
      parent: where their parameters are.
      layer: (x, sequence_ids) to x, and to x again where it is to be collected.
      arguments: that the layers are made with; the last is whether all of their states are collected.
      x: [B, L, ...], what goes into the first.
      sequence_ids: [B, L] int32.

    Returns:
      As `Encoder`.
    """
    config = parent.config
    outputs = [x[None]]
    lower = 0
    if parent.has_variable("params", FROZEN_LAYERS):
        lower = len(jax.tree.leaves(parent.get_variable("params", FROZEN_LAYERS))[0])
    if recomputes(config):
        policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[config.remat])
        # Inside a scan, the loop itself keeps XLA from merging the recomputation with the original.
        layer = nn.remat(layer, policy=policy, prevent_cse=not config.scan_layers)
    for name, length in ((FROZEN_LAYERS, lower), (LAYERS, config.num_hidden_layers - lower)):
        if length:
            stack = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=length,
                unroll=1 if config.scan_layers else length,
                metadata_params={nn.PARTITION_NAME: LAYERS},
            )
            x, states = stack(*arguments, name=name)(x, sequence_ids)
            outputs.append(states)
    return x, jnp.concatenate(outputs) if arguments[-1] else None
