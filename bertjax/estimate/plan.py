"""Memory, communication, time and cost of a run on TPUs, from its compiled train steps and its model FLOPs."""

import dataclasses
import importlib.metadata
import logging
from typing import Any

from bertjax.config.run import RunConfig
from bertjax.estimate.chips import Chip
from bertjax.estimate.communication import Communication, step_communication
from bertjax.estimate.compiled import CompiledStep, compile_step
from bertjax.estimate.topology import chip_of, chips_in, tpu_devices
from bertjax.tasks.task import Task
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_state
from bertjax.utils.terminal import duration

logger = logging.getLogger(__name__)

# MFU of Google's MLPerf run of BERT-Large on 64 TPU v4 chips (TensorFlow, 196 sequences/s per chip). Published JAX runs
# of BERT on TPUs are at 11 to 18 %; those of language models of 16 billion parameters and more are at 50 to 70 %.
DEFAULT_MFU = 0.35
_GIB = 2**30


def plan_run(
    settings: RunConfig,
    task: Task,
    topology: str,
    slices: int = 1,
    mfu: float = DEFAULT_MFU,
    price_per_chip_hour: float | None = None,
    compiled: CompiledStep | None = None,
) -> dict[str, Any]:
    """Compiles the train step of each phase for a TPU and estimates the run.

    A step takes as long as its model FLOPs at the stated MFU, or as its communication at the published bandwidth if
    that is longer. Evaluation, checkpoints and restarts are not included.

    Args:
      settings: config of the run.
      task: task of that config.
      topology: topology of one slice, such as `v5e:16x16`.
      slices: number of slices.
      mfu: model-FLOPs utilization, in (0, 1].
      price_per_chip_hour: price in any currency (default: None, no cost).
      compiled: compiled step of a run of one phase (default: None, compile it).

    Returns:
      A dictionary for JSON; `phases` has the values of each phase. `seconds`, `chip_hours` and `cost` are None if a
      phase does not fit into memory.

    Raises:
      UsageError: the topology does not exist, or mesh or batch do not fit it.
      CompilerError: the compiler failed or crashed.
    """
    chip, chips, devices = chip_of(topology), chips_in(topology) * slices, tpu_devices(topology, slices)
    mesh, model = make_mesh(settings.mesh, devices), task.objective.model.config.resolve("tpu")
    params = abstract_state(task.objective, make_optimizer(settings.optimizer), mesh).params
    steps = task.phase_steps or (task.total_steps,)
    phases, start = [], 0
    for index, count in enumerate(steps):
        step = compiled
        if step is None or len(steps) > 1:
            logger.info(f"compiling phase {index + 1} of {len(steps)} for {chips:,} chips of {chip.name}")
            step = compile_step(settings, index, topology, slices)
        cost = task.cost_before(start + 1) - task.cost_before(start)
        exchanges = step_communication(params, mesh, model, cost.positions, slices, settings.grad_accum_steps)
        seconds = {
            "model_flops": cost.flops / (chips * chip.flops_per_second * mfu),
            **_communication_seconds(exchanges, chip),
        }
        phases.append(
            {
                "steps": count,
                "rows": cost.rows,
                "positions": cost.positions,
                "fits": step.fits,
                "compile_seconds": step.seconds,
                # A chip may have several devices.
                "memory": {name: chip.cores * size for name, size in dataclasses.asdict(step.memory).items()},
                "peak_memory_bytes": chip.cores * step.memory.total,
                "model_flops": cost.flops,
                "communication": [
                    {**dataclasses.asdict(each), "sent_bytes": chip.cores * each.sent_bytes} for each in exchanges
                ],
                "bounds": seconds,
                "seconds_per_step": max(seconds.values()),
            }
        )
        start += count
    fits = all(phase["fits"] for phase in phases)
    seconds = sum(phase["steps"] * phase["seconds_per_step"] for phase in phases)
    hours = chips * seconds / 3600
    return {
        "topology": topology,
        "slices": slices,
        "chips": chips,
        "chip": {**dataclasses.asdict(chip), "device_kind": devices[0].device_kind},
        "model": dataclasses.asdict(model),
        "mesh": dict(mesh.shape),
        "grad_accum_steps": settings.grad_accum_steps,
        "phases": phases,
        "fits": fits,
        "peak_memory_bytes": max(phase["peak_memory_bytes"] for phase in phases),
        "memory_bytes_per_chip": int(chip.hbm_bytes),
        "mfu": mfu,
        "steps": sum(steps),
        "seconds": seconds if fits else None,
        "chip_hours": hours if fits else None,
        "cost": hours * price_per_chip_hour if fits and price_per_chip_hour is not None else None,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def _communication_seconds(exchanges: list[Communication], chip: Chip) -> dict[str, float]:
    """Returns the time of a step's communication within and between slices at the published bandwidth."""
    within = sum(each.sent_bytes for each in exchanges if not each.crosses_slices)
    between = sum(each.sent_bytes for each in exchanges if each.crosses_slices)
    seconds = {"ici": chip.cores * within / chip.ici_bytes_per_second}
    return seconds | ({"dcn": between * chip.cores / chip.dcn_bytes_per_second} if chip.dcn_bytes_per_second else {})


def describe_plan(plan: dict[str, Any]) -> str:
    """Returns a plan as text."""
    chip, model, mesh = plan["chip"], plan["model"], plan["mesh"]
    slices = f" in {plan['slices']} slices" if plan["slices"] > 1 else ""
    lines = [
        f"chips     {plan['chips']:,} of {chip['name']}{slices}, {chip['flops_per_second'] / 1e12:.0f} TFLOP/s and "
        f"{chip['hbm_bytes'] / _GIB:.2f} GiB each ({chip['source']})",
        f"model     {model['num_hidden_layers']} layers of width {model['hidden_size']}, {model['dtype']}, "
        f"{'scanned' if model['scan_layers'] == 'true' else 'unrolled'}, remat {model['remat']}",
        f"mesh      data={mesh['data']}, fsdp={mesh['fsdp']}, tensor={mesh['tensor']}; {plan['grad_accum_steps']} "
        "micro-batch(es) per step",
    ]
    for number, phase in enumerate(plan["phases"], 1):
        lines += ["", *_describe_phase(number, phase, plan)]
    if plan["fits"]:
        cost = f", {_rounded(plan['cost'])} at the given price" if plan["cost"] is not None else ""
        lines += [
            "",
            f"run       {plan['steps']:,} steps in {duration(plan['seconds'])}, {_rounded(plan['chip_hours'])} "
            f"chip-hours{cost}, if the MFU is {plan['mfu']:.0%}",
        ]
    return "\n".join(lines)


def _describe_phase(number: int, phase: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in phase["memory"].items())
    peak, limit = phase["peak_memory_bytes"] / _GIB, plan["memory_bytes_per_chip"] / _GIB
    lines = [
        f"phase {number}   {phase['steps']:,} steps of {phase['rows']:,} rows of {phase['positions'] // phase['rows']} "
        f"tokens, {phase['rows'] / plan['chips']:g} rows per chip; compiled in {phase['compile_seconds']:.0f} s",
        f"  memory  {peak:.2f} of {limit:.2f} GiB per chip, {'fits' if phase['fits'] else 'DOES NOT FIT'} ({parts})",
    ]
    if not phase["fits"]:
        return [*lines, "          try a smaller batch, --config.model.remat=full or a larger mesh.fsdp; or --search"]
    lines += [
        f"  send    {each['sent_bytes'] / 1e9:.3f} GB per chip and step: {each['collective']} of {each['name']} over "
        f"{each['axis']}{', between slices' if each['crosses_slices'] else ''}"
        for each in phase["communication"]
    ]
    bounds = phase["bounds"]
    network = f"{bounds['ici']:.4f} s of communication" + (
        f" and {bounds['dcn']:.4f} s between slices" if plan["slices"] > 1 and "dcn" in bounds else ""
    )
    return [
        *lines,
        f"  step    {phase['seconds_per_step']:.4f} s: {_rounded(phase['model_flops'] / 1e12)} model TFLOP take "
        f"{bounds['model_flops']:.4f} s at {plan['mfu']:.0%} MFU, overlapping {network}",
    ]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
