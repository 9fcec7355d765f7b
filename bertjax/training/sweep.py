"""Many runs of one config with other fields: each kept when it is done, selected on dev (section A.3 of the paper)."""

import dataclasses
import functools
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import jax
from etils import epath

from bertjax.config.run import RunConfig
from bertjax.config.trials import grid_values, load_trials
from bertjax.errors import BertjaxError, UsageError
from bertjax.inference.cached_features import training_task
from bertjax.metrics.selection import score
from bertjax.presets import cross_product, trials_of
from bertjax.tasks.build import build_task, parse_config
from bertjax.training import train as loop
from bertjax.training.agreement import broadcast_from_host0, go_on_after
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_config import experiment_config, parse_config
from bertjax.training.progress import read_results
from bertjax.training.workdir import (
    RESULTS,
    acquire_lock,
    check_unrelated_files,
    create,
    resolve,
    result_differences,
    saved_init_fingerprint,
)
from bertjax.utils.io import write_atomic
from bertjax.utils.terminal import duration, progress_bar

logger = logging.getLogger(__name__)

SWEEP = "sweep.json"
TRIALS = "trials"
SEED = "seed"
_PLAIN = "+,()' "


def sweep(
    experiment: str, overrides: Sequence[str], grid: Sequence[str], seeds: int, path: str, start: str | None
) -> dict[str, Any]:
    """Runs the trials of an experiment, each with several seeds; see `run_sweep`.

    Args:
      experiment: `FILE[:ARGUMENTS]`.
      overrides: `--config.FIELD=VALUE`, that hold for every trial; that of `seed` is the first one.
      grid: `FIELD=VALUE,VALUE`; where there is none, what the experiment itself yields.
      seeds: random restarts of each setting.
      path: the workdir.
      start: checkpoint that each trial starts from.

    Raises:
      UsageError: the grid cannot be used, and as `run_sweep`.
      BertjaxError: as `run_sweep`.
    """
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}; it must be at least 1")
    # What is given on the command line holds for every trial.
    given = [item for item in overrides if not item.startswith(f"--config.{SEED}=")]
    first = experiment_config(experiment, overrides, start).seed

    def overridden(more: list[str]) -> Any:
        return experiment_config(experiment, [*more, *given], start)

    def configure(trial: dict[str, Any]) -> RunConfig:
        return parse_config(overridden([f"--config.{field}={value}" for field, value in trial.items()]))

    if grid:
        settings = cross_product(grid_values(grid, given, overridden))
    else:
        settings = _without(load_trials(experiment, trials_of), given)
    trials = [{**setting, SEED: first + seed} for setting in settings for seed in range(seeds)]
    return run_sweep(configure, trials, path, start)


def _without(trials: Sequence[dict[str, Any]], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The trials of an experiment's own grid without the fields that the command line sets, each once."""
    fixed = {item.removeprefix("--config.").partition("=")[0] for item in overrides}
    left = [{field: value for field, value in trial.items() if field not in fixed} for trial in trials]
    return [trial for index, trial in enumerate(left) if trial not in left[:index]]


def run_sweep(
    configure: Callable[[dict[str, Any]], RunConfig],
    trials: Sequence[dict[str, Any]],
    path: str,
    init_from: str | None,
) -> dict[str, Any]:
    """Runs the trials one after the other in this process, so that all of one shape share a compilation.

    A finished trial is not run again; one that a signal stopped goes on. A trial that fails is noted and the next one
    begins; one that does not fail alike in all processes ends them. Of all finished trials, the best alone keeps its
    checkpoints.

    Args:
      configure: a trial's fields to its settings.
      trials: fields and their values; those that differ in `seed` alone are restarts of one setting.
      path: the workdir of the sweep.
      init_from: checkpoint that each trial starts from.

    Returns:
      What `sweep.json` holds: all trials, the settings with mean, deviation and best, the best trial, and how many
      trials are `left`.

    Raises:
      UsageError: a trial's settings, or the data of the first, cannot be used; or a trial finished with another config.
      BertjaxError: every trial failed.
    """
    workdir = resolve(path)
    check_unrelated_files(workdir, TRIALS)
    # All of them before any trial, so that a wrong field does not show after hours.
    runs = [configure(trial) for trial in trials]
    folders = [workdir / TRIALS / name_of(trial) for trial in trials]
    planned = list(zip(trials, runs, folders, strict=True))
    start = saved_fingerprint(find_checkpoint(init_from)) if init_from else ""
    finished = broadcast_from_host0(lambda: [_finished(*each, start) for each in planned])
    # Also refuses data that cannot be used, before any trial.
    _check_data(runs, folders, finished)
    with acquire_lock(create(path, TRIALS)):
        return _run_all(planned, finished, workdir, init_from)


def _run_all(
    planned: Sequence[tuple[dict[str, Any], RunConfig, epath.Path]],
    finished: Sequence[dict[str, Any] | None],
    workdir: epath.Path,
    init_from: str | None,
) -> dict[str, Any]:
    outcomes: list[dict[str, Any]] = []
    spent: list[float] = []
    count = len(planned)
    with progress_bar("trials", count, " trials", shown=sys.stderr.isatty()) as bar:
        for number, ((trial, settings, folder), outcome) in enumerate(zip(planned, finished, strict=True), 1):
            if outcome is None:
                left = f", about {duration(statistics.mean(spent) * (count - number + 1))} left" if spent else ""
                logger.info(f"trial {number} of {count}: {name_of(trial)}{left}")
                start = time.monotonic()
                outcome = _run(trial, settings, folder, init_from)
                if outcome is None:
                    logger.info(f"the sweep stopped in trial {number} of {count}; the same command goes on from here")
                    return {"stopped": True, "trials": outcomes}
                spent.append(time.monotonic() - start)
            outcomes.append(outcome)
            bar.update()
            whole = summary(outcomes) | {"left": count - number}
            if jax.process_index() == 0:
                _keep_best_checkpoint(outcomes, workdir)
                write_atomic(workdir / SWEEP, json.dumps(whole, indent=1) + "\n")
    if whole["best"] is None:
        raise BertjaxError(f"all {count} trials failed; the first: {outcomes[0]['error']}")
    logger.info(table(whole))
    logger.info(f"best: {workdir / TRIALS / name_of(whole['best']['trial'])}; all in {workdir / SWEEP}")
    return {"stopped": False, **whole}


def _check_data(
    runs: Sequence[RunConfig], folders: Sequence[epath.Path], finished: Sequence[dict[str, Any] | None]
) -> None:
    """Refuses finished trials of other data than there is now: they would be ranked beside each other.

    Raises:
      UsageError: names the first of them; or the data of the first trial cannot be used.
    """
    done = {folder for folder, outcome in zip(folders, finished, strict=True) if outcome}
    was = broadcast_from_host0(lambda: {str(folder): read_results(folder)["data_sha256"] for folder in sorted(done)})
    hashes: dict[str, str] = {}
    for number, (settings, folder) in enumerate(zip(runs, folders, strict=True)):
        if number and folder not in done:
            continue
        # Rows are the same however many are in a batch.
        told = json.dumps({**dataclasses.asdict(settings.data), "batch_size": 0}, sort_keys=True)
        if told not in hashes:
            task = build_task(settings, train=True)
            if not task.best_metric:
                raise UsageError(
                    "a sweep selects by what its trials reach on dev, and they are not evaluated; give a dev set, or "
                    "cut one off the training data with --config.data.dev_share=0.1"
                )
            hashes[told] = task.data_hash
        if folder in done and was[str(folder)] != hashes[told]:
            raise UsageError(f"the trial in {folder} was run on other data; choose another --workdir for the sweep")


def _run(
    trial: dict[str, Any], settings: RunConfig, folder: epath.Path, init_from: str | None
) -> dict[str, Any] | None:
    """What became of a trial; None where a signal stopped it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        task = training_task(settings, init_from)
        if loop.train(task, os.fspath(folder), init_from)["stopped"]:
            return None
        return broadcast_from_host0(lambda: outcome_of(trial, read_results(folder)))
    except Exception as error:  # Whatever ends one trial, the next may do better.
        text = go_on_after(os.fspath(folder), error)
        logger.info(f"the trial failed: {text}")
        return {"trial": trial, "error": text}


def _finished(trial: dict[str, Any], settings: RunConfig, folder: epath.Path, start: str) -> dict[str, Any] | None:
    """The outcome of a trial that was run before; None where it was not, or not to its end.

    Args:
      start: fingerprint of the parameters that it is to start from; "" is random ones.

    Raises:
      UsageError: it was run, or begun, otherwise than it would be now.
    """
    results = read_results(folder) if (folder / RESULTS).exists() else None
    began_with = results["started_from"] if results else saved_init_fingerprint(folder)
    shown = ""
    if began_with not in (None, start):
        shown = f"it started from {'other parameters than those of --init_from' if start else 'a checkpoint'}"
    elif results:
        shown = result_differences(results["config"], dataclasses.asdict(settings), of_best=True)
    if shown:
        raise UsageError(f"the trial in {folder} was run otherwise ({shown}); choose another --workdir for the sweep")
    return outcome_of(trial, results) if results else None


def outcome_of(trial: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """What a sweep notes of a finished trial: its fields and metrics, and the `score` it was selected by.

    Args:
      trial: fields and their values.
      results: what its `results.json` holds. Of the metric that they name, more is better or less, as `score` knows.
    """
    name = results["selected_by"]
    metrics = {key: value for key, value in results.items() if isinstance(value, float)}
    told = {"trial": trial, "score": results[name], "score_name": name, "metrics": metrics}
    return {**told, "started_from": results["started_from"]}


def name_of(trial: dict[str, Any]) -> str:
    """A folder's name that says what is special about a trial; what no folder should have in its name as in a URL."""
    return ",".join(f"{field}={quote(str(value), _PLAIN)}" for field, value in sorted(trial.items())) or "default"


def setting_of(trial: dict[str, Any]) -> dict[str, Any]:
    """A trial's fields but for the seed: what restarts have in common."""
    return {field: value for field, value in trial.items() if field != SEED}


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """All trials; each setting's mean, deviation and best over its seeds, the best setting first; the best trial."""
    # Of losses and errors, less is better.
    selected_by = next((outcome["score_name"] for outcome in outcomes if "score" in outcome), "")
    better = functools.partial(score, selected_by)
    settings: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        settings.setdefault(name_of(setting_of(outcome["trial"])), []).append(outcome)
    rows = []
    for name, members in settings.items():
        scores = [member["score"] for member in members if "score" in member]
        if scores:
            deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
            row = {"mean": statistics.mean(scores), "deviation": deviation, "best": max(scores, key=better)}
            rows.append({"setting": name, "trials": len(scores), "failed": len(members) - len(scores), **row})
        else:
            rows.append({"setting": name, "trials": 0, "failed": len(members)})
    rows.sort(key=lambda row: better(row["mean"]) if "mean" in row else -math.inf, reverse=True)
    finished = [outcome for outcome in outcomes if "score" in outcome]
    best = max(finished, key=lambda outcome: better(outcome["score"]), default=None)
    return {"trials": outcomes, "settings": rows, "best": best}


def table(whole: dict[str, Any]) -> str:
    """The settings as text, the best first."""
    title = f"{whole['best']['score_name']} on dev"
    width = 2 + max(len(title), *(len(row["setting"]) for row in whole["settings"]))
    lines = [f"{title:<{width}}{'trials':>7}{'mean':>9}{'dev.':>9}{'best':>9}{'failed':>8}"]
    for row in whole["settings"]:
        scores = "".join(f"{row[name]:>9.4f}" if name in row else f"{'':>9}" for name in ("mean", "deviation", "best"))
        lines.append(f"{row['setting']:<{width}}{row['trials']:>7}{scores}{row['failed']:>8}")
    return "\n".join(lines)


def _keep_best_checkpoint(outcomes: list[dict[str, Any]], workdir: epath.Path) -> None:
    best = summary(outcomes)["best"]
    for outcome in outcomes:
        folder = workdir / TRIALS / name_of(outcome["trial"]) / CHECKPOINTS
        if outcome is not best and "score" in outcome and folder.exists():
            folder.rmtree()
