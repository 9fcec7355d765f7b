"""Wrappers that run single-device attention kernels on a mesh and on any platform."""

import functools
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from bertjax.model.partitioning import divisible_spec


def shard_over_mesh(
    function: Callable[..., jax.Array],
    mesh: jax.sharding.AbstractMesh,
    sizes: Mapping[str, int],
    input_axes: Sequence[tuple[str | None, ...]],
    output_axes: tuple[str | None, ...],
) -> Callable[..., jax.Array]:
    """Returns a function that runs `function` on each device's rows and heads. Returns `function` for one device.

    Args:
      function: function from arrays to an array.
      mesh: current mesh.
      sizes: global sizes of the logical axes `batch` and `heads`. Sizes that the mesh does not divide are replicated.
      input_axes: logical axis names of each input; None for replicated axes.
      output_axes: logical axis names of the output.
    """
    if mesh.empty or mesh.size == 1:
        return function
    names = tuple(sizes)
    spec = divisible_spec(nn.logical_to_mesh_axes(names), tuple(sizes.values()), mesh.shape)
    mesh_axes = dict(zip(names, spec, strict=True))
    *in_specs, out_spec = (
        PartitionSpec(*(mesh_axes.get(name) for name in axes)) for axes in (*input_axes, output_axes)
    )
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_spec, check_vma=False)


def tpu_kernel(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that runs `function` with `interpret=False` on TPU and `interpret=True` elsewhere."""

    def run(*arrays: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            *arrays,
            tpu=functools.partial(function, interpret=False),
            default=functools.partial(function, interpret=True),
        )

    return run
