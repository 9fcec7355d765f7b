"""The train step of a run, compiled for TPUs that are not here, and what its program tells."""

import dataclasses
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.errors import BertjaxError, first_line
from bertjax.planning.collectives import Collective, collectives
from bertjax.planning.cost import Work, work_of
from bertjax.planning.program import read_program
from bertjax.tasks.settings import RunSettings
from bertjax.tasks.task import Task
from bertjax.training.loop import check_batches
from bertjax.training.optimizer import LearningRate, make_optimizer
from bertjax.training.sharding import batch_sharding, make_mesh, replicated
from bertjax.training.step import abstract_state, make_train_step

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_USED = re.compile(r"[Uu]sed ([\d.]+)([KMG]?) of ([\d.]+)([KMG]?) hbm")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step.

    Attributes:
      parameters, optimizer, batch: that a step starts with.
      temporaries: the rest: activations, gradients, buffers of exchange, the program itself.
      limit: what the compiler may use; 0 where it did not say.
    """

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    limit: int = 0

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
    work: tuple[Work, ...]
    exchanged: tuple[Collective, ...]
    seconds: float


def compile_step(settings: RunSettings, task: Task, phase: int, devices: list[jax.Device]) -> CompiledStep:
    """Compiles the very step that `train` would run.

    Args:
      settings: of the run.
      task: built from them.
      phase: of the task, whose batches' shape it is compiled for.
      devices: of a topology.

    Raises:
      UsageError: the mesh does not fit the devices, or the batch the mesh.
      BertjaxError: the compiler failed.
    """
    mesh = make_mesh(settings.mesh, devices)
    check_batches(task, mesh, settings.accumulate)
    optimizer = make_optimizer(settings.optimizer)
    state = abstract_state(task.objective, optimizer, mesh)
    batch = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=batch_sharding(mesh)),
        task.synthetic_batch(phase),
    )
    whole = replicated(mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    started = time.monotonic()
    step = make_train_step(task.objective, optimizer, mesh, settings.accumulate)
    held = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state), "batch": _bytes(batch)}
    try:
        compiled = step.lower(state, batch, key, LearningRate(scalar, scalar, scalar)).compile()
    except jax.errors.JaxRuntimeError as error:
        found = _USED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not found:
            raise BertjaxError(f"the TPU compiler failed ({first_line(error)})") from error
        used, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
        memory = Memory(**held, temporaries=max(used - sum(held.values()), 0), limit=limit)
        return CompiledStep(memory, False, (), (), time.monotonic() - started)
    seconds = time.monotonic() - started
    program = read_program(compiled.as_text())
    slices = len({getattr(device, "slice_index", None) for device in devices})
    memory = Memory(**held, temporaries=_temporaries(compiled))
    return CompiledStep(
        memory, True, tuple(work_of(program)), tuple(collectives(program, mesh.size // slices, slices)), seconds
    )


def _temporaries(compiled: Any) -> int:
    found = compiled.memory_analysis()
    # The state is given back where it was; what else a step gives is a few numbers.
    return found.temp_size_in_bytes + found.generated_code_size_in_bytes


def _bytes(tree: Any) -> int:
    """Of the part that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
