"""Selection of the attention implementation for a model and the current devices."""

import dataclasses
import functools
import importlib
from typing import Any, Protocol

import jax

from bertjax.errors import UsageError, first_line
from bertjax.model.attention.xla import AttentionMask, cudnn_attention, xla_attention
from bertjax.model.config import AUTO, DIRECTIONS, ModelConfig
from bertjax.model.partitioning import current_device, platform


class AttentionFn(Protocol):
    """Function from `query`, `key` and `value` [B, L, H, K] to the context [B, L, H, K] of self-attention.

    `mesh` is the current mesh, from `jax.sharding.get_abstract_mesh`.
    """

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


def _call_by_path(path: str, *arrays: jax.Array, **options: Any) -> jax.Array:
    # Import on first use, because importing Pallas takes a quarter of a second.
    return _import_function(path)(*arrays, **options)


def _import_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Attention function and the cases that it supports.

    Attributes:
      function: the attention function.
      directions: supported mask directions.
      dropout: whether the function supports dropout of the attention probabilities.
      packed_rows: whether the function supports packed rows.
      local: whether the function supports a window of `AttentionMask` (default: True).
      max_length: maximum row length in tokens (default: 0, no limit).
      dtypes: supported compute dtypes (default: (), all).
      platforms: platforms on which `auto` selects the function (default: (), all).
      chips: chips on which `auto` selects the function, as parts of JAX's device kind (default: (), all).
      runs_anywhere: whether the function also runs, slowly, on other platforms (default: True).
    """

    function: AttentionFn
    directions: tuple[str, ...]
    dropout: bool
    packed_rows: bool
    local: bool = True
    max_length: int = 0
    dtypes: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    runs_anywhere: bool = True


_IMPLEMENTATIONS = {
    "xla": Implementation(xla_attention, DIRECTIONS, dropout=True, packed_rows=True),
    "fused": Implementation(
        functools.partial(_call_by_path, "bertjax.model.attention.fused.fused_attention"),
        DIRECTIONS,
        dropout=True,
        packed_rows=True,
        # On some chips, the attention scores of longer rows do not fit into VMEM.
        max_length=512,
        platforms=("tpu",),
    ),
    "splash": Implementation(
        functools.partial(_call_by_path, "bertjax.model.attention.splash.splash_attention"),
        DIRECTIONS,
        dropout=False,
        packed_rows=True,
        platforms=("tpu",),
    ),
    "flash": Implementation(
        functools.partial(_call_by_path, "bertjax.model.attention.flash.flash_attention"),
        DIRECTIONS,
        dropout=True,
        packed_rows=True,
        # Its float32 products do not run on tensor cores.
        dtypes=("bfloat16",),
        platforms=("gpu",),
        # Pallas rejects unknown GPUs, and Triton rejects GPUs before Ampere.
        chips=("A100", "H100", "H200"),
    ),
    "cudnn": Implementation(
        cudnn_attention,
        ("both", "left"),
        dropout=False,
        packed_rows=False,
        local=False,
        dtypes=("bfloat16",),
        platforms=("gpu",),
        runs_anywhere=False,
    ),
}
# Order in which `auto` tries the implementations. cuDNN is missing, because older GPUs do not support it.
_AUTO_ORDER = ("fused", "splash", "flash", "xla")


def select_attention(config: ModelConfig, length: int, is_packed: bool = False) -> AttentionFn:
    """Selects the attention function for rows of `length` tokens on the current devices.

    With `is_packed`, rows contain several sequences.
    """
    platform_name = platform()
    if implementation := check_attention(config, length, is_packed):
        if not implementation.runs_anywhere and platform_name not in implementation.platforms:
            supported = " or ".join(implementation.platforms)
            raise _unsupported(config, f"platform {platform_name} (only {supported})")
        return implementation.function
    candidates = (_IMPLEMENTATIONS[name] for name in _AUTO_ORDER)
    return next(
        implementation.function
        for implementation in candidates
        if not _unsupported_case(implementation, config, length, is_packed)
        and (not implementation.platforms or platform_name in implementation.platforms)
        and (not implementation.chips or any(chip in current_device().device_kind for chip in implementation.chips))
    )


def check_attention(config: ModelConfig, length: int, is_packed: bool = False) -> Implementation | None:
    """Checks and returns the configured implementation. Returns None for `auto`.

    This function does not access devices, because configs are checked before `jax.distributed.initialize`.
    """
    if config.attention == AUTO:
        return None
    implementation = _IMPLEMENTATIONS.get(config.attention) or _user_implementation(config.attention)
    if case := _unsupported_case(implementation, config, length, is_packed):
        raise _unsupported(config, case)
    return implementation


def _unsupported(config: ModelConfig, case: str) -> UsageError:
    return UsageError(
        f"config.model.attention={config.attention} does not support {case}; use config.model.attention=auto"
    )


def _user_implementation(path: str) -> Implementation:
    """Imports a user's `package.module.function`."""
    known = f"use one of {', '.join((AUTO, *_IMPLEMENTATIONS))}, or package.module.function"
    if "." not in path.strip("."):
        raise UsageError(f"config.model.attention is {path!r}; {known}")
    try:
        function = _import_function(path)
    except Exception as error:  # A user's module may raise any exception.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"config.model.attention={path} cannot be imported: {reason}; {known}") from error
    if not callable(function):
        raise UsageError(f"config.model.attention={path} is not a function: {type(function).__name__}; {known}")
    return Implementation(
        functools.partial(_call_user_function, path, function), DIRECTIONS, dropout=True, packed_rows=True
    )


def _call_user_function(path: str, function: AttentionFn, query: jax.Array, *arrays: Any, **options: Any) -> jax.Array:
    """Calls a user's function and checks the shape and dtype of its result."""
    context = function(query, *arrays, **options)
    is_array = isinstance(context, jax.Array)
    if not is_array or (context.shape, context.dtype) != (query.shape, query.dtype):
        returned, expected = jax.typeof(context) if is_array else type(context).__name__, jax.typeof(query)
        raise UsageError(f"config.model.attention={path} returns {returned}; it must return {expected}")
    return context


def _unsupported_case(implementation: Implementation, config: ModelConfig, length: int, is_packed: bool) -> str:
    """Returns a description of the first unsupported property of the model or rows, or "" if all are supported."""
    if config.attention_direction not in implementation.directions:
        return f"attention_direction={config.attention_direction}"
    if config.attention_probs_dropout_prob and not implementation.dropout:
        return f"attention_probs_dropout_prob={config.attention_probs_dropout_prob}"
    if config.local_attention and not implementation.local:
        return f"local_attention={config.local_attention}"
    if is_packed and not implementation.packed_rows:
        return "packed rows"
    if implementation.max_length and length > implementation.max_length:
        return f"rows of {length} tokens (maximum: {implementation.max_length})"
    # Only kernels for GPUs restrict dtypes. They support dtype `auto`, which is bfloat16 on GPU.
    if implementation.dtypes and config.dtype not in (AUTO, *implementation.dtypes):
        return f"dtype={config.dtype} (only {', '.join(implementation.dtypes)})"
    return ""
