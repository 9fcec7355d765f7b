"""Search for the largest batch that fits into memory with each remat policy, with few compilations per policy."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.estimate.compiled import CompiledStep, CompilerError, compile_step
from bertjax.estimate.topology import chip_of, tpu_devices
from bertjax.model.config import REMAT_POLICIES
from bertjax.tasks.build import build_task
from bertjax.tasks.task import Task
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.state import abstract_state

logger = logging.getLogger(__name__)

_MAX_COMPILATIONS = 3
# The search tries 1 to 8 rows per device, and multiples of 8 (the sublanes of a TPU register) up to 1,024.
_ROW_STEP, _MAX_ROWS = 8, 1024
# The search doubles `mesh.fsdp` until parameters and optimizer state take at most this fraction of a device's memory.
_STATE_FRACTION = 0.25

ConfigWith = Callable[[Sequence[str]], RunConfig]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Batch size and remat policy that the search has tried.

    Attributes:
      overrides: `--config.FIELD=VALUE` flags of the remat policy, the mesh and the batch size.
      rows: number of rows per device.
      step: compiled train step of this batch.
    """

    overrides: tuple[str, ...]
    rows: int
    step: CompiledStep


def search(config_with: ConfigWith, topology: str, slices: int) -> list[Candidate]:
    """Returns the largest batch that fits into memory for each remat policy, from least to most recomputation.

    `config_with` returns the config of the run with the given overrides.
    """
    chip, devices = chip_of(topology), tpu_devices(topology, slices)
    settings = config_with([])
    task = build_task(settings, train=None)
    if len(task.phase_steps) > 1:
        raise UsageError(
            "--search supports only runs with one phase; search each phase separately, e.g. with phases=1,seq_len=512"
        )
    limit = chip.hbm_bytes / chip.cores
    fsdp = _fsdp(_state_bytes(settings, task, devices), limit, len(devices))
    candidates = []
    for remat in REMAT_POLICIES:
        overrides = (f"--config.model.remat={remat}", "--config.mesh.data=-1", f"--config.mesh.fsdp={fsdp}")

        def compile_rows(rows: int, overrides: tuple[str, ...] = overrides) -> Candidate:
            batch = (*overrides, f"--config.data.batch_size={rows * len(devices)}")
            return Candidate(batch, rows, compile_step(config_with(batch), 0, topology, slices))

        logger.info(f"remat={remat}: at most {_MAX_COMPILATIONS} compilations")
        if candidate := _largest(compile_rows, limit):
            candidates.append(candidate)
    if not candidates:
        raise BertjaxError(
            "the train step does not fit into memory with any batch size; use a larger --topology or mesh.tensor"
        )
    return candidates


def _state_bytes(settings: RunConfig, task: Task, devices: list[jax.Device]) -> int:
    """Returns the unsharded size of parameters and optimizer state."""
    state = abstract_state(task.objective, make_optimizer(settings.optimizer), make_mesh(settings.mesh, devices))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.params, state.opt_state)))


def _fsdp(state_bytes: int, limit: float, devices: int) -> int:
    """Returns the smallest power of two for `fsdp` that divides `devices` and leaves memory for activations."""
    shards = 1
    while state_bytes / shards > _STATE_FRACTION * limit and devices % (2 * shards) == 0:
        shards *= 2
    return shards


def _largest(compile_rows: Callable[[int], Candidate], limit: float) -> Candidate | None:
    """Returns the largest candidate that fits, or None. Memory is linear in rows, so few compilations are enough."""
    tried: list[Candidate] = []
    rows = _ROW_STEP
    while rows and len(tried) < _MAX_COMPILATIONS and rows not in [each.rows for each in tried]:
        try:
            tried.append(compile_rows(rows))
        except CompilerError as error:
            logger.info(f"  {rows} rows per device: {error}")
            break
        step = tried[-1].step
        logger.info(
            f"  {rows} rows per device: {step.memory.total / 2**30:.2f} GiB, "
            f"{'fits' if step.fits else 'does not fit'}; compiled in {step.seconds:.0f} s"
        )
        rows = _predicted_rows(tried, limit)
    return max((each for each in tried if each.step.fits), key=lambda each: each.rows, default=None)


def _predicted_rows(tried: list[Candidate], limit: float) -> int:
    """Extrapolates the maximum number of rows per device that fits into memory. Returns 0 if no row fits."""
    ordered = sorted(tried, key=lambda each: each.rows)
    first, last = ordered[0], ordered[-1]
    if len(ordered) > 1:
        bytes_per_row = (last.step.memory.total - first.step.memory.total) / (last.rows - first.rows)
    else:
        bytes_per_row = first.step.memory.temporaries / first.rows
    rows = int(last.rows + (limit - last.step.memory.total) / max(bytes_per_row, 1))
    rows = min([rows, _MAX_ROWS, *(each.rows - 1 for each in tried if not each.step.fits)])
    rows = rows // _ROW_STEP * _ROW_STEP if rows > _ROW_STEP else max(rows, 0)
    return max([rows, *(each.rows for each in tried if each.step.fits)])


def describe_search(candidates: Sequence[Candidate]) -> str:
    """Formats one line per candidate."""
    return "\n".join(
        f"{each.rows:>5} rows per device, {each.step.memory.total / 2**30:5.2f} GiB: {' '.join(each.overrides)}"
        for each in candidates
    )
