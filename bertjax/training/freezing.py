"""Frozen parameters, which have no gradient, update or optimizer state.

Arrays with LAYERS in their path contain all layers on a leading axis, lowest layer first. Freezing some layers splits
these arrays. `optax.multi_transform` and `optax.set_to_zero` cannot do this: they mask entire arrays, so frozen layers
would still have gradients and moments.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError, listed
from bertjax.model.layers import FROZEN_LAYERS, LAYERS, is_stacked


def split_frozen(params: Any, config: OptimizerConfig) -> tuple[Any, Any]:
    """Returns the trainable parameters, and those that `config.freeze_layers` and `config.freeze` select.

    The frozen layers are separate arrays, with FROZEN_LAYERS instead of LAYERS in their path. They get no parameter
    gradients. If the embeddings are also frozen, the backward pass stops above the frozen layers.
    """
    trainable, frozen, num_frozen = {}, {}, config.freeze_layers
    for path, leaf in flatten_dict(params).items():
        if num_frozen and is_stacked(path):
            frozen[_renamed(path, LAYERS, FROZEN_LAYERS)] = jax.tree.map(lambda stack: stack[:num_frozen], leaf)
            if num_frozen == nn.unbox(leaf).shape[0]:
                continue
            leaf = jax.tree.map(lambda stack: stack[num_frozen:], leaf)
        (frozen if any(_is_in(path, name) for name in config.freeze) else trainable)[path] = leaf
    return unflatten_dict(trainable), unflatten_dict(frozen)


def merge_frozen(trainable: Any, frozen: Any) -> Any:
    """Merges trainable and frozen parameters for `model.apply`. Frozen layers stay a separate stack, FROZEN_LAYERS."""
    return unflatten_dict({**flatten_dict(trainable), **flatten_dict(frozen)}) if frozen else trainable


def restack_frozen(trainable: Any, frozen: Any) -> Any:
    """Merges trainable and frozen parameters for the train state, with all layers in one stack."""
    flat: dict[Any, Any] = flatten_dict(merge_frozen(trainable, frozen))
    for path in [path for path in flat if FROZEN_LAYERS in path]:
        lower, stack = flat.pop(path), _renamed(path, FROZEN_LAYERS, LAYERS)
        flat[stack] = jnp.concatenate([lower, flat[stack]]) if stack in flat else lower
    return unflatten_dict(flat)


def _renamed(path: Any, old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in path)


def _is_in(path: Any, name: str) -> bool:
    return f"{'/'.join(path)}/".startswith(f"{name}/")


def trainable_shapes(params: Any, config: OptimizerConfig) -> Any:
    """Returns the shapes of the trainable parameters.

    Raises a UsageError if a frozen parameter does not exist, or no parameter is left to train.
    """
    params = nn.unbox(params)
    flat: dict[Any, Any] = flatten_dict(params)
    num_layers = max((leaf.shape[0] for path, leaf in flat.items() if is_stacked(path)), default=0)
    if config.freeze_layers > num_layers:
        raise UsageError(f"optimizer.freeze_layers={config.freeze_layers} is too large; use at most {num_layers}")
    for name in config.freeze:
        if not any(_is_in(path, name) for path in flat):
            known = sorted({"/".join(path[:2]) for path in flat})
            raise UsageError(f"unknown parameter in optimizer.freeze: {name[:60]!r}; use one of {listed(known, 12)}")
    trainable = jax.eval_shape(lambda params: split_frozen(params, config)[0], params)
    if not any(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainable)):
        raise UsageError("config.optimizer.freeze_layers and freeze leave no parameter to train; freeze fewer")
    return trainable
