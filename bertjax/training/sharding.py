"""Device mesh, tables that map logical axis names to mesh axes, and XLA options that overlap collectives."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bertjax.config.mesh import MeshConfig
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError, first_line, quoted
from bertjax.model.partitioning import divisible_spec

MESH_AXES = ("data", "fsdp", "tensor")

# Pairs of a parameter's logical axis and the mesh axis that shards it. Parameters are sharded over `fsdp` along the
# hidden size and over `tensor` along heads, feed-forward width and vocabulary. Axes without a rule are not
# sharded. The axis `pooled` has no rule, because on some meshes, JAX 0.10 computes a wrong gradient of a LayerNorm
# whose axis is sharded over `tensor`.
RULES = (
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("vocab_part", ("tensor", "fsdp")),
)
# Pairs of an activation's logical axis and the mesh axes that shard it. `fsdp` shards the batch axis, so it cannot also
# shard the hidden size. Each pass through a layer all-gathers the layer's weights over `fsdp`. For the token embedding
# table, the token ids are all-gathered instead, because they are smaller (`batch_over_data`).
ACTIVATION_RULES = (
    ("batch", ("data", "fsdp")),
    *(rule for rule in RULES if rule[0] != "embed"),
    ("batch_over_data", "data"),
    ("embed_over_fsdp", "fsdp"),
)

# XLA options of train steps on TPU. The latency-hiding scheduler starts collectives as soon as their operands are
# ready, and overlaps them with compute.
TPU_OPTIONS = {"xla_tpu_enable_latency_hiding_scheduler": True}
# Additional options for several slices. The first option overlaps the all-reduce of gradients across slices with the
# backward pass. The second also overlaps consecutive all-reduces of different sizes, such as those of one layer.
MULTISLICE_OPTIONS = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with axes `data`, `fsdp` and `tensor` over `devices` (default: all devices).

    Neighbors on the mesh are neighbors on the device network. TPU slices are concatenated along `data`.
    Raises a UsageError if the mesh does not fit the devices.
    """
    devices = list_devices() if devices is None else devices
    slices = _num_slices(devices)
    sizes = [config.data, config.fsdp, config.tensor]
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    known = math.prod(size for size in sizes if size != -1)
    data, *inner = [len(devices) // max(1, known) if size == -1 else size for size in sizes]
    if math.prod((data, *inner)) != len(devices) or data % slices:
        raise UsageError(
            f"{shown} does not fit {len(devices)} devices in {slices} slice(s); use sizes with the product "
            f"{len(devices)}, or -1 for one of them, and a multiple of {slices} for mesh.data"
        )
    shape = [data // slices, *inner]
    try:
        if slices == 1:
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(shape, [slices, 1, 1], devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as error:
        message = f"{shown} does not fit the device topology: {first_line(error)}"
        raise UsageError(f"{message}; change mesh.fsdp or mesh.tensor") from error
    return Mesh(grid, MESH_AXES)


def check_batch_sizes(batch_sizes: Sequence[int], mesh: Mesh, grad_accum_steps: int = 1) -> None:
    """Raises a UsageError if a batch size is not divisible by the number of shards times `grad_accum_steps`."""
    shards = batch_shards(mesh)
    for batch_size in batch_sizes:
        if batch_size % (shards * grad_accum_steps):
            raise UsageError(
                f"a batch of {batch_size} rows is not divisible by {shards} data shards x {grad_accum_steps} "
                "micro-batches; change config.data.batch_size or eval_batch_size (examples_per_row, "
                "config.phases and config.embed.chunk affect the rows per batch)"
            )


def list_devices() -> list[jax.Device]:
    """Returns the devices of all processes. Raises a UsageError if no device matches JAX_PLATFORMS."""
    try:
        return jax.devices()
    # JAX raises an AssertionError if JAX_PLATFORMS is `cuda` or `rocm` on a machine without a GPU.
    except (RuntimeError, AssertionError) as error:
        platforms = quoted(jax.config.jax_platforms or "")  # pyrefly: ignore[missing-attribute]  # Defined at run time.
        reason = f" ({first_line(error)})" if str(error) else ""
        message = f"JAX finds no devices for JAX_PLATFORMS={platforms}{reason}"
        raise UsageError(f"{message}; use a platform of this machine, such as cpu, or unset JAX_PLATFORMS") from error


def _num_slices(devices: list[jax.Device]) -> int:
    """Returns the number of TPU slices (1 on other platforms)."""
    is_tpu = devices[0].platform == "tpu"
    return len({getattr(device, "slice_index", None) or 0 for device in devices}) if is_tpu else 1


def with_shardings(abstract_boxed: Any, mesh: Mesh) -> Any:
    """Adds the shardings defined by `RULES` to a tree of shapes and dtypes.

    An axis that is not divisible by the size of its mesh axis is not sharded, so that any model runs on any mesh.
    `abstract_boxed` contains shapes with logical axis names, as `jax.eval_shape` of a module's `init` returns them.
    """

    def shard(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, divisible_spec(spec, leaf.shape, mesh.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract_boxed), RULES)
    return jax.tree.map(shard, nn.unbox(abstract_boxed), specs)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of a fully replicated array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch, with rows sharded over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards along the batch axis."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


@functools.cache
def data_shard(mesh: Mesh) -> DataShard:
    """Returns the shards of each global batch that are on the devices of this process."""
    count = batch_shards(mesh)
    slices = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return DataShard(tuple(sorted({rows.indices(count)[0] for (rows,) in filter(None, slices)})), count)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows of a global batch on its devices. Returns the global arrays."""
    sharding, shard = batch_sharding(mesh), data_shard(mesh)

    def put(rows: np.ndarray) -> jax.Array:
        # Pass the global shape, because JAX cannot infer it if several processes store the same shard.
        global_shape = (len(rows) // len(shard.parts) * shard.count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, global_shape)

    return {name: put(rows) for name, rows in batch.items()}


def under_mesh(function: Callable, mesh: Mesh) -> Callable:
    """Wraps a function so that it is traced under the mesh and the logical axis rules of activations.

    The model reads the mesh and the rules for its sharding constraints and attention kernels. The mesh is abstract, so
    that `bertjax plan` can compile for devices that this machine does not have.
    """

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(ACTIVATION_RULES):
            return function(*args)

    return traced


def jit_on_mesh(
    function: Callable[[Any, dict[str, jax.Array]], Any], params: Any, mesh: Mesh
) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """Jits a function of parameters and a batch for inference. Axis 0 of all outputs must be the batch axis.

    Returns a function from a host batch with any number of rows to host arrays. Rows are padded to a multiple of the
    number of data shards.
    """
    jitted = jax.jit(under_mesh(function, mesh), out_shardings=replicated(mesh))

    def call(batch: Mapping[str, np.ndarray]) -> Any:
        num_rows = len(batch["input_ids"])
        padding = -num_rows % batch_shards(mesh)
        padded = {name: np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}
        outputs = jitted(params, put_batch(padded, mesh))
        return jax.tree.map(lambda array: np.asarray(array)[:num_rows], outputs)

    return call


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str] | None:
    """Returns the compiler options for train steps on TPU, or None (XLA's defaults) on other platforms."""
    devices = list(mesh.devices.flat)
    if devices[0].platform != "tpu":
        return None
    return {**TPU_OPTIONS, **(MULTISLICE_OPTIONS if _num_slices(devices) > 1 else {})}
