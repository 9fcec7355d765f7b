"""Sharding of activations by logical axis names, which are mapped to the current mesh.

`training/sharding.py` defines the mapping. Without a mesh, or on one device, the constraints have no effect.
"""

import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from bertjax.model.config import ModelConfig

ACTIVATION_AXES = ("batch", "length", "embed")


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: the platform of the current mesh, or of this machine if no mesh is set.

    The mesh may describe devices that this machine lacks, as in `bertjax plan`.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.platform if device else jax.default_backend()


def device_kind() -> str:
    """Returns the `device_kind`, such as `TPU v3`, of the current mesh, or of this machine if no mesh is set."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device else jax.devices()[0].device_kind


def resolve_layout(config: ModelConfig) -> ModelConfig:
    """Returns the config, with `auto` in `dtype` and `scan_layers` replaced by the current platform's value."""
    return config.resolve(platform())


def scans_layers(config: ModelConfig) -> bool:
    """Returns whether layers run in a `lax.scan`, where `jax.checkpoint` does not need `prevent_cse`."""
    return resolve_layout(config).scan_layers == "true"


def with_logical_constraint(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Constrains the sharding of an array by logical axis names. Axes that the mesh does not divide are replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, divisible_spec(nn.logical_to_mesh_axes(axes), x.shape, mesh.shape))


def divisible_spec(spec: PartitionSpec, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """Drops mesh axes that do not divide an array axis, so that any model runs on any mesh.

    Args:
      spec: mesh axes of each array axis; trailing axes may be missing.
      shape: shape of the array.
      axis_sizes: sizes of the mesh axes by name.
    """
    axes = list(spec) + [None] * (len(shape) - len(spec))
    for i, axis in enumerate(axes):
        names = (axis,) if isinstance(axis, str) else axis or ()
        if shape[i] % math.prod(axis_sizes[name] for name in names):
            axes[i] = None
    return PartitionSpec(*axes)
