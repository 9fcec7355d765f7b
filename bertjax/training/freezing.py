"""Which parameters a run trains: by layer and by name. The others get no gradient, no update and no optimizer state.

Parameters with LAYERS in their path hold all layers, stacked on a leading axis, the lowest first.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.errors import UsageError
from bertjax.model.layer_stack import FROZEN_LAYERS, LAYERS

_SHOWN_NAMES = 12


class Frozen(NamedTuple):
    """What is not trained.

    Attributes:
      layers: so many of the lowest ones.
      names: paths of parameters, or of modules with all that is in them, such as `encoder/embeddings`.
    """

    layers: int = 0
    names: tuple[str, ...] = ()

    def has(self, path: Sequence[str]) -> bool:
        """Whether a parameter is frozen by its name."""
        return any(tuple(path)[: name.count("/") + 1] == tuple(name.split("/")) for name in self.names)


def is_stacked(path: Sequence[str]) -> bool:
    """Whether a parameter holds all layers."""
    return LAYERS in path


def trainable(params: Any, frozen: Frozen) -> Any:
    """The parameters that are trained, boxed or not: of a stack the upper layers, of the others those not frozen."""
    found = {}
    for path, leaf in flatten_dict(params).items():
        if frozen.has(path):
            continue
        if frozen.layers and is_stacked(path):
            if nn.unbox(leaf).shape[0] == frozen.layers:
                continue
            leaf = jax.tree.map(lambda stack: stack[frozen.layers :], leaf)
        found[path] = leaf
    return unflatten_dict(found)


def with_trained(params: Any, trained: Any, frozen: Frozen) -> Any:
    """All parameters as the model takes them: those of `trainable` from `trained`, the others from `params`.

    The frozen layers are a stack of their own, through which nothing is differentiated.
    """
    if frozen == Frozen():
        return trained
    new, whole = flatten_dict(trained), {}
    for path, leaf in flatten_dict(params).items():
        if frozen.layers and is_stacked(path):
            whole[tuple(FROZEN_LAYERS if name == LAYERS else name for name in path)] = leaf[: frozen.layers]
            if frozen.layers < leaf.shape[0]:
                whole[path] = new[path] if path in new else leaf[frozen.layers :]
        else:
            whole[path] = new.get(path, leaf)
    return unflatten_dict(whole)


def updated(params: Any, trained: Any, frozen: Frozen) -> Any:
    """`params` with those of `trainable` from `trained`; the others are the same bits."""
    if frozen == Frozen():
        return trained
    new, whole = flatten_dict(trained), flatten_dict(params)
    for path, value in new.items():
        partly = frozen.layers and is_stacked(path)
        whole[path] = whole[path].at[frozen.layers :].set(value) if partly else value
    return unflatten_dict(whole)


def check_frozen(params: Any, frozen: Frozen) -> None:
    """Refuses to freeze what is not there, or all there is.

    Args:
      params: arrays or shapes, boxed or not.

    Raises:
      UsageError: names the field and its value.
    """
    flat = flatten_dict(nn.unbox(params))
    layers = max((leaf.shape[0] for path, leaf in flat.items() if is_stacked(path)), default=0)
    if frozen.layers > layers:
        raise UsageError(f"optimizer.freeze_layers is {frozen.layers}; the model has {layers} layers")
    for name in frozen.names:
        if not any(Frozen(names=(name,)).has(path) for path in flat):
            known = sorted({"/".join(path[:2]) for path in flat})
            more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
            raise UsageError(
                f"optimizer.freeze names {name[:60]!r}, and no parameter is called so; there are "
                f"{', '.join(known[:_SHOWN_NAMES])}{more}, and what is in them"
            )
    if not trainable_count(params, frozen):
        raise UsageError("optimizer.freeze_layers and optimizer.freeze leave no parameter to be trained")


def trainable_count(params: Any, frozen: Frozen) -> int:
    """How many numbers are trained."""
    trained = jax.eval_shape(lambda params: trainable(params, frozen), nn.unbox(params))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))
