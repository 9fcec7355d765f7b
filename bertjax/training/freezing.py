"""Frozen parameters, which have no gradient, update or optimizer state."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.errors import UsageError, listed
from bertjax.model.layers import FROZEN_LAYERS, LAYERS, is_stacked


@dataclasses.dataclass(frozen=True)
class Freezing:
    """Selection of frozen parameters, by layer and by name.

    Arrays with LAYERS in their path contain all layers on a leading axis, lowest layer first. Freezing some layers
    splits these arrays. `optax.multi_transform` and `optax.set_to_zero` cannot do this: they mask entire arrays, so
    frozen layers would still have gradients and moments.

    Attributes:
      layers: number of frozen encoder layers, counted from the lowest.
      names: paths of frozen parameters or modules, such as `encoder/embeddings`.
    """

    layers: int = 0
    names: tuple[str, ...] = ()

    def split(self, params: Any) -> tuple[Any, Any]:
        """Returns the trainable and the frozen parameters.

        The frozen layers are separate arrays, with FROZEN_LAYERS instead of LAYERS in their path, so that the backward
        pass stops above them.
        """
        trainable, frozen = {}, {}
        for path, leaf in flatten_dict(params).items():
            is_named = any(tuple(path)[: name.count("/") + 1] == tuple(name.split("/")) for name in self.names)
            if self.layers and is_stacked(path):
                frozen[_renamed(path, LAYERS, FROZEN_LAYERS)] = jax.tree.map(lambda stack: stack[: self.layers], leaf)
                if self.layers == nn.unbox(leaf).shape[0]:
                    continue
                leaf = jax.tree.map(lambda stack: stack[self.layers :], leaf)
            (frozen if is_named else trainable)[path] = leaf
        return unflatten_dict(trainable), unflatten_dict(frozen)

    @staticmethod
    def model_params(trainable: Any, frozen: Any) -> Any:
        """Merges trainable and frozen parameters for `model.apply`, with frozen layers in a separate stack."""
        return unflatten_dict({**flatten_dict(trainable), **flatten_dict(frozen)}) if frozen else trainable

    def state_params(self, trainable: Any, frozen: Any) -> Any:
        """Merges trainable and frozen parameters for the train state, with one stack of layers. Inverts `split`."""
        params: dict[Any, Any] = flatten_dict(self.model_params(trainable, frozen))
        for path in [path for path in params if FROZEN_LAYERS in path]:
            lower, stack = params.pop(path), _renamed(path, FROZEN_LAYERS, LAYERS)
            params[stack] = jnp.concatenate([lower, params[stack]]) if stack in params else lower
        return unflatten_dict(params)


def _renamed(path: Any, old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in path)


def check_freezing(params: Any, freezing: Freezing) -> None:
    """Raises a UsageError if a frozen parameter does not exist, or no parameter is left to train."""
    flat: dict[Any, Any] = flatten_dict(nn.unbox(params))
    num_layers = max((leaf.shape[0] for path, leaf in flat.items() if is_stacked(path)), default=0)
    if freezing.layers > num_layers:
        raise UsageError(f"config.optimizer.freeze_layers={freezing.layers} is too large; use at most {num_layers}")
    for name in freezing.names:
        if not Freezing(names=(name,)).split(params)[1]:
            known = sorted({"/".join(path[:2]) for path in flat})
            raise UsageError(f"unknown parameter in optimizer.freeze: {name[:60]!r}; use one of {listed(known, 12)}")
    if not count_trainable(params, freezing):
        raise UsageError("config.optimizer.freeze_layers and freeze leave no parameter to train; freeze fewer")


def count_trainable(params: Any, freezing: Freezing) -> int:
    """Returns the number of trainable parameters."""
    trained = jax.eval_shape(lambda params: freezing.split(params)[0], nn.unbox(params))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))
