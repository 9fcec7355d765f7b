"""Frozen parameters, by layer and by name. They have no gradient, update or optimizer state.

Arrays with LAYERS in their path are stacks: they contain all layers on a leading axis, lowest layer first. Freezing
some layers splits each stack. `optax.multi_transform` and `optax.set_to_zero` cannot do this: they mask entire arrays,
so frozen layers would still have gradients and moments.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.errors import UsageError, listed
from bertjax.model.layer_stack import FROZEN_LAYERS, LAYERS


class Frozen(NamedTuple):
    """Selection of the parameters that are not trained.

    Attributes:
      layers: number of frozen encoder layers, counted from the lowest.
      names: paths of frozen parameters or modules, such as `encoder/embeddings`.
    """

    layers: int = 0
    names: tuple[str, ...] = ()

    def matches(self, path: Sequence[str]) -> bool:
        """Returns True if a parameter, or a module that contains it, is frozen by name."""
        return any(tuple(path)[: name.count("/") + 1] == tuple(name.split("/")) for name in self.names)

    def select(self, params: Any) -> Any:
        """Returns the trainable parameters. Stacks are cut to the layers that are not frozen."""
        trained = {}
        for path, leaf in flatten_dict(params).items():
            if self.matches(path):
                continue
            if self.layers and is_stacked(path):
                if nn.unbox(leaf).shape[0] == self.layers:
                    continue
                leaf = jax.tree.map(lambda stack: stack[self.layers :], leaf)
            trained[path] = leaf
        return unflatten_dict(trained)

    def model_params(self, params: Any, trained: Any) -> Any:
        """Returns the parameters for a forward pass: trainable ones from `trained`, and frozen ones from `params`.

        Frozen layers form a separate stack without gradients.
        """
        if self == Frozen():
            return trained
        new, merged = flatten_dict(trained), {}
        for path, leaf in flatten_dict(params).items():
            if self.layers and is_stacked(path):
                merged[tuple(FROZEN_LAYERS if name == LAYERS else name for name in path)] = leaf[: self.layers]
                if self.layers < leaf.shape[0]:
                    merged[path] = new[path] if path in new else leaf[self.layers :]
            else:
                merged[path] = new.get(path, leaf)
        return unflatten_dict(merged)

    def write_back(self, params: Any, trained: Any) -> Any:
        """Returns `params` with trainable parameters replaced by `trained`. Frozen parameters are bitwise unchanged."""
        if self == Frozen():
            return trained
        updated = flatten_dict(params)
        for path, value in flatten_dict(trained).items():
            is_cut = self.layers and is_stacked(path)
            updated[path] = updated[path].at[self.layers :].set(value) if is_cut else value
        return unflatten_dict(updated)


def is_stacked(path: Sequence[str]) -> bool:
    """Returns True if a parameter is a stack of all layers."""
    return LAYERS in path


def check_frozen(params: Any, frozen: Frozen) -> None:
    """Raises a UsageError if a frozen parameter does not exist, or no parameter is left to train.

    Args:
      params: arrays or shapes, boxed or not.
      frozen: parameters to freeze.
    """
    flat = flatten_dict(nn.unbox(params))
    num_layers = max((leaf.shape[0] for path, leaf in flat.items() if is_stacked(path)), default=0)
    if frozen.layers > num_layers:
        raise UsageError(f"optimizer.freeze_layers={frozen.layers} is too large; the model has {num_layers} layers")
    for name in frozen.names:
        if not any(Frozen(names=(name,)).matches(path) for path in flat):
            known = sorted({"/".join(path[:2]) for path in flat})
            raise UsageError(f"unknown parameter in optimizer.freeze: {name[:60]!r}; use one of {listed(known, 12)}")
    if not count_trainable(params, frozen):
        raise UsageError("optimizer.freeze_layers and optimizer.freeze leave no parameter to train; freeze fewer")


def count_trainable(params: Any, frozen: Frozen) -> int:
    """Returns the number of trainable parameters."""
    trained = jax.eval_shape(lambda params: frozen.select(params), nn.unbox(params))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))
