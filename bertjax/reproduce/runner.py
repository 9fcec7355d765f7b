"""Runs what a table needs, in the right order, and goes on where it was stopped."""

import dataclasses
import logging
import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bertjax.config.load import experiment_file
from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.inference.cached_features import training_task
from bertjax.inference.ensemble import ensemble
from bertjax.model.flops import peak_flops_per_second
from bertjax.reproduce.paper import table_names
from bertjax.reproduce.results import Results, note, read
from bertjax.reproduce.table import Run, Table
from bertjax.tasks.build import parse_config
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.training import train as loop
from bertjax.training.agreement import broadcast_from_host0, go_on_after
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_config import checkpoint_config, choose_split, experiment_config
from bertjax.training.sweep import sweep
from bertjax.utils.terminal import duration

logger = logging.getLogger(__name__)

# The table that the paper lacks.
OWN = "figure3"
# Of the peak, where nothing was run yet.
_USUAL_UTILISATION = 0.4


def experiment_of_table(name: str) -> str:
    """The experiment that comes with the program for a table of the paper, or one of our own.

    Raises:
      UsageError: there is none.
    """
    known = (*table_names(), OWN)
    if name not in known:
        raise UsageError(f"there is no table {name[:20]!r}; known: {', '.join(known)}")
    return f"tables/table{name}" if name.isdigit() else f"tables/{name}"


def load_table(config: str) -> Table:
    """The table that `get_table` of an experiment's file describes.

    Args:
      config: `FILE[:ARGUMENTS]`.

    Raises:
      UsageError: there is no such file, or it describes none.
    """
    file, _, arguments = config.partition(":")
    file = experiment_file(file)
    try:
        experiment = runpy.run_path(file)
        if "get_table" not in experiment:
            raise UsageError(f"{file} has no function get_table, which describes a table")
        table = experiment["get_table"](arguments)
    except UsageError:
        raise
    except Exception as error:  # What a user's own `get_table` raises is anything.
        raise UsageError(f"get_table of {file} cannot be run: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(table, Table):
        raise UsageError(f"get_table of {file} must return a bertjax.reproduce.table.Table")
    return table


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done for a table.

    Attributes:
      runs: of it, each after those that it needs.
      done: names of those that are finished.
      rate: FLOP/s that is reckoned with.
      source: where that comes from.
    """

    runs: tuple[Run, ...]
    done: frozenset[str]
    rate: float
    source: str

    def seconds(self, run: Run) -> float:
        """About how long a run takes."""
        return run.flops / self.rate

    @property
    def left(self) -> list[Run]:
        """What is to be run, and can be."""
        return [run for run in self.runs if run.name not in self.done and not self.lacking(run)]

    def lacking(self, run: Run) -> str:
        """As `Run.lacking`."""
        return run.lacking(lambda one: one.name in self.done)


def plan(table: Table, results: Results) -> Plan:
    """What there is to do, and about how long it takes: by runs that are finished, or by what is usual here."""
    runs = table.runs()
    done = frozenset(run.name for run in runs if results.outcome(run))
    return Plan(tuple(runs), done, *_rate(runs, results))


def _rate(runs: Sequence[Run], results: Results) -> tuple[float, str]:
    """FLOP/s to reckon with, and where that comes from."""
    timed = [run for run in runs if run.name in results.seconds and run.flops]
    if timed:
        rate = sum(run.flops for run in timed) / sum(results.seconds[run.name] for run in timed)
        return rate, f"as {len(timed)} finished runs took"
    peak, source = peak_flops_per_second(jax.devices())
    return _USUAL_UTILISATION * (peak or 1e12), f"{_USUAL_UTILISATION:.0%} of {source}"


def describe_plan(plan: Plan, results: str) -> str:
    """The plan for a person: runs with their times and commands, and what cannot be run."""
    lines = []
    for number, run in enumerate(plan.runs, 1):
        if run.name in plan.done:
            state = "done"
        elif lacking := plan.lacking(run):
            state = f"left out: needs {lacking}"
        else:
            state = f"about {duration(plan.seconds(run))}"
        lines.append(f"{number:>3} {run.name:<40} {state}")
        if run.name not in plan.done:
            lines.append(f"      {run.command(results)}")
    left = plan.left
    lines.append(
        f"{len(left)} of {len(plan.runs)} runs to do, about {duration(sum(map(plan.seconds, left)))} at "
        f"{plan.rate / 1e9:,.0f} GFLOP/s ({plan.source})"
    )
    return "\n".join(lines)


def reproduce(config: str, table: Table, path: str) -> dict[str, Any]:
    """Runs what is missing of a table.

    Args:
      config: `FILE:ARGUMENTS` that the table was loaded from; kept with the results.
      table: to be filled.
      path: folder of all results.

    Returns:
      Names of runs `done` now and before, `failed`, and `lacking` data; and whether a signal `stopped` it.

    Raises:
      UsageError: the folder is one file of kept results, or the data for all runs is lacking.
      BertjaxError: what it holds is damaged, or of other runs.
    """
    results = read(path)
    first = jax.process_index() == 0
    if results.kept is not None:
        raise UsageError(f"--results {path} is a file of kept results; give a folder")
    runs = table.runs()
    # Of several processes all have to run the same.
    done, failed = set(broadcast_from_host0(lambda: [run.name for run in runs if results.outcome(run)])), {}
    lacking = {run.name: what for run in runs if (what := run.lacking(lambda one: one.name in done))}
    left = [run for run in runs if run.name not in {*done, *lacking}]
    if not done and not left:
        raise UsageError(f"nothing of {config} can be run: it needs {lacking[runs[0].name]}")
    if first:
        note(results.place, {table.number: _from_anywhere(config, table.number)}, {})
    for number, run in enumerate(left, 1):
        if missing := [earlier.name for earlier in run.needs if earlier.name in failed]:
            failed[run.name] = f"{missing[0]} failed"
            continue
        if first:
            seconds = sum(one.flops for one in left[number - 1 :]) / _rate(runs, results)[0]
            logger.info(f"run {number} of {len(left)}: {run.name}; about {duration(seconds)} left\n{run.command(path)}")
        # One that was begun before takes less than it should.
        whole = broadcast_from_host0(lambda run=run: not (epath.Path(results.place) / run.name).exists())
        began = time.monotonic()
        try:
            if _execute(run, results.place)["stopped"]:
                return {"stopped": True, "done": sorted(done), "failed": failed}
            if not broadcast_from_host0(lambda run=run: results.outcome(run) is not None):
                raise BertjaxError("trials of it failed, as told above; the same command tries them again")
        except BertjaxError as error:
            failed[run.name] = go_on_after(f"{results.place}/{run.name}", error)
            logger.info(f"{run.name} failed: {error}")
            continue
        finally:
            jax.clear_caches()
        done.add(run.name)
        if whole and first:
            results.seconds[run.name] = time.monotonic() - began
            note(results.place, {}, {run.name: results.seconds[run.name]})
    return {"stopped": False, "done": sorted(done), "failed": failed, "lacking": lacking}


def _from_anywhere(config: str, number: str) -> str:
    """A config by a name that holds in any folder, and for a table that comes with the program on any machine."""
    file, colon, given = config.partition(":")
    if (number in table_names() or number == OWN) and Path(experiment_file(file)).samefile(
        experiment_file(experiment_of_table(number))
    ):
        return f"{experiment_of_table(number)}{colon}{given}"
    return f"{Path(experiment_file(file)).absolute()}{colon}{given}"


def _execute(run: Run, place: str) -> dict[str, Any]:
    """Does what the command of a run does."""
    folder = f"{place}/{run.name}"
    if run.members:
        checkpoints = [find_checkpoint(member.checkpoint(place)) for member in run.members]
        return {"stopped": False, **ensemble(checkpoints, _on_dev, folder)}
    start = run.start.checkpoint(place, run.start_step) if run.start else None
    if run.start_step and not epath.Path(start).exists():
        raise BertjaxError(
            f"{place}/{run.start.name} has no checkpoint of step {run.start_step:,} any more; move that folder away, "
            "and the same command runs it again"
        )
    if run.seeds:
        return sweep(run.config, run.overrides, (), run.seeds, folder, start)
    settings = parse_config(experiment_config(run.config, run.overrides, start))
    return loop.train(training_task(settings, start), folder, start)


def _on_dev(checkpoint: epath.Path) -> RunConfig:
    return parse_config(choose_split(checkpoint_config(checkpoint, []), SPLITS[0]))
