"""Estimates of a run's memory, communication, time and cost on TPUs, from compiled train steps and model FLOPs."""

import dataclasses
import importlib.metadata
import itertools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bertjax.estimate.compiled import compile_step
from bertjax.estimate.topology import chip_of, chips_in, tpu_devices
from bertjax.model.config import ModelConfig
from bertjax.model.layers import LAYERS
from bertjax.tasks.task import Task
from bertjax.training.cost import cost_of_step
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_params
from bertjax.utils.terminal import duration, format_table

logger = logging.getLogger(__name__)

_GIB = 2**30


def step_communication(
    params: Any, mesh: Mesh, model: ModelConfig, positions: int, slices: int = 1, micro_batches: int = 1
) -> list[dict[str, Any]]:
    """Returns the collective operations of one train step over each mesh axis, with the bytes that each device sends.

    Gradients are all-reduced over `data` in the model's dtype. The gradient of the token embeddings is float32.
    With several slices, all gradients are float32 and are first summed within each slice. Parameters sharded over
    `fsdp`, except the token embeddings, are all-gathered in the forward and the backward pass. Their gradients are
    reduce-scattered. Each layer kernel that is sharded over `tensor` causes one all-reduce of activations: either its
    output in the forward pass, or the gradient of its input in the backward pass.

    `params` is a tree of `jax.ShapeDtypeStruct` with shardings. Slices are consecutive along `data`. `positions` is the
    number of positions of the global batch, including padding.
    """
    data, fsdp, tensor = (mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    itemsize = jnp.dtype(model.dtype).itemsize
    gradient_itemsize = itemsize if slices == 1 else 4
    gradients = gathered = 0.0
    num_reduced = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if LAYERS in name and name.endswith("kernel") and "tensor" in leaf.sharding.spec:
            num_reduced += leaf.shape[0]
        if name.endswith("embeddings/token"):
            gradients += size * 4
        else:
            gradients += size * gradient_itemsize
            gathered += size * itemsize * fsdp if "fsdp" in leaf.sharding.spec else 0
    activations = positions / (data * fsdp) * model.hidden_size * itemsize
    outputs = num_reduced * activations
    ring = {axis: (size - 1) / size for axis, size in (("data", data // slices), ("fsdp", fsdp), ("tensor", tensor))}
    across = (slices - 1) / slices
    fields = ("name", "collective", "axis", "sent_bytes", "crosses_slices")
    exchanges = [
        ("gradients", "all-reduce", "data", 2 * ring["data"] * gradients, False),
        ("gradients", "all-reduce", "data", 2 * across * gradients / (data // slices), True),
        ("parameters", "all-gather", "fsdp", 2 * ring["fsdp"] * gathered * micro_batches, False),
        ("gradients", "reduce-scatter", "fsdp", ring["fsdp"] * gathered * micro_batches, False),
        ("activations", "all-reduce", "tensor", 2 * ring["tensor"] * outputs, False),
    ]
    rows = [dict(zip(fields, exchange, strict=True)) for exchange in exchanges]
    return [row for row in rows if row["sent_bytes"]]


def plan_run(task: Task, topology: str, slices: int, mfu: float, price_per_chip_hour: float | None) -> dict[str, Any]:
    """Compiles the train step of each phase for a TPU and estimates the run, as a dictionary for JSON.

    The step time is the longest of three times: model FLOPs at the given MFU, and communication within and between
    slices at the published bandwidths. For v2, v3 and v4, the bandwidth between slices is unpublished, so the estimate
    excludes communication between slices. It also excludes evaluation, checkpoints and restarts. Time and cost are None
    if a phase does not fit into memory. If `task.has_schedule` is False, time, cost and `steps` are None.

    `topology` is the topology of one slice, such as `v5e:16x16`. `price_per_chip_hour` may be in any currency.
    """
    chip, chips, devices = chip_of(topology), chips_in(topology) * slices, tpu_devices(topology, slices)
    mesh, model = make_mesh(task.config.mesh, devices), task.objective.model.config.resolve("tpu")
    params = abstract_params(task.objective, mesh)
    steps = [stop - start for start, stop in itertools.pairwise([0, *(stop for stop, _ in task.phase_schedule)])]
    phases, start = [], 0
    for index, count in enumerate(steps):
        logger.info(f"compiling phase {index + 1} of {len(steps)} for {chips:,} chips of {chip.name}")
        step = compile_step(task.config, index, topology, slices)
        # Convert bytes per device to bytes per chip, because a chip may have several devices.
        memory = {name: chip.cores * size for name, size in step["memory"].items()}
        cost = cost_of_step(task, start)
        exchanges = step_communication(params, mesh, model, cost.positions, slices, task.config.grad_accum_steps)
        exchanges = [each | {"sent_bytes": chip.cores * each["sent_bytes"]} for each in exchanges]
        within = sum(each["sent_bytes"] for each in exchanges if not each["crosses_slices"])
        between = sum(each["sent_bytes"] for each in exchanges if each["crosses_slices"])
        bounds = {
            "model_flops": cost.flops / (chips * chip.flops_per_second * mfu),
            "ici": within / chip.ici_bytes_per_second,
        }
        if chip.dcn_bytes_per_second:
            bounds["dcn"] = between / chip.dcn_bytes_per_second
        phases.append(
            {
                "steps": count if task.has_schedule else None,
                "rows": cost.rows,
                "positions": cost.positions,
                **step,
                "memory": memory,
                "peak_memory_bytes": sum(memory.values()),
                "model_flops": cost.flops,
                "communication": exchanges,
                "bounds": bounds,
                "seconds_per_step": max(bounds.values()),
            }
        )
        start += count
    fits = all(phase["fits"] for phase in phases)
    has_times = fits and task.has_schedule
    seconds = sum(count * phase["seconds_per_step"] for count, phase in zip(steps, phases, strict=True))
    hours = chips * seconds / 3600
    return {
        "topology": topology,
        "slices": slices,
        "chips": chips,
        "chip": {**dataclasses.asdict(chip), "device_kind": devices[0].device_kind},
        "model": dataclasses.asdict(model),
        "mesh": dict(mesh.shape),
        "grad_accum_steps": task.config.grad_accum_steps,
        "phases": phases,
        "fits": fits,
        "peak_memory_bytes": max(phase["peak_memory_bytes"] for phase in phases),
        "memory_bytes_per_chip": int(chip.hbm_bytes),
        "mfu": mfu,
        "steps": sum(steps) if task.has_schedule else None,
        "seconds": seconds if has_times else None,
        "chip_hours": hours if has_times else None,
        "cost": hours * price_per_chip_hour if has_times and price_per_chip_hour is not None else None,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def describe_plan(plan: dict[str, Any]) -> str:
    """Formats a plan as text."""
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
    limit = plan["memory_bytes_per_chip"] / _GIB
    totals = [
        ("memory", f"{plan['peak_memory_bytes'] / _GIB:.2f}", f"GiB per chip, of {limit:.2f}"),
        ("steps", f"{plan['steps']:,}" if plan["steps"] is not None else "unknown without data", ""),
    ]
    if plan["seconds"] is not None:
        totals += [
            ("time", duration(plan["seconds"]), f"h:mm:ss, if the MFU is {plan['mfu']:.0%}"),
            ("chip-hours", _rounded(plan["chip_hours"]), ""),
        ]
    if plan["cost"] is not None:
        totals.append(("cost", _rounded(plan["cost"]), "at the given price"))
    return "\n".join([*lines, "", format_table(totals)])


def _describe_phase(number: int, phase: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in phase["memory"].items())
    steps = f"{phase['steps']:,} " if phase["steps"] is not None else ""
    peak, limit = phase["peak_memory_bytes"] / _GIB, plan["memory_bytes_per_chip"] / _GIB
    lines = [
        f"phase {number}   {steps}steps of {phase['rows']:,} rows of {phase['positions'] // phase['rows']} "
        f"tokens, {phase['rows'] / plan['chips']:g} rows per chip; compiled in {phase['compile_seconds']:.0f} s",
        f"  memory  {peak:.2f} of {limit:.2f} GiB per chip, {'fits' if phase['fits'] else 'DOES NOT FIT'} ({parts})",
    ]
    if not phase["fits"]:
        return [*lines, "          try a smaller batch, a larger grad_accum_steps or mesh.fsdp, or model.remat=full"]
    lines += [
        f"  send    {each['sent_bytes'] / 1e9:.3f} GB per chip and step: {each['collective']} of {each['name']} over "
        f"{each['axis']}{', between slices' if each['crosses_slices'] else ''}"
        for each in phase["communication"]
    ]
    bounds = phase["bounds"]
    network = f"{bounds['ici']:.4f} s of communication"
    if plan["slices"] > 1:
        between = f"{bounds['dcn']:.4f} s" if "dcn" in bounds else "an unknown time"
        network += f" and {between} between slices"
    return [
        *lines,
        f"  step    {phase['seconds_per_step']:.4f} s: {_rounded(phase['model_flops'] / 1e12)} model TFLOP take "
        f"{bounds['model_flops']:.4f} s at {plan['mfu']:.0%} MFU, overlapping {network}",
    ]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
