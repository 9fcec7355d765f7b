"""A kernel knows one device, and one kind of it: on a mesh, each computes its own rows and heads."""

import functools
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from bertjax.model.partitioning import fitting


def on_each_device(
    function: Callable[..., jax.Array],
    mesh: jax.sharding.AbstractMesh,
    sizes: Mapping[str, int],
    inputs: Sequence[tuple[str | None, ...]],
    output: tuple[str | None, ...],
) -> Callable[..., jax.Array]:
    """The function on a device's part of every array; the function itself where there is one device.

    Args:
      function: of arrays to an array.
      mesh: in force.
      sizes: of the whole arrays along `batch` and `heads`; an axis that the mesh does not divide stays whole.
      inputs: logical names of the axes of each array; those that are neither are None.
      output: the same of what comes out.
    """
    if mesh.empty or mesh.size == 1:
        return function
    names = tuple(sizes)
    axes = dict(zip(names, fitting(nn.logical_to_mesh_axes(names), tuple(sizes.values()), mesh.shape), strict=True))
    *of_inputs, of_output = (PartitionSpec(*(axes.get(name) for name in each)) for each in (*inputs, output))
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(of_inputs), out_specs=of_output, check_vma=False)


def tpu_kernel(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function of arrays and `interpret`, interpreted as JAX operations wherever there is no TPU."""

    def of_device(*arrays: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            *arrays,
            tpu=functools.partial(function, interpret=False),
            default=functools.partial(function, interpret=True),
        )

    return of_device
