"""Selection of the attention implementation for a model and the current devices."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import jax

from bertjax.errors import UsageError, first_line
from bertjax.model.attention.xla import AttentionMask
from bertjax.model.config import AUTO, ModelConfig
from bertjax.model.dropout import DropoutSpec
from bertjax.model.partitioning import current_device, platform

# Self-attention function: maps queries, keys and values [B, L, H, K] to the context [B, L, H, K].
Attention = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask, DropoutSpec], jax.Array]


class AttentionFn(Protocol):
    """User-defined self-attention function; see `Attention`. `mesh` is `jax.sharding.get_abstract_mesh()`."""

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
    """Attention function and the cases that it supports."""

    path: str  # `package.module.function`, imported on first use, because importing Pallas takes 0.25 s
    lacks: tuple[str, ...] = ()  # unsupported options: names of config fields (and `packing`), or name=value
    max_length: int = 0  # maximum row length in tokens (0: no limit)
    platform: str = ""  # platform on which `auto` selects the function ("": all)
    chips: tuple[str, ...] = ()  # substrings of JAX's `device_kind` for which `auto` selects the function ((): all)
    runs_anywhere: bool = True  # whether the function also runs, slowly, on other platforms


_PACKAGE, _DROPOUT, _FLOAT32 = "bertjax.model.attention", "attention_probs_dropout_prob", "dtype=float32"
# `auto` tries the implementations in this order. It never selects `cudnn`, which older GPUs do not support.
_IMPLEMENTATIONS = {
    # `max_length` is set, because on some chips, the attention scores of longer rows do not fit into VMEM.
    "fused": Implementation(f"{_PACKAGE}.fused.fused_attention", max_length=512, platform="tpu"),
    "splash": Implementation(f"{_PACKAGE}.splash.splash_attention", lacks=(_DROPOUT,), platform="tpu"),
    # Products of float32 do not run on tensor cores. `chips` is set, because Pallas rejects unknown GPUs, and Triton
    # rejects GPUs before Ampere.
    "flash": Implementation(
        f"{_PACKAGE}.flash.flash_attention", lacks=(_FLOAT32,), platform="gpu", chips=("A100", "H100", "H200")
    ),
    "xla": Implementation(f"{_PACKAGE}.xla.xla_attention"),
    "cudnn": Implementation(
        f"{_PACKAGE}.xla.cudnn_attention",
        lacks=(_DROPOUT, _FLOAT32, "packing", "local_attention", "attention_direction=right"),
        platform="gpu",
        runs_anywhere=False,
    ),
}


def select_attention(config: ModelConfig, length: int, is_packed: bool = False) -> Attention:
    """Selects the attention function for rows of `length` tokens on the current devices.

    With `is_packed`, rows contain several sequences.
    """
    check_attention(config, length, is_packed)
    if config.attention == AUTO:
        implementation = next(
            each
            for each in _IMPLEMENTATIONS.values()
            if not _unsupported_options(each, config, length, is_packed)
            and each.platform in ("", platform())
            and (not each.chips or any(chip in current_device().device_kind for chip in each.chips))
        )
    elif config.attention in _IMPLEMENTATIONS:
        implementation = _IMPLEMENTATIONS[config.attention]
        if not implementation.runs_anywhere and platform() != implementation.platform:
            raise _unsupported(config, [f"platform {platform()} (only {implementation.platform})"])
    else:
        return functools.partial(_call_user_function, config.attention)
    return _import_function(implementation.path)


def check_attention(config: ModelConfig, length: int, is_packed: bool) -> None:
    """Raises a UsageError if the configured implementation is unknown or does not support the model or rows.

    This function does not access devices, because configs are checked before `jax.distributed.initialize`.
    """
    if config.attention in _IMPLEMENTATIONS:
        if options := _unsupported_options(_IMPLEMENTATIONS[config.attention], config, length, is_packed):
            raise _unsupported(config, options)
    elif config.attention != AUTO:
        _import_user_function(config.attention)


def _unsupported(config: ModelConfig, options: list[str]) -> UsageError:
    return UsageError(
        f"config.model.attention={config.attention} does not support {', '.join(options)}; use "
        "config.model.attention=auto"
    )


def _import_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _import_user_function(path: str) -> AttentionFn:
    try:
        function = _import_function(path)
        if not callable(function):
            raise TypeError(f"{type(function).__name__} is not a function")
        return function
    except Exception as error:  # A user's module may raise any exception.
        raise UsageError(
            f"config.model.attention={path} cannot be imported: {type(error).__name__}: {first_line(error)}; use one "
            f"of {', '.join((AUTO, *_IMPLEMENTATIONS))}, or package.module.function"
        ) from error


def _call_user_function(
    path: str, query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, drop: DropoutSpec
) -> jax.Array:
    """Calls an `AttentionFn` and checks the shape and dtype of its result."""
    function, mesh = _import_user_function(path), jax.sharding.get_abstract_mesh()
    context = function(query, key, value, mask, dropout_rate=drop.rate, dropout_key=drop.key, mesh=mesh)
    is_array = isinstance(context, jax.Array)
    if not is_array or (context.shape, context.dtype) != (query.shape, query.dtype):
        returned, expected = jax.typeof(context) if is_array else type(context).__name__, jax.typeof(query)
        raise UsageError(f"config.model.attention={path} returns {returned}; it must return {expected}")
    return context


def _unsupported_options(
    implementation: Implementation, config: ModelConfig, length: int, is_packed: bool
) -> list[str]:
    """Describes the properties of the model and the rows that an implementation does not support."""
    used = {name: value for name, value in (vars(config) | {"packing": is_packed}).items() if value}
    lacks = {*implementation.lacks}
    options = [f"{name}={value}" for name, value in used.items() if {name, f"{name}={value}"} & lacks]
    if 0 < implementation.max_length < length:
        options.append(f"rows of {length} tokens (maximum: {implementation.max_length})")
    return options
