"""Sharding of activations by logical axis names, and wrappers that run kernels on each device of the current mesh.

Without a mesh, or on one device, constraints have no effect. The logical axis names (`ACTIVATION_RULES` in
`training/sharding.py`) are as follows, with the axis letters of `encoder.py`:

    batch              B, sharded over the mesh axes `data` and `fsdp`
    batch_over_data    B, sharded over `data` only
    embed              D, not sharded
    embed_over_fsdp    D, or E of the token table, sharded over `fsdp`
    length             L, not sharded
    heads, mlp, vocab  H, F and V, sharded over `tensor` (`vocab_part`: V, sharded over `tensor` and `fsdp`)

Parameters are stored with other rules (`RULES` of the same file), which shard `embed` over `fsdp`, and `vocab` over
`tensor`. A constraint on a parameter all-gathers it over `fsdp`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from bertjax.model.config import ModelConfig

ACTIVATION_AXES = ("batch", "length", "embed")


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: the platform of the current mesh, or of this machine if no mesh is set.

    The mesh may describe devices that this machine lacks, as in `bertjax plan`.
    """
    return current_device().platform


def current_device() -> Any:
    """Returns an abstract device of the current mesh or, if no mesh is set, a device of this machine."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.devices()[0]


def resolve_auto(config: ModelConfig) -> ModelConfig:
    """Replaces `auto` in `dtype` and `scan_layers` with the value for the current platform."""
    return config.resolve(platform())


def scans_layers(config: ModelConfig) -> bool:
    """Returns whether layers run in a `lax.scan`, where `jax.checkpoint` does not need `prevent_cse`."""
    return resolve_auto(config).scan_layers == "true"


def with_logical_constraint(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Constrains an array's sharding by logical axis names. Axes not divisible by their mesh axes are replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, divisible_spec(nn.logical_to_mesh_axes(axes), x.shape, mesh.shape))


def divisible_spec(spec: PartitionSpec | None, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """Removes mesh axes from a spec if their size does not divide the array axis, so that any model runs on any mesh.

    Trailing axes of `spec` may be missing; None replicates the array. `axis_sizes` are sizes of mesh axes by name.
    """
    axes = list(spec or ())
    axes += [None] * (len(shape) - len(axes))
    for i, axis in enumerate(axes):
        names = (axis,) if isinstance(axis, str) else axis or ()
        if shape[i] % math.prod(axis_sizes[name] for name in names):
            axes[i] = None
    return PartitionSpec(*axes)


def shard_over_mesh(
    function: Callable[..., jax.Array],
    rows: int,
    heads: int,
    input_axes: Sequence[tuple[str | None, ...]],
    output_axes: tuple[str | None, ...],
) -> Callable[..., jax.Array]:
    """Wraps a function in `jax.shard_map`, to run on each device's rows and heads. On one device, returns it unchanged.

    Args:
      function: function from arrays to an array.
      rows, heads: global sizes of the logical axes `batch` and `heads`. Axes not divisible by mesh axes are replicated.
      input_axes: logical axis names of each input; None for replicated axes.
      output_axes: logical axis names of the output.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    names = ("batch", "heads")
    spec = divisible_spec(nn.logical_to_mesh_axes(names), (rows, heads), mesh.shape)
    mesh_axes: dict[str | None, Any] = dict(zip(names, spec, strict=True))
    *in_specs, out_spec = (
        PartitionSpec(*(mesh_axes.get(name) for name in axes)) for axes in (*input_axes, output_axes)
    )
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_spec, check_vma=False)


def platform_kernel(platform: str, make_kernel: Callable[..., Callable]) -> Callable[..., Any]:
    """Returns a kernel that is compiled on `platform` (`tpu` or `cuda`), and runs in interpret mode elsewhere."""
    kernels = {"default": make_kernel(interpret=True), platform: make_kernel(interpret=False)}
    return functools.partial(jax.lax.platform_dependent, **kernels)
