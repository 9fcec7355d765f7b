"""The device mesh, and the one table that maps logical axis names to it."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.data.share import Share
from bertjax.errors import UsageError
from bertjax.settings.mesh import MeshConfig

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter or activation -> mesh axis. Parameters are spread over `fsdp` along the hidden size and
# over `tensor` along heads, feed-forward width and vocabulary; a batch is spread over `data` and `fsdp`.
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    # Whole: a LayerNorm over an axis that `tensor` splits gets a wrong gradient from XLA 0.10 on some meshes.
    ("pooled", None),
    ("head", None),
    ("layers", None),
    ("length", None),
    ("norm", None),
    ("position", None),
    ("segment", None),
)
# Activations keep their hidden axis whole: their batch axis has taken `fsdp` already.
ACTIVATION_RULES = tuple(("embed", None) if name == "embed" else (name, axis) for name, axis in RULES)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `data`, `fsdp` and `tensor` over all devices.

    Raises:
      UsageError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    known = math.prod(size for size in sizes if size != -1)
    if len(devices) % known or (-1 not in sizes and known != len(devices)):
        raise UsageError(f"{shown} does not fit the {len(devices)} devices here")
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def parameter_shardings(abstract_boxed: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree of shapes whose leaves carry logical axis names (`jax.eval_shape` of an init).

    An axis that its mesh axis does not divide is left whole, so that any model runs on any mesh.
    """
    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract_boxed), RULES)
    shapes = nn.unbox(abstract_boxed)

    def fit(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
        for i, axis in enumerate(axes):
            names = (axis,) if isinstance(axis, str) else axis or ()
            if leaf.shape[i] % math.prod(mesh.shape[name] for name in names):
                axes[i] = None
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(fit, specs, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows spread over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


@functools.cache
def batch_share(mesh: Mesh) -> Share:
    """The rows of every global batch that this process's devices hold, wherever in the mesh these are."""
    count = batch_shards(mesh)
    held = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return Share(tuple(sorted({rows.indices(count)[0] for (rows,) in held})), count)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Rows of this process's share of a global batch to its devices."""
    sharding, share = batch_sharding(mesh), batch_share(mesh)

    def put(rows: np.ndarray) -> jax.Array:
        # Given, since it cannot be told from the rows alone where processes hold parts in common.
        whole = (len(rows) // len(share.parts) * share.count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, whole)

    return {name: put(rows) for name, rows in batch.items()}
