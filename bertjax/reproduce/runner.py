"""Runner of a table: selects the pending runs, estimates their duration and runs them."""

import dataclasses
import logging
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bertjax.config.load import experiment_file, experiments_folder, run_experiment
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.estimate import DEFAULT_MFU
from bertjax.inference.encode import add_guide_vectors
from bertjax.inference.ensemble import ensemble
from bertjax.model.flops import peak_flops_per_second
from bertjax.reproduce.results import Results, update_index
from bertjax.reproduce.runs import load_released
from bertjax.reproduce.table import Run, Table, missing_data
from bertjax.tasks.build import build_task
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.training import train as loop
from bertjax.training.cached_features import add_cached_features
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_config import checkpoint_config, choose_split, experiment_config
from bertjax.training.multihost import broadcast_from_host0
from bertjax.training.preemption import stop_requests
from bertjax.training.sweep import sweep
from bertjax.utils.terminal import duration

logger = logging.getLogger(__name__)


def load_table(config: str) -> Table:
    """Loads a table by calling `get_table` of an experiment `FILE[:ARGUMENTS]`."""
    experiment, arguments = run_experiment(config)
    table = experiment["get_table"](arguments) if "get_table" in experiment else None
    if not isinstance(table, Table):
        raise UsageError(
            f"{experiment['__file__']} needs a function get_table that returns a bertjax.reproduce.table.Table"
        )
    return table


@dataclasses.dataclass(frozen=True)
class Plan:
    """Runs of a table, dependencies first, with the names of finished runs and a speed in FLOP/s for time estimates."""

    runs: tuple[Run, ...]
    done: Set[str]
    flops_per_second: float
    speed_source: str

    @property
    def missing_data(self) -> dict[str, str]:
        """Maps the name of each unfinished run that lacks data to a description of this data."""
        unfinished = (run for run in self.runs if run.name not in self.done)
        return {run.name: data for run in unfinished if (data := missing_data([run], self.done))}

    @property
    def pending(self) -> list[Run]:
        """Unfinished runs whose data is available."""
        skipped = self.done | self.missing_data.keys()
        return [run for run in self.runs if run.name not in skipped]


def plan_table(table: Table, results: Results) -> Plan:
    """Returns a table's `Plan`. Process 0 determines which runs are done."""
    runs = tuple(table.runs())
    done = broadcast_from_host0(lambda: sorted(results.finished(runs)))
    return Plan(runs, set(done), *_speed(runs, results))


def _speed(runs: Sequence[Run], results: Results) -> tuple[float, str]:
    """Returns the training speed in FLOP/s, measured in finished runs if possible, and its source as text."""
    timed = [run for run in runs if run.name in results.seconds and run.flops]
    if timed:
        speed = sum(run.flops for run in timed) / sum(results.seconds[run.name] for run in timed)
        return speed, f"speed of {len(timed)} finished runs"
    peak, source = peak_flops_per_second(jax.devices())
    return DEFAULT_MFU * (peak or 1e12), f"{DEFAULT_MFU:.0%} of {source}"


def describe_plan(plan: Plan, results: str) -> str:
    """Formats each run as text: state or estimated time and, if unfinished, its command for the folder `results`."""
    lines = []
    skipped, pending = plan.missing_data, plan.pending
    states = {name: f"skipped: needs {data}" for name, data in skipped.items()} | dict.fromkeys(plan.done, "done")
    for number, run in enumerate(plan.runs, 1):
        state = states.get(run.name, f"about {duration(run.flops / plan.flops_per_second)}")
        lines.append(f"{number:>3} {run.name:<40} {state}")
        if run.name not in plan.done:
            lines.append(f"      {run.command(results)}")
    seconds = sum(run.flops for run in pending) / plan.flops_per_second
    missing = f", {len(skipped)} skipped for missing data" if skipped else ""
    lines.append(
        f"{len(pending)} of {len(plan.runs)} runs to do{missing}, about {duration(seconds)} at "
        f"{plan.flops_per_second / 1e9:,.0f} GFLOP/s ({plan.speed_source})"
    )
    return "\n".join(lines)


def reproduce(config: str, table: Table, results: Results, plan: Plan) -> dict[str, Any]:
    """Executes the pending runs of a table. If a run fails, only the runs that depend on it are skipped.

    `config`, the `FILE:ARGUMENTS` of the table, is recorded in the results folder for `bertjax table`.

    Returns:
      A dictionary: `stopped` (whether a signal stopped the execution), `done` (names of finished runs), `failed`
      (reason by run name) and, unless stopped, `missing_data` (see `Plan.missing_data`).
    """
    ((folder, _),) = results.sources
    done, failed, pending = set(plan.done), {}, plan.pending
    if not done and not pending:
        raise UsageError(f"no run of {config} can start; the first run needs {plan.missing_data[plan.runs[0].name]}")
    is_host0 = jax.process_index() == 0
    if is_host0:
        update_index(folder, {table.name: _portable_config(config)}, {})
    with stop_requests() as stop_requested:
        for number, run in enumerate(pending, 1):
            if failed_dependencies := [each.name for each in run.dependencies if each.name in failed]:
                failed[run.name] = f"{failed_dependencies[0]} failed"
                continue
            if is_host0:
                seconds = sum(each.flops for each in pending[number - 1 :]) / _speed(plan.runs, results)[0]
                logger.info(f"run {number} of {len(pending)}: {run.name}, about {duration(seconds)} left")
                logger.info(run.command(folder))
            # Do not record the duration of a resumed run, because this process trains only some of its steps.
            resumed = broadcast_from_host0(lambda run=run: (epath.Path(folder) / run.name).exists())
            start = time.monotonic()
            try:
                # A signal after the last step of a run does not stop that run.
                if stop_requested() or _execute(run, folder)["stopped"]:
                    return {"stopped": True, "done": sorted(done), "failed": failed}
                broadcast_from_host0(lambda run=run: _check_outcome(run, results))
            except BertjaxError as error:
                if jax.process_count() > 1 and not error.on_all_hosts:
                    raise
                failed[run.name] = first_line(error)
                logger.info(f"{run.name} failed: {error}")
                continue
            finally:
                jax.clear_caches()
            done.add(run.name)
            if is_host0 and not resumed:
                results.seconds[run.name] = time.monotonic() - start
                update_index(folder, {}, {run.name: results.seconds[run.name]})
    return {"stopped": False, "done": sorted(done), "failed": failed, "missing_data": plan.missing_data}


def _check_outcome(run: Run, results: Results) -> None:
    if results.outcome(run) is None:
        raise BertjaxError("some trials failed (see above); run the same command again to repeat them")


def _portable_config(config: str) -> str:
    """Returns `FILE[:ARGUMENTS]`, where FILE is the name of a packaged experiment, or else an absolute path."""
    name, colon, arguments = config.partition(":")
    file, folder = Path(experiment_file(name)).resolve(), experiments_folder().resolve()
    packaged = file.relative_to(folder).with_suffix("") if file.is_relative_to(folder) else file
    return f"{packaged}{colon}{arguments}"


def _initial_checkpoint(run: Run, results: str) -> epath.Path | None:
    if run.init_from is None:
        return None
    if run.init_from.released:
        return find_checkpoint(load_released(run.init_from.released).path)
    checkpoint = run.init_from.checkpoint(results, run.init_step)
    if run.init_step and not epath.Path(checkpoint).exists():
        folder = f"{results}/{run.init_from.name}"
        raise BertjaxError(f"{folder} lacks step {run.init_step:,}; delete or rename the folder to repeat the run")
    return find_checkpoint(checkpoint)


def _execute(run: Run, results: str) -> dict[str, Any]:
    folder = f"{results}/{run.name}"
    if run.members:
        checkpoints = [find_checkpoint(member.checkpoint(results)) for member in run.members]
        configs = [choose_split(checkpoint_config(checkpoint, []), SPLITS[0]) for checkpoint in checkpoints]
        return {"stopped": False, **ensemble(checkpoints, configs, folder)}
    init_from = _initial_checkpoint(run, results)
    if run.seeds:
        return sweep(run.config, run.overrides, (), run.seeds, folder, init_from, add_guide_vectors)
    task = build_task(experiment_config(run.config, run.overrides, init_from), train=True)
    add_cached_features(task, init_from)
    add_guide_vectors(task)
    return loop.train(task, folder, init_from)
