"""Stack of identical layers, scanned or unrolled, with rematerialization.

Parameters of all layers are stacked on a leading axis N, the lowest layer first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.layers import REMAT_SAVED_NAMES, recomputes_layers
from bertjax.model.partitioning import scans_layers

# LAYERS is the module name of the stacked layers, and the logical name of their leading axis. If the lowest layers are
# frozen, the train step passes them as a second stack, FROZEN_LAYERS.
LAYERS, FROZEN_LAYERS = "layers", "frozen_layers"


def is_stacked(path: Sequence[str]) -> bool:
    """Returns True if a path leads to a parameter that contains all layers on its leading axis."""
    return LAYERS in path


def run_layers(
    parent: nn.Module,
    layer: type[nn.Module],
    fields: Mapping[str, Any],
    x: jax.Array,
    layer_inputs: Any,
    shared: Any,
    *,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies a stack of layers inside the calling module.

    Args:
      parent: the calling module, which owns the parameters and has a `config`.
      layer: module class. It maps (x, layer_inputs, shared) to (output, output) if `collect`, else to (output, None).
      fields: constructor arguments of the layer, except `collect`.
      x: [B, L, ...] input of the lowest layer.
      layer_inputs: arrays with a leading axis N. Each layer gets one element of each array.
      shared: arrays that are the same for every layer, such as `sequence_ids`.
      collect: whether to also return the outputs of all layers.

    Returns:
      Output of the last layer, [B, L, ...].
      Input `x` and the outputs of all layers in one array, [N + 1, B, L, ...], if `collect`, else None.
    """
    config, is_scanned = parent.config, scans_layers(parent.config)
    outputs = [x[None]]
    num_frozen = 0
    if parent.has_variable("params", FROZEN_LAYERS):
        num_frozen = len(jax.tree.leaves(parent.get_variable("params", FROZEN_LAYERS))[0])
    if recomputes_layers(config):
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT_SAVED_NAMES[config.remat])
        layer = nn.remat(layer, policy=policy, prevent_cse=not is_scanned)
    for name, first, end in ((FROZEN_LAYERS, 0, num_frozen), (LAYERS, num_frozen, config.num_hidden_layers)):
        if length := end - first:
            stack = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast),
                length=length,
                unroll=1 if is_scanned else length,
                metadata_params={nn.PARTITION_NAME: LAYERS},
            )
            parts = jax.tree.map(lambda array, first=first, end=end: array[first:end], layer_inputs)
            x, states = stack(**fields, collect=collect, name=name)(x, parts, shared)
            outputs.append(states)
    return x, jnp.concatenate(outputs) if collect else None
