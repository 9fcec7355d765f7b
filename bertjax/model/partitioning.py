"""Where arrays lie while a model is computed: logical axis names to the mesh that is in force.

The rules stand in `training/sharding.py`. Without a mesh, or on one device, nothing here does anything.
"""

import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: of the mesh in force, whose devices may be elsewhere; without one, of this machine."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.platform if device else jax.default_backend()


def device_kind() -> str:
    """Such as `TPU v3`, of the same devices."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device else jax.devices()[0].device_kind


def placed(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """The same array, cut over the mesh as the logical names of its axes say; what does not divide stays whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(nn.logical_to_mesh_axes(axes), x.shape, mesh.shape))


def fitting(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The spec, with those axes whole that the mesh axes of theirs do not divide, so that any model runs on any mesh.

    Args:
      spec: mesh axes of each array axis; those it does not reach are whole.
      shape: of the array.
      sizes: of the mesh axes.
    """
    axes = list(spec) + [None] * (len(shape) - len(spec))
    for i, axis in enumerate(axes):
        names = (axis,) if isinstance(axis, str) else axis or ()
        if shape[i] % math.prod(sizes[name] for name in names):
            axes[i] = None
    return PartitionSpec(*axes)
