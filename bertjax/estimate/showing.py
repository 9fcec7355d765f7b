"""Plans for people: one in some lines, two side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError, first_line, quoted
from bertjax.estimate.search import Found
from bertjax.utils.io import read_json_object
from bertjax.utils.terminal import duration

_GIB = 2**30


def describe_plan(plan: dict[str, Any]) -> str:
    """A plan for a person, in some lines."""
    chip, model, mesh = plan["chip"], plan["model"], plan["mesh"]
    across = f" in {plan['slices']} slices" if plan["slices"] > 1 else ""
    lines = [
        f"{plan['chips']:,} chips of {chip['name']}{across}: {chip['flops_per_second'] / 1e12:.0f} TFLOP/s, "
        f"{chip['hbm_bytes'] / _GIB:.2f} GiB at {chip['hbm_bytes_per_second'] / 1e9:,.0f} GB/s, "
        f"{chip['ici_bytes_per_second'] / 1e9:.0f} GB/s to neighbours"
        + (f", {chip['dcn_bytes_per_second'] / 1e9:.2f} GB/s between slices" if chip["dcn_bytes_per_second"] else "")
        + f" ({chip['source']})",
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']} in {model['dtype']}, "
        f"{'scanned' if model['scan_layers'] == 'true' else 'unrolled'}, remat {model['remat']}; mesh data={mesh['data']}, "
        f"fsdp={mesh['fsdp']}, tensor={mesh['tensor']}; {plan['grad_accum_steps']} micro-batch(es) a step",
    ]
    for number, phase in enumerate(plan["phases"], 1):
        lines += _phase_lines(number, phase, plan)
    if plan["fits"]:
        cost = f", {_amount(plan['cost'])} at the price given" if plan["cost"] is not None else ""
        lines.append(
            f"the run, at best: {plan['steps']:,} steps in {duration(plan['seconds'])}, {_amount(plan['chip_hours'])} "
            f"chip-hours{cost}; MFU {100 * plan['mfu']:.1f} %"
        )
    lines += ["taken for granted:", *(f"  - {text}" for text in plan["assumptions"])]
    return "\n".join(lines)


def _amount(value: float) -> str:
    """To the unit, or where it is small to three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _phase_lines(number: int, phase: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    memory = phase["memory"]
    parts = ("parameters", "optimizer", "batch", "temporaries")
    length = phase["positions"] // phase["rows"]
    lines = [
        f"phase {number}: {phase['steps']:,} steps of {phase['rows']:,} rows of {length}, "
        f"{phase['rows'] / plan['chips']:g} a chip; compiled in {phase['compile_seconds']:.0f} s",
        f"  memory a chip: {phase['peak_memory_bytes'] / _GIB:.2f} of {plan['memory_bytes_a_chip'] / _GIB:.2f} GiB, "
        f"{'fits' if phase['fits'] else 'DOES NOT FIT'} ("
        + ", ".join(f"{name} {memory[name] / _GIB:.2f}" for name in parts)
        + ")",
    ]
    if not phase["fits"]:
        return [*lines, "  try a smaller batch, --config.model.remat=full, or a larger mesh.fsdp; --search tries them"]
    seconds = phase["roofline_seconds"]
    lines.append(
        f"  a step: {_figure(phase['flops'] / 1e12)} TFLOP, of them {_figure(phase['model_flops'] / 1e12)} of the "
        f"model; {_figure(phase['bytes'] / 1e9)} GB of memory traffic a chip"
    )
    lines += [
        f"  exchange a chip: {one['kind']} {one['count']:,} times, {one['bytes'] / 1e9:,.3f} GB "
        f"{'between slices' if one['crosses_slices'] else 'within a slice'}"
        for one in phase["collectives"]
        if one["bytes"] >= 1e6
    ]
    lines.append(
        f"  at least {phase['seconds_per_step']:.4f} s a step, MFU {100 * phase['mfu']:.1f} %; "
        f"{phase['seconds_per_step_in_turn']:.4f} s where no exchange is hidden (matrix units alone "
        f"{seconds['compute']:.4f}, memory alone {seconds['memory']:.4f}, exchange {seconds['ici']:.4f} in a slice, "
        f"{seconds['dcn']:.4f} between)"
    )
    return lines


def describe_search(found: Sequence[Found]) -> str:
    """What fits, the fastest first, with the overrides that make it."""
    return "\n".join(
        f"{one.rows_per_second:>10,.0f} rows/s at best, {one.rows:>5} rows and {one.peak_memory_bytes / _GIB:5.2f} GiB "
        f"a device: {' '.join(one.overrides)}"
        for one in found
    )


# What two plans are compared by: name for people, key, divisor, unit.
_COMPARED = (
    ("chips", "chips", 1, ""),
    ("fits", "fits", None, ""),
    ("peak memory a chip", "peak_memory_bytes", _GIB, "GiB"),
    ("FLOPs a step", "flops", 1e12, "T"),
    ("memory traffic a chip and step", "bytes", 1e9, "GB"),
    ("step", "seconds_per_step", 1, "s"),
    ("MFU", "mfu", 0.01, "%"),
    ("run", "seconds", 3600, "h"),
    ("chip-hours", "chip_hours", 1, ""),
    ("cost", "cost", 1, ""),
)


def read_plan(file: str) -> dict[str, Any]:
    """A plan that `bertjax plan --output` kept, as far as `compare_plans` shows it.

    Raises:
      UsageError: it is none.
    """
    try:
        plan = read_json_object(Path(file))
        for _, key, divisor, _ in _COMPARED:
            kinds = (bool,) if divisor is None else (int, float, type(None))
            if type(plan[key]) not in kinds:
                raise ValueError(f"its {key} is {quoted(plan[key])}")
    except KeyError as error:
        raise UsageError(f"{file} is no plan that --output wrote (it has no {error})") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no plan that --output wrote ({first_line(error)})") from error
    return plan


def compare_plans(names: tuple[str, str], plans: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Two plans side by side, and what the second is of the first."""
    rows = [("", *names, "")]
    for label, key, divisor, unit in _COMPARED:
        values = [plan[key] for plan in plans]
        if divisor is None or None in values:
            rows.append((label, *("-" if value is None else str(value) for value in values), ""))
            continue
        shown = [f"{value / divisor:,.4g} {unit}".rstrip() for value in values]
        rows.append((label, *shown, f"x {values[1] / values[0]:.3f}" if values[0] else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _figure(value: float) -> str:
    """With a digit after the point, or, of a small model, with two that count."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"
