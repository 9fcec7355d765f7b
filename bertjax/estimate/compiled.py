"""The train step of a run, compiled for TPUs that are not here, and what its program tells."""

import dataclasses
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, first_line
from bertjax.estimate.collectives import Collective, collectives
from bertjax.estimate.cost import StepCost, work_of
from bertjax.estimate.program import read_program
from bertjax.estimate.topology import tpu_devices, use_tpu_compiler
from bertjax.tasks.build import build_task
from bertjax.training.evaluation import check_batch_sizes
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import batch_sharding, make_mesh, replicated
from bertjax.training.step import abstract_state, make_train_step
from bertjax.utils.process_pool import process_pool


class CompilerError(BertjaxError):
    """The compiler failed on this step; it may not on another."""


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"([\d.]+)([KMG]?)"
# What the compiler says where a program does not fit. Either is of all that lies in memory, what it starts with counted
# in, though the second says temporaries.
_NEEDED = re.compile(rf"[Uu]sed {_SIZE} of|HLO temporaries \({_SIZE}\) exceeds")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step.

    Attributes:
      parameters, optimizer, batch: that a step starts with.
      temporaries: the rest: activations, gradients, buffers of exchange, the program itself.
    """

    parameters: int
    optimizer: int
    batch: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.temporaries


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one step does on one device.

    Attributes:
      memory: at its peak.
      fits: whether the compiler found room; where it did not, there is no program.
      work: of the program's operations.
      exchanged: its collectives.
      seconds: that the compiler took.
    """

    memory: Memory
    fits: bool
    work: tuple[StepCost, ...]
    exchanged: tuple[Collective, ...]
    seconds: float


def compile_step(settings: RunConfig, phase: int, topology: str, slices: int) -> CompiledStep:
    """Compiles the very step that `train` would run.

    In a process of its own: libtpu 0.0.42.1 crashes on some programs, such as BERT of hidden size 128 with
    remat=full.

    Args:
      settings: of the run.
      phase: of its task, whose batches' shape it is compiled for.
      topology: of one slice.
      slices: so many.

    Raises:
      UsageError: the mesh does not fit the devices, or the batch the mesh.
      CompilerError: the compiler failed or crashed.
    """
    with process_pool(1, _crashed, use_tpu_compiler) as process:
        return process.submit(_compile, settings, phase, topology, slices).result()


def _crashed() -> CompilerError:
    return CompilerError(
        "the TPU compiler crashed, or was killed for lack of memory; "
        "try another --config.model.remat or --config.model.scan_layers"
    )


def lowered_step(
    settings: RunConfig, phase: int, devices: list[jax.Device]
) -> tuple[jax.stages.Lowered, dict[str, int]]:
    """The step before the compiler has it, and the bytes of a device that it starts with.

    Raises:
      UsageError: the mesh does not fit the devices, or the batch the mesh.
    """
    task = build_task(settings, train=None)
    mesh = make_mesh(settings.mesh, devices)
    check_batch_sizes(task, mesh, settings.grad_accum_steps)
    optimizer = make_optimizer(settings.optimizer)
    state = abstract_state(task.objective, optimizer, mesh)
    batch = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=batch_sharding(mesh)),
        task.synthetic_batch(phase),
    )
    whole = replicated(mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    step = make_train_step(task.objective, optimizer, mesh, settings.grad_accum_steps)
    held = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state), "batch": _bytes(batch)}
    return step.lower(state, batch, key, bert_schedule(scalar, scalar, scalar)), held


def _compile(settings: RunConfig, phase: int, topology: str, slices: int) -> CompiledStep:
    started = time.monotonic()
    devices = tpu_devices(topology, slices)
    lowered, held = lowered_step(settings, phase, devices)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise CompilerError(f"the TPU compiler failed ({first_line(error)})") from error
        return CompiledStep(_memory(held, needed), False, (), (), time.monotonic() - started)
    seconds = time.monotonic() - started
    program = read_program(compiled.as_text())
    slices = len({getattr(device, "slice_index", None) for device in devices})
    memory = _memory(held, peak_bytes(compiled))
    return CompiledStep(
        memory, True, tuple(work_of(program)), tuple(collectives(program, len(devices) // slices, slices)), seconds
    )


def peak_bytes(compiled: Any) -> int:
    """Of a program for TPUs, on a device, with what it starts with and with the program itself.

    The compiler has no such figure, but two that are too large at times: one counts buffers that are not there at the
    same time, the other memory nearer than the main one. Their lesser, with the program, is above what `--xla_dump_to`
    has in the memory-usage-report: by 0.1 % for LARGE, and by 8 MiB for a model of 4 million parameters.
    """
    found = compiled.memory_analysis()
    lesser = min(found.argument_size_in_bytes + found.temp_size_in_bytes, found.peak_memory_in_bytes)
    return lesser + found.generated_code_size_in_bytes


def needed_bytes(refusal: str) -> int | None:
    """The same of a program that does not fit, from what the compiler says; None where it says something else."""
    found = _NEEDED.search(refusal)
    if "RESOURCE_EXHAUSTED" not in refusal or not found:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    return int(float(number) * _UNITS[unit])


def _memory(held: dict[str, int], peak: int) -> Memory:
    return Memory(**held, temporaries=max(peak - sum(held.values()), 0))


def _bytes(tree: Any) -> int:
    """Of the part that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
