"""What a whole run will do on a TPU: memory, time, utilisation and cost, from its compiled steps."""

import dataclasses
import importlib.metadata
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bertjax.config.run import RunConfig
from bertjax.estimate.chips import Chip
from bertjax.estimate.collectives import Collective
from bertjax.estimate.compiled import CompiledStep, compile_step
from bertjax.estimate.roofline import ASSUMPTIONS, roofline
from bertjax.estimate.topology import chip_of, chips_in, tpu_devices
from bertjax.tasks.task import Task
from bertjax.training.sharding import make_mesh

logger = logging.getLogger(__name__)


def plan_run(
    settings: RunConfig,
    task: Task,
    topology: str,
    slices: int = 1,
    price_per_chip_hour: float | None = None,
    compiled: CompiledStep | None = None,
) -> dict[str, Any]:
    """Compiles each phase's train step for a TPU and tells what the run amounts to, as a dictionary for JSON.

    Of figures that differ between phases it has the mean over the steps, of `peak_memory_bytes` the largest; `phases`
    has those of each.

    Args:
      settings: of the run.
      task: built from them.
      topology: of one slice, such as `v5e:16x16`.
      slices: so many.
      price_per_chip_hour: in any currency; None leaves the cost out.
      compiled: the step of a run of one phase, where it was compiled already.

    Raises:
      UsageError: there is no such topology, or mesh or batch do not fit it.
      CompilerError: the compiler failed or crashed.
    """
    chip = chip_of(topology)
    devices = tpu_devices(topology, slices)
    chips = chips_in(topology) * slices
    steps = task.phase_steps or (task.total_steps,)
    phases, before = [], 0
    for phase, count in enumerate(steps):
        if compiled is None or len(steps) > 1:
            logger.info(f"compiling phase {phase + 1} of {len(steps)} for {chips:,} chips of {chip.name}")
            step = compile_step(settings, phase, topology, slices)
        else:
            step = compiled
        work = task.cost_before(before + 1) - task.cost_before(before)
        phases.append(
            {"steps": count, "rows": work.rows, "positions": work.positions, "model_flops": work.flops}
            | _of_step(step, chip, chips, work.flops)
        )
        before += count
    fits = all(phase["fits"] for phase in phases)
    seconds = sum(phase["steps"] * phase["seconds_per_step"] for phase in phases) if fits else None
    total = sum(steps)

    def mean(name: str) -> float | None:
        return sum(phase["steps"] * phase[name] for phase in phases) / total if fits else None

    hours = chips * seconds / 3600 if fits else None
    return {
        "topology": topology,
        "slices": slices,
        "chips": chips,
        "fits": fits,
        "peak_memory_bytes": max(phase["peak_memory_bytes"] for phase in phases),
        "memory_bytes_a_chip": int(chip.hbm_bytes),
        "flops": mean("flops"),
        "bytes": mean("bytes"),
        "seconds_per_step": mean("seconds_per_step"),
        "mfu": sum(phase["steps"] * phase["model_flops"] for phase in phases)
        / (chips * chip.flops_per_second * seconds)
        if fits
        else None,
        "steps": total,
        "seconds": seconds,
        "chip_hours": hours,
        "cost": hours * price_per_chip_hour if fits and price_per_chip_hour is not None else None,
        "phases": phases,
        "model": dataclasses.asdict(task.objective.model.config.resolve("tpu")),
        "mesh": dict(make_mesh(settings.mesh, devices).shape),
        "grad_accum_steps": settings.grad_accum_steps,
        "chip": {**dataclasses.asdict(chip), "device_kind": devices[0].device_kind},
        "assumptions": list(ASSUMPTIONS),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def _of_step(step: CompiledStep, chip: Chip, chips: int, model_flops: float) -> dict[str, Any]:
    """One phase, by chip: where JAX sees each core of one as a device, those of one core times their number."""
    memory = {name: chip.cores * value for name, value in dataclasses.asdict(step.memory).items()}
    found: dict[str, Any] = {
        "fits": step.fits,
        "compile_seconds": step.seconds,
        "memory": memory,
        "peak_memory_bytes": chip.cores * step.memory.total,
    }
    if not step.fits:
        return found
    bound = roofline(step.work, step.exchanged, chip)
    return found | {
        "flops": chips * chip.cores * sum(one.flops for one in step.work),
        "bytes": chip.cores * sum(one.hbm_bytes for one in step.work),
        "collectives": _exchange(step.exchanged),
        "roofline_seconds": dataclasses.asdict(bound),
        "seconds_per_step": bound.overlapped,
        "seconds_per_step_in_turn": bound.in_turn,
        "mfu": model_flops / (chips * chip.flops_per_second * bound.overlapped),
    }


def _exchange(exchanged: Sequence[Collective]) -> list[dict[str, Any]]:
    """Collectives of a device by kind: how many are carried out, and the bytes it sends in all of them."""
    counts: Counter[tuple[str, bool]] = Counter()
    moved: Counter[tuple[str, bool]] = Counter()
    for one in exchanged:
        key = one.kind, one.crosses_slices
        counts[key] += one.times
        moved[key] += one.times * one.moved_bytes
    return [
        {"kind": kind, "crosses_slices": crosses, "count": counts[kind, crosses], "bytes": moved[kind, crosses]}
        for kind, crosses in sorted(counts, key=lambda key: -moved[key])
    ]
