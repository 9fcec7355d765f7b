"""The largest batch that fits, with each remat policy, and which of them trains fastest; by few compilations."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.estimate.compiled import CompiledStep, CompilerError, compile_step
from bertjax.estimate.roofline import roofline
from bertjax.estimate.topology import chip_of, tpu_devices
from bertjax.model.config import REMAT_POLICIES
from bertjax.tasks.build import build_task
from bertjax.tasks.task import Task
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_state

logger = logging.getLogger(__name__)

_MOST_TRIES = 3
# Above so many rows a device, in steps of as many.
_ROWS = 8
_MOST_ROWS = 1024
# Of the memory, for the state of training; what is more is cut over `fsdp`.
_STATE_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Found:
    """The largest batch of a layout.

    Attributes:
      overrides: of the config, that make it.
      rows: on each device.
      peak_memory_bytes: on each device.
      rows_per_second: of all devices, at best.
      step: as compiled.
    """

    overrides: tuple[str, ...]
    rows: int
    peak_memory_bytes: int
    rows_per_second: float
    step: CompiledStep


def search(settings_with: Callable[[Sequence[str]], RunConfig], topology: str, slices: int) -> list[Found]:
    """What fits, the fastest first.

    Args:
      settings_with: those of the run, with overrides of its config.
      topology: of one slice.
      slices: so many.

    Raises:
      UsageError: the run has several phases, or no topology is called so.
      BertjaxError: nothing fits that the compiler compiles.
    """
    chip, devices = chip_of(topology), tpu_devices(topology, slices)
    settings = settings_with([])
    task = build_task(settings, train=None)
    if len(task.phase_steps) > 1:
        raise UsageError("--search is for one phase; plan the phases one by one, such as with phases=1,seq_len=512")
    limit = chip.hbm_bytes / chip.cores
    fsdp = _fsdp(_state_bytes(settings, task, devices), limit, len(devices))
    found = []
    for number, remat in enumerate(REMAT_POLICIES, 1):
        logger.info(f"policy {number} of {len(REMAT_POLICIES)}: remat {remat}, at most {_MOST_TRIES} compilations")
        layout = (f"--config.model.remat={remat}", "--config.mesh.data=-1", f"--config.mesh.fsdp={fsdp}")
        best = _largest(settings_with, layout, topology, slices, len(devices))
        if best:
            found.append(best)
    if not found:
        raise BertjaxError("nothing was found that fits and compiles; take a larger topology or mesh.tensor")
    return sorted(found, key=lambda one: -one.rows_per_second)


def _state_bytes(settings: RunConfig, task: Task, devices: list[jax.Device]) -> int:
    """Of parameters and optimizer, on a device that has them whole."""
    state = abstract_state(task.objective, make_optimizer(settings.optimizer), make_mesh(settings.mesh, devices))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.params, state.opt_state)))


def _fsdp(state_bytes: int, limit: float, devices: int) -> int:
    """Over how many devices the state is cut: the least power of two that leaves room, and divides the devices."""
    parts = 1
    while state_bytes / parts > _STATE_SHARE * limit and devices % (2 * parts) == 0:
        parts *= 2
    return parts


def _largest(
    settings_with: Callable[[Sequence[str]], RunConfig],
    layout: tuple[str, ...],
    topology: str,
    slices: int,
    devices: int,
) -> Found | None:
    """By a straight line through what two batches need, which the third try confirms."""
    chip = chip_of(topology)
    tried: dict[int, CompiledStep] = {}
    rows, best = _ROWS, None
    for _ in range(_MOST_TRIES):
        overrides = (*layout, f"--config.data.batch_size={rows * devices}")
        try:
            step = tried[rows] = compile_step(settings_with(overrides), 0, topology, slices)
        except CompilerError as error:
            logger.info(f"  {rows} rows a device: {error}")
            break
        said = f"{rows} rows a device: {step.memory.total / 2**30:.2f} GiB, {'fits' if step.fits else 'does not fit'}"
        if step.fits and (best is None or rows > best.rows):
            bound = roofline(step.work, step.exchanged, chip)
            best = Found(overrides, rows, step.memory.total, rows * devices / bound.overlapped, step)
            said += f", {best.rows_per_second:,.0f} rows/s at best"
        logger.info(f"  {said}; compiled in {step.seconds:.0f} s")
        rows = _next(tried, chip.hbm_bytes / chip.cores)
        if rows in tried or not rows:
            break
    return best


def _next(tried: dict[int, CompiledStep], limit: float) -> int:
    """The rows that should just fit; 0 where not one does."""
    points = sorted((rows, step.memory.total) for rows, step in tried.items())
    fixed = points[0][1] - tried[points[0][0]].memory.temporaries
    (first, low), (last, high) = points[0], points[-1]
    slope = (high - low) / (last - first) if last > first else (low - fixed) / first
    rows = int(last + (limit - high) / max(slope, 1))
    fitting = [each for each, step in tried.items() if step.fits]
    failing = [each for each, step in tried.items() if not step.fits]
    rows = min(rows, _MOST_ROWS, *(each - 1 for each in failing))
    rows = rows // _ROWS * _ROWS if rows > _ROWS else max(rows, 0)
    return max([rows, *fitting])
