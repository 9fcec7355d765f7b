"""The device mesh, and the one table that maps logical axis names to it."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.config.mesh import MeshConfig
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError, first_line, quoted
from bertjax.model.partitioning import divisible_spec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter -> mesh axis. Parameters are spread over `fsdp` along the hidden size and over `tensor`
# along heads, feed-forward width and vocabulary.
RULES = (
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("vocab_part", ("tensor", "fsdp")),
    # Whole: a LayerNorm over an axis that `tensor` splits gets a wrong gradient from XLA 0.10 on some meshes.
    ("pooled", None),
    ("head", None),
    ("layers", None),
    ("length", None),
    ("norm", None),
    ("position", None),
    ("segment", None),
)
# Logical axis of an array that is computed with -> mesh axis. A batch is spread over `data` and `fsdp`, so that the
# hidden size is whole, of weights too: they are gathered for a layer, forwards and again backwards. The vocabulary's
# table is larger than what goes in and comes out of it. It is never gathered; the rows of the devices that share it,
# `shared_batch`, are.
ACTIVATION_RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", None),
    *(rule for rule in RULES if rule[0] != "embed"),
    ("shared_batch", "data"),
    ("embed_part", "fsdp"),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `data`, `fsdp` and `tensor` over all devices.

    Neighbours on it are neighbours on the network that connects the devices; slices follow each other along `data`.

    Raises:
      UsageError: the sizes do not multiply to the number of devices, or do not fit into its slices.
    """
    devices = _devices() if devices is None else devices
    slices = _slices(config.slices, devices)
    sizes = [config.data, config.fsdp, config.tensor]
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    known = math.prod(size for size in sizes if size != -1)
    if len(devices) % known or (-1 not in sizes and known != len(devices)):
        raise UsageError(f"{shown} does not fit the {len(devices)} devices here")
    data, *inner = [len(devices) // known if size == -1 else size for size in sizes]
    if data % len(slices):
        raise UsageError(
            f"{shown} does not fit {len(slices)} slices of {len(slices[0])} devices: mesh.data, here {data}, is spread "
            f"over the slices; make it a multiple of {len(slices)}"
        )
    try:
        parts = [
            mesh_utils.create_device_mesh([data // len(slices), *inner], part, allow_split_physical_axes=True)
            for part in slices
        ]
    except (NotImplementedError, ValueError) as error:
        raise UsageError(f"{shown} does not fit the network of the devices here ({first_line(error)})") from error
    return Mesh(np.concatenate(parts), MESH_AXES)


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except RuntimeError as error:
        platforms = quoted(jax.config.jax_platforms or "")
        raise UsageError(f"JAX finds no devices ({first_line(error)}); JAX_PLATFORMS is {platforms}") from error


def _slices(wanted: int, devices: list[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each TPU slice; of devices that are none, those of equal parts of the list."""
    if devices[0].platform == "tpu":
        by_slice: dict[int, list[jax.Device]] = {}
        for device in devices:
            by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
        found = [by_slice[index] for index in sorted(by_slice)]
        if wanted not in (-1, len(found)):
            raise UsageError(
                f"mesh.slices={wanted}, but the {len(devices)} devices here are in {len(found)} slice(s); set "
                f"mesh.slices={len(found)} or -1"
            )
        return found
    size, rest = divmod(len(devices), max(wanted, 1))
    if rest:
        raise UsageError(f"mesh.slices={wanted} does not fit the {len(devices)} devices here")
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def parameter_shardings(abstract_boxed: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree of shapes whose leaves carry logical axis names (`jax.eval_shape` of an init).

    An axis that its mesh axis does not divide is left whole, so that any model runs on any mesh.
    """
    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract_boxed), RULES)
    shapes = nn.unbox(abstract_boxed)

    return jax.tree.map(
        lambda spec, leaf: NamedSharding(mesh, divisible_spec(spec, leaf.shape, mesh.shape)),
        specs,
        shapes,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


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
def data_shard(mesh: Mesh) -> DataShard:
    """The rows of every global batch that this process's devices hold, wherever in the mesh these are."""
    count = batch_shards(mesh)
    held = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return DataShard(tuple(sorted({rows.indices(count)[0] for (rows,) in held})), count)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Rows of this process's share of a global batch to its devices."""
    sharding, share = batch_sharding(mesh), data_shard(mesh)

    def put(rows: np.ndarray) -> jax.Array:
        # Given, since it cannot be told from the rows alone where processes hold parts in common.
        whole = (len(rows) // len(share.parts) * share.count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, whole)

    return {name: put(rows) for name, rows in batch.items()}
