"""XLA compiler options, shared by `train` and `plan`."""

import dataclasses

from jax.sharding import Mesh

CompilerOptions = dict[str, bool | int | str]


@dataclasses.dataclass(frozen=True)
class Option:
    """Option of the TPU compiler.

    Attributes:
      name, value: name and value of the option in XLA.
      multislice: whether to set the option only if the mesh has several slices.
      reason: effect of the option.
    """

    name: str
    value: bool | int | str
    multislice: bool
    reason: str


TPU_OPTIONS = (
    Option(
        "xla_tpu_enable_latency_hiding_scheduler",
        True,
        multislice=False,
        reason="starts collectives as soon as their operands are ready and overlaps them with compute",
    ),
    Option(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        True,
        multislice=True,
        reason="overlaps the all-reduce of gradients across slices with the backward pass",
    ),
    Option(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        True,
        multislice=True,
        reason="extends the option above to consecutive all-reduces of different sizes, such as those of one layer",
    ),
)


def compiler_options(mesh: Mesh) -> CompilerOptions | None:
    """Returns the compiler options for train steps on TPU. Returns None (XLA's defaults) on other platforms."""
    devices = list(mesh.devices.flat)
    if devices[0].platform != "tpu":
        return None
    is_multislice = len({getattr(device, "slice_index", None) or 0 for device in devices}) > 1
    return {option.name: option.value for option in TPU_OPTIONS if is_multislice or not option.multislice}


def quick_compilation(mesh: Mesh) -> CompilerOptions | None:
    """Returns compiler options for programs that run once or twice on CPU. Returns None on other platforms.

    With these options, the forward pass of BASE compiles in a quarter of the time and runs 10 % slower.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
