"""Selection of the attention implementation for a model and the current devices."""

import dataclasses
import functools
import importlib
from typing import Any, Protocol

import jax

from bertjax.errors import UsageError, first_line
from bertjax.model.attention.xla import AttentionMask
from bertjax.model.config import AUTO, DIRECTIONS, ModelConfig
from bertjax.model.partitioning import current_device, platform


class AttentionFn(Protocol):
    """Self-attention function: maps `query`, `key` and `value` [B, L, H, K] to the context [B, L, H, K].

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


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Attention function and the cases that it supports.

    Attributes:
      path: `package.module.function`. It is imported on first use, because importing Pallas takes 0.25 s.
      directions: supported mask directions.
      dropout: whether the function supports dropout of the attention probabilities.
      packed_rows: whether the function supports packed rows.
      local: whether the function supports local attention (`AttentionMask.window`).
      max_length: maximum row length in tokens (default: 0, no limit).
      dtype: the only supported compute dtype (default: "", all).
      platform: platform on which `auto` selects the function (default: "", all).
      chips: substrings of JAX's `device_kind` for which `auto` selects the function (default: (), all chips).
      runs_anywhere: whether the function also runs, slowly, on other platforms.
    """

    path: str
    directions: tuple[str, ...] = DIRECTIONS
    dropout: bool = True
    packed_rows: bool = True
    local: bool = True
    max_length: int = 0
    dtype: str = ""
    platform: str = ""
    chips: tuple[str, ...] = ()
    runs_anywhere: bool = True


_PACKAGE = "bertjax.model.attention"
_IMPLEMENTATIONS = {
    "xla": Implementation(f"{_PACKAGE}.xla.xla_attention"),
    # `max_length` is set, because on some chips, the attention scores of longer rows do not fit into VMEM.
    "fused": Implementation(f"{_PACKAGE}.fused.fused_attention", max_length=512, platform="tpu"),
    "splash": Implementation(f"{_PACKAGE}.splash.splash_attention", dropout=False, platform="tpu"),
    # `dtype` is set, because float32 products do not run on tensor cores. `chips` is set, because Pallas rejects
    # unknown GPUs, and Triton rejects GPUs before Ampere.
    "flash": Implementation(
        f"{_PACKAGE}.flash.flash_attention", dtype="bfloat16", platform="gpu", chips=("A100", "H100", "H200")
    ),
    "cudnn": Implementation(
        f"{_PACKAGE}.xla.cudnn_attention",
        directions=("both", "left"),
        dropout=False,
        packed_rows=False,
        local=False,
        dtype="bfloat16",
        platform="gpu",
        runs_anywhere=False,
    ),
}
# Order in which `auto` tries the implementations. It never selects `cudnn`, which older GPUs do not support.
_AUTO_ORDER = ("fused", "splash", "flash", "xla")


def select_attention(config: ModelConfig, length: int, is_packed: bool = False) -> AttentionFn:
    """Selects the attention function for rows of `length` tokens on the current devices.

    With `is_packed`, rows contain several sequences.
    """
    check_attention(config, length, is_packed)
    if config.attention == AUTO:
        implementation = next(
            each
            for each in (_IMPLEMENTATIONS[name] for name in _AUTO_ORDER)
            if not _unsupported_case(each, config, length, is_packed)
            and each.platform in ("", platform())
            and (not each.chips or any(chip in current_device().device_kind for chip in each.chips))
        )
    elif config.attention in _IMPLEMENTATIONS:
        implementation = _IMPLEMENTATIONS[config.attention]
        if not implementation.runs_anywhere and platform() != implementation.platform:
            raise _unsupported(config, f"platform {platform()} (only {implementation.platform})")
    else:
        return functools.partial(_call_user_function, config.attention)
    return _import_function(implementation.path)


def check_attention(config: ModelConfig, length: int, is_packed: bool) -> None:
    """Raises a UsageError if the configured implementation is unknown or does not support the model or rows.

    This function does not access devices, because configs are checked before `jax.distributed.initialize`.
    """
    if config.attention in _IMPLEMENTATIONS:
        if case := _unsupported_case(_IMPLEMENTATIONS[config.attention], config, length, is_packed):
            raise _unsupported(config, case)
    elif config.attention != AUTO:
        _import_user_function(config.attention)


def _unsupported(config: ModelConfig, case: str) -> UsageError:
    return UsageError(
        f"config.model.attention={config.attention} does not support {case}; use config.model.attention=auto"
    )


def _import_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _import_user_function(path: str) -> Any:
    known = f"use one of {', '.join((AUTO, *_IMPLEMENTATIONS))}, or package.module.function"
    if "." not in path.strip("."):
        raise UsageError(f"unknown attention: config.model.attention={path!r}; {known}")
    try:
        function = _import_function(path)
    except Exception as error:  # A user's module may raise any exception.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"config.model.attention={path} cannot be imported: {reason}; {known}") from error
    if not callable(function):
        raise UsageError(f"config.model.attention={path} is not a function: {type(function).__name__}; {known}")
    return function


def _call_user_function(path: str, query: jax.Array, *arrays: Any, **options: Any) -> jax.Array:
    """Calls a user's function and checks the shape and dtype of its result."""
    context = _import_user_function(path)(query, *arrays, **options)
    is_array = isinstance(context, jax.Array)
    if not is_array or (context.shape, context.dtype) != (query.shape, query.dtype):
        returned, expected = jax.typeof(context) if is_array else type(context).__name__, jax.typeof(query)
        raise UsageError(f"config.model.attention={path} returns {returned}; it must return {expected}")
    return context


def _unsupported_case(implementation: Implementation, config: ModelConfig, length: int, is_packed: bool) -> str:
    """Describes the first unsupported property of the model or the rows. Returns "" if all are supported."""
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
    # Accept `auto`, because only GPU kernels restrict the dtype, and `auto` is bfloat16 on GPU.
    if implementation.dtype and config.dtype not in (AUTO, implementation.dtype):
        return f"dtype={config.dtype} (only {implementation.dtype})"
    return ""
