"""Which implementation of attention a model is computed with; nothing else chooses one."""

import dataclasses
import functools
import importlib
from typing import Any, Protocol

import jax

from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.model import partitioning as placement
from bertjax.model.attention.mask import DIRECTIONS, AttentionMask
from bertjax.model.attention.xla import plain_attention
from bertjax.model.config import ModelConfig


class AttentionFn(Protocol):
    """Self-attention: `query, key, value` [B, L, H, K] to [B, L, H, K], under the mesh that the step is traced for."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask,
        *,
        dropout_rate: float,
        dropout_key: jax.Array | None,
        mesh: jax.sharding.AbstractMesh,
    ) -> jax.Array: ...


def _called(path: str, *arrays: jax.Array, **options: Any) -> jax.Array:
    # Imported where it is used: kernels take a quarter of a second.
    return _imported(path)(*arrays, **options)


def _imported(path: str) -> Any:
    """What `package.module.function` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function, and what it can compute.

    Attributes:
      function: the attention.
      directions: of the masks it takes.
      dropout: whether it takes a dropout rate above 0.
      several_sequences: whether a row may hold more than one.
      longest_row: tokens of a row at most; 0 is any number.
      row_multiple: of which the tokens of a row are one.
      dtypes: of the computation; () are all.
      made_for: platforms that it is fast on; on others `auto` does not take it. () are all.
      anywhere: it runs, slowly, on other platforms too.
    """

    function: AttentionFn
    directions: tuple[str, ...]
    dropout: bool
    several_sequences: bool
    longest_row: int = 0
    row_multiple: int = 1
    dtypes: tuple[str, ...] = ()
    made_for: tuple[str, ...] = ()
    anywhere: bool = True


_IMPLEMENTATIONS = {
    "plain": Implementation(plain_attention, DIRECTIONS, dropout=True, several_sequences=True),
    "fused": Implementation(
        functools.partial(_called, "bertjax.model.attention.fused.fused_attention"),
        DIRECTIONS,
        dropout=True,
        several_sequences=True,
        # A program's scores of a row fit into the near memory of every chip.
        longest_row=512,
        made_for=("tpu",),
    ),
    "splash": Implementation(
        functools.partial(_called, "bertjax.model.attention.splash.splash_attention"),
        DIRECTIONS,
        dropout=False,
        several_sequences=True,
        row_multiple=128,
        made_for=("tpu",),
    ),
    "cudnn": Implementation(
        functools.partial(_called, "bertjax.model.attention.cudnn.cudnn_attention"),
        ("both", "left"),
        dropout=False,
        several_sequences=False,
        dtypes=("bfloat16",),
        made_for=("gpu",),
        anywhere=False,
    ),
}
# `auto` takes the first that can. Not cuDNN's, which nobody has timed against XLA's here.
_BY_SPEED = ("fused", "splash", "plain")


def resolve(config: ModelConfig, length: int, several_sequences: bool = False) -> AttentionFn:
    """The implementation for a model, on the devices at hand.

    Args:
      config: its architecture and layout.
      length: tokens a row.
      several_sequences: rows hold more than one.

    Raises:
      UsageError: as `check`; or the one that the layout names does not run on these devices.
    """
    platform = placement.platform()
    if config.attention != "auto":
        implementation = check(config, length, several_sequences)
        if not implementation.anywhere and platform not in implementation.made_for:
            needed = " or ".join(implementation.made_for)
            raise _refused(config, f"devices that are {platform}; they are to be {needed}")
        return implementation.function
    able = [
        implementation
        for implementation in map(_IMPLEMENTATIONS.__getitem__, _BY_SPEED)
        if not _lacking(implementation, config, length, several_sequences)
        and (not implementation.made_for or platform in implementation.made_for)
    ]
    return able[0].function


def check(config: ModelConfig, length: int, several_sequences: bool = False) -> Implementation | None:
    """The implementation that a layout names, None if it leaves the choice; asks nothing of any device.

    Several processes must have found each other before the first of them does.

    Raises:
      UsageError: it cannot compute what the architecture or training asks for, or is not to be found.
    """
    if config.attention == "auto":
        return None
    implementation = _IMPLEMENTATIONS.get(config.attention) or _given(config.attention)
    if lacking := _lacking(implementation, config, length, several_sequences):
        raise _refused(config, lacking)
    return implementation


def _refused(config: ModelConfig, what: str) -> UsageError:
    return UsageError(f"config.model.attention={config.attention} takes no {what}; `auto` takes what can")


def _given(path: str) -> Implementation:
    """A user's own `package.module.function`, which computes all that it is asked for, or says that it does not."""
    known = f"known: {', '.join(('auto', *_IMPLEMENTATIONS))}, and package.module.function of your own"
    if "." not in path.strip("."):
        raise UsageError(f"config.model.attention is {path!r}; {known}")
    try:
        function = _imported(path)
    # Whatever the user's own module raises.
    except Exception as error:
        failed = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"config.model.attention={path} cannot be imported: {failed}; {known}") from error
    if not callable(function):
        raise UsageError(f"config.model.attention={path} is no function, but {type(function).__name__}; {known}")
    return Implementation(functools.partial(_of_user, path, function), DIRECTIONS, dropout=True, several_sequences=True)


def _of_user(path: str, function: AttentionFn, query: jax.Array, *arrays: Any, **options: Any) -> jax.Array:
    """What a user's own function returns.

    Raises:
      UsageError: the function fails, or returns something else than it must.
    """
    try:
        context = function(query, *arrays, **options)
    except BertjaxError:
        raise
    # Whatever is wrong in the user's own code.
    except Exception as error:
        raise UsageError(
            f"config.model.attention={path} fails: {type(error).__name__}: {first_line(error)}; --log_level=debug prints the traceback"
        ) from error
    is_array = isinstance(context, jax.Array)
    if not is_array or (context.shape, context.dtype) != (query.shape, query.dtype):
        returned, wanted = jax.typeof(context) if is_array else type(context).__name__, jax.typeof(query)
        raise UsageError(f"config.model.attention={path} returns {returned}, and is to return {wanted}")
    return context


def _lacking(implementation: Implementation, config: ModelConfig, length: int, several_sequences: bool) -> str:
    """What an implementation cannot do of what is asked for; "" where it can do all."""
    if config.attention_direction not in implementation.directions:
        return f"attention_direction={config.attention_direction}"
    if config.attention_probs_dropout_prob and not implementation.dropout:
        return f"attention_probs_dropout_prob={config.attention_probs_dropout_prob}"
    if several_sequences and not implementation.several_sequences:
        return "several sequences a row"
    if implementation.longest_row and length > implementation.longest_row:
        return f"rows of {length} tokens, {implementation.longest_row} at most"
    if length % implementation.row_multiple:
        return f"rows of {length} tokens, only multiples of {implementation.row_multiple}"
    if implementation.dtypes and config.dtype not in implementation.dtypes:
        return f"dtype={config.dtype}, only {', '.join(implementation.dtypes)}"
    return ""
