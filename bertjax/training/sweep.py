"""Hyperparameter sweeps: trials of an experiment, selected on the dev set (section A.3 of the paper)."""

import copy
import dataclasses
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
from ml_collections import ConfigDict

from bertjax.config.load import apply_overrides, load_config, overridden_fields
from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, DivergenceError, UsageError, first_line
from bertjax.presets import cross_product, grid_values, load_settings
from bertjax.tasks.build import build_task, parse_config
from bertjax.tasks.task import Task
from bertjax.training import train as loop
from bertjax.training import workdir as workdirs
from bertjax.training.cached_features import add_cached_features
from bertjax.training.checkpoint import CHECKPOINTS, resolve_checkpoint_path, saved_fingerprint
from bertjax.training.checkpoint_config import fill_unset_fields
from bertjax.training.multihost import broadcast_from_host0
from bertjax.training.preemption import stop_requests
from bertjax.training.results import read_results
from bertjax.utils.json_files import write_json
from bertjax.utils.terminal import duration, progress_bar

logger = logging.getLogger(__name__)

SWEEP = "sweep.json"
TRIALS = "trials"
SEED = "seed"
# Special characters that are not percent-encoded in folder names of trials.
_SAFE = "+,()' "
# Fields of a trial's `results.json` that `sweep.json` needs.
_FIELDS = ("selected_by", "lower_is_better", "started_from")


@dataclasses.dataclass(frozen=True)
class Trial:
    """Training run of a sweep. `fields` are the config fields that the sweep sets in this run, including the seed."""

    fields: dict[str, Any]
    config: RunConfig
    folder: epath.Path


def sweep(
    experiment: str,
    overrides: Sequence[str],
    grid: Sequence[str],
    seeds: int,
    path: str,
    init_from: epath.Path | None,
    prepare: Callable[[Task], None],
) -> dict[str, Any]:
    """Runs each setting of an experiment with several seeds, one trial after the other in this process.

    A setting is a combination of values for the fields that the sweep varies, without the seed. A trial is a setting
    with one seed. Trials with the same shapes share a compilation. Finished trials are not run again. If a trial fails,
    its error is recorded and the next trial starts. The checkpoints of all finished trials except the best are deleted.

    Args:
      experiment: `FILE[:ARGUMENTS]`.
      overrides: `--config.FIELD=VALUE` flags of all trials; `config.seed` is the first seed.
      grid: `FIELD=VALUE,VALUE` items. If empty, the experiment defines the settings.
      seeds: number of seeds per setting. Each seed is one trial.
      path: workdir of the sweep.
      init_from: checkpoint that initializes each trial (None: random parameters).
      prepare: function that completes the data of each trial's task, for example with vectors of a guide model.

    Returns:
      `stopped` (whether a signal stopped the sweep), and the content of `sweep.json`: `trials`, `settings` with
      statistics over seeds, the `best` trial, and `left`, the number of trials not yet run. A stopped sweep returns
      only `stopped` and `trials`.
    """
    base = load_config(experiment, overrides)
    fixed = [item for item in overrides if not item.startswith(f"--config.{SEED}=")]

    def load(fields: Sequence[str]) -> ConfigDict:
        return apply_overrides(copy.deepcopy(base), fields)

    if grid:
        settings = cross_product(grid_values(grid, fixed, load))
    else:
        names = overridden_fields(fixed)  # Remove these fields from the settings, which may make some settings equal.
        settings = []
        for setting in load_settings(experiment):
            remaining = {field: value for field, value in setting.items() if field not in names}
            settings += [remaining] if remaining not in settings else []
    workdir = resolve_checkpoint_path(path)
    workdirs.check_unrelated_files(workdir, TRIALS)
    # Check every config before the first trial starts.
    trials = []
    for fields in ({**setting, SEED: base.seed + seed} for setting in settings for seed in range(seeds)):
        config = parse_config(load([f"--config.{field}={value}" for field, value in fields.items()]))
        trials.append(Trial(fields, fill_unset_fields(config, init_from), workdir / TRIALS / trial_name(fields)))
    init_fingerprint = saved_fingerprint(init_from) if init_from else ""
    finished = broadcast_from_host0(lambda: [_finished_results(trial, init_fingerprint) for trial in trials])
    _check_data(trials, finished, prepare)
    return _run_trials(trials, finished, workdir, init_from, prepare)


def _run_trials(
    trials: Sequence[Trial],
    finished: Sequence[dict[str, Any] | None],
    workdir: epath.Path,
    init_from: epath.Path | None,
    prepare: Callable[[Task], None],
) -> dict[str, Any]:
    outcomes: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    seconds: list[float] = []
    with (
        workdirs.acquire_lock(workdirs.create(os.fspath(workdir), TRIALS)),
        progress_bar("trials", len(trials), " trials", shown=sys.stderr.isatty()) as bar,
        stop_requests() as stop_requested,
    ):
        for number, (trial, results) in enumerate(zip(trials, finished, strict=True), 1):
            if results is None:
                remaining = statistics.mean(seconds or [0]) * (len(trials) - number + 1)
                left = f", about {duration(remaining)} left" if seconds else ""
                logger.info(f"trial {number} of {len(trials)}: {trial.folder.name}{left}")
                start = time.monotonic()
                # Check for a signal here, because one after the last step of a trial does not stop that trial.
                results = None if stop_requested() else _run_trial(trial, init_from, prepare)
                if results is None:
                    logger.info(f"stopped in trial {number} of {len(trials)}; run the same command to resume the sweep")
                    return {"stopped": True, "trials": outcomes}
                seconds.append(time.monotonic() - start)
            outcomes.append(_outcome(trial.fields, results))
            bar.update()
            content = summarize(outcomes) | {"left": len(trials) - number}
            if jax.process_index() == 0:
                for done, outcome in zip(trials, outcomes, strict=False):
                    folder = done.folder / CHECKPOINTS
                    if outcome is not content["best"] and "score" in outcome and folder.exists():
                        folder.rmtree()
                write_json(workdir / SWEEP, content)
    if content["best"] is None:
        raise BertjaxError(f"all {len(trials)} trials failed; error of the first: {outcomes[0]['error']}")
    logger.info(format_settings(content))
    logger.info(f"best trial: {workdir / TRIALS / trial_name(content['best']['trial'])}; all trials: {workdir / SWEEP}")
    return {"stopped": False, **content}


def _finished_results(trial: Trial, init_fingerprint: str) -> dict[str, Any] | None:
    """Returns the results of a finished trial, or None if the trial is not finished.

    Raises a UsageError if the run in the trial's workdir has a different config or different initial parameters.
    """
    results = read_results(trial.folder, _FIELDS) if (trial.folder / workdirs.RESULTS).exists() else None
    started_from = results["started_from"] if results else workdirs.saved_init_fingerprint(trial.folder)
    difference = ""
    if started_from not in (None, init_fingerprint):
        difference = "it started from parameters that differ from those of --init_from (default: random)"
    elif results:
        difference = workdirs.result_differences(results["config"], dataclasses.asdict(trial.config), of_best=True)
    if difference:
        raise UsageError(f"the trial in {trial.folder} is a different run: {difference}; choose another --workdir")
    return results


def _check_data(
    trials: Sequence[Trial], finished: Sequence[dict[str, Any] | None], prepare: Callable[[Task], None]
) -> None:
    """Raises a UsageError if the task has no dev set, or if the data changed since a finished trial was trained."""
    hashes: dict[str, str] = {}
    for number, (trial, results) in enumerate(zip(trials, finished, strict=True)):
        # Always check the first trial, so that unusable data fails before any trial runs.
        if number and results is None:
            continue
        # Read each dataset only once. Trials that differ only in the batch size have the same data.
        key = json.dumps({**dataclasses.asdict(trial.config.data), "batch_size": 0}, sort_keys=True)
        if key not in hashes:
            task = build_task(trial.config, train=True)
            if not task.best_metric:
                raise UsageError("no dev set to select the best trial; set a dev file or --config.data.dev_share=0.1")
            if any(finished):
                prepare(task)  # The data hash includes the data that `prepare` adds.
            hashes[key] = task.data_hash
        if results is not None and results["data_sha256"] != hashes[key]:
            raise UsageError(f"the trial in {trial.folder} was trained on different data; choose another --workdir")


def _run_trial(trial: Trial, init_from: epath.Path | None, prepare: Callable[[Task], None]) -> dict[str, Any] | None:
    """Runs a trial. Returns its results, or its error and whether it diverged, or None if a signal stopped it."""
    try:
        trial.folder.mkdir(parents=True, exist_ok=True)
        task = build_task(trial.config, train=True)
        add_cached_features(task, init_from)
        prepare(task)
        if loop.train(task, os.fspath(trial.folder), init_from)["stopped"]:
            return None
        return broadcast_from_host0(lambda: read_results(trial.folder, _FIELDS))
    except Exception as error:  # One failed trial should not stop the sweep.
        # If only this process failed, end it, because the other processes would wait for it.
        if jax.process_count() > 1 and not getattr(error, "on_all_hosts", False):
            raise
        text = first_line(error) if isinstance(error, BertjaxError) else f"{type(error).__name__}: {first_line(error)}"
        logger.info(f"trial failed: {text}")
        return {"error": text, "diverged": isinstance(error, DivergenceError)}


def _outcome(fields: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a trial for `sweep.json`. `results` is `results.json`, or has `error` and `diverged`."""
    if "error" in results:
        return {"trial": fields, **results}
    metric = results["selected_by"]
    metrics = {name: value for name, value in results.items() if isinstance(value, float)}
    outcome = {"trial": fields, "score": results[metric], "score_name": metric, "metrics": metrics}
    return outcome | {name: results[name] for name in ("lower_is_better", "started_from")}


def trial_name(fields: dict[str, Any]) -> str:
    """Returns the folder name of a trial, with special characters of values percent-encoded."""
    return ",".join(f"{field}={quote(str(value), _SAFE)}" for field, value in sorted(fields.items())) or "default"


def setting_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a trial's fields without the seed."""
    return {field: value for field, value in fields.items() if field != SEED}


def summarize(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the contents of `sweep.json`.

    These are all `trials`; the `settings`, best first, with statistics over seeds; and the `best` trial.
    """
    finished = [outcome for outcome in outcomes if "score" in outcome]
    # Negate losses and errors, so that larger is better.
    sign = -1 if finished and finished[0]["lower_is_better"] else 1
    settings: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        settings.setdefault(trial_name(setting_of(outcome["trial"])), []).append(outcome)
    rows: list[dict[str, Any]] = []
    for name, seeds in settings.items():
        scores = [outcome["score"] for outcome in seeds if "score" in outcome]
        row: dict[str, Any] = {"setting": name, "trials": len(scores), "failed": len(seeds) - len(scores)}
        if scores:
            deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
            top = sign * max(sign * value for value in scores)
            row |= {"mean": statistics.mean(scores), "deviation": deviation, "best": top}
        rows.append(row)
    rows.sort(key=lambda row: sign * row["mean"] if "mean" in row else -math.inf, reverse=True)
    best = max(finished, key=lambda outcome: sign * outcome["score"], default=None)
    return {"trials": outcomes, "settings": rows, "best": best}


def format_settings(content: dict[str, Any]) -> str:
    """Returns the settings of a sweep as a text table, best first."""
    title = f"{content['best']['score_name']} on dev"
    width = 2 + max(len(title), *(len(row["setting"]) for row in content["settings"]))
    lines = [f"{title:<{width}}{'trials':>7}{'mean':>9}{'std':>9}{'best':>9}{'failed':>8}"]
    for row in content["settings"]:
        scores = "".join(f"{row[name]:>9.4f}" if name in row else f"{'':>9}" for name in ("mean", "deviation", "best"))
        lines.append(f"{row['setting']:<{width}}{row['trials']:>7}{scores}{row['failed']:>8}")
    return "\n".join(lines)
