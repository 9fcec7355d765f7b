"""Many runs of one config with other fields: each kept when it is done, selected on dev (section A.3 of the paper)."""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.errors import BertjaxError
from bertjax.tasks.task import Task
from bertjax.training import loop
from bertjax.training.checkpoint import CHECKPOINTS, absolute
from bertjax.training.progress import RESULTS
from bertjax.training.workdir import write_atomically
from bertjax.training.writers import duration, say

SWEEP = "sweep.json"
_TRIALS = "trials"
_SEED = "seed"


def run_sweep(
    build: Callable[[dict[str, Any]], tuple[ConfigDict, Task]],
    trials: Sequence[dict[str, Any]],
    path: str,
    init_from: str | None,
) -> dict[str, Any]:
    """Runs the trials one after the other in this process, so that all of one shape share a compilation.

    A finished trial is not run again; one that a signal stopped goes on. A trial that fails is noted and the next one
    begins. Of all finished trials, the best alone keeps its checkpoints.

    Args:
      build: a trial's fields to its config and task.
      trials: fields and their values; those that differ in `seed` alone are restarts of one setting.
      path: the workdir of the sweep.
      init_from: checkpoint that each trial starts from.

    Returns:
      What `sweep.json` holds: all trials, the settings with mean, deviation and best, and the best trial.

    Raises:
      BertjaxError: every trial failed.
    """
    workdir = absolute(path)
    outcomes: list[dict[str, Any]] = []
    spent: list[float] = []
    for number, trial in enumerate(trials, 1):
        folder = workdir / _TRIALS / name_of(trial)
        start = time.monotonic()
        ran = not (folder / RESULTS).exists()
        if ran:
            left = f", about {duration(statistics.mean(spent) * (len(trials) - number + 1))} left" if spent else ""
            say(f"trial {number} of {len(trials)}: {name_of(trial)}{left}")
        outcome, stopped = _outcome(build, trial, folder, init_from)
        if stopped:
            say(f"the sweep stopped in trial {number} of {len(trials)}; the same command goes on from here")
            return {"stopped": True, "trials": outcomes}
        if ran:
            spent.append(time.monotonic() - start)
        outcomes.append(outcome)
        _keep_best_checkpoint(outcomes, workdir)
        write_atomically(workdir / SWEEP, json.dumps(summary(outcomes), indent=1) + "\n")
    whole = summary(outcomes)
    if whole["best"] is None:
        raise BertjaxError(f"all {len(trials)} trials failed; the first: {outcomes[0]['error']}")
    say(table(whole))
    say(f"best: {workdir / _TRIALS / name_of(whole['best']['trial'])}; all in {workdir / SWEEP}")
    return {"stopped": False, **whole}


def _outcome(
    build: Callable[[dict[str, Any]], tuple[ConfigDict, Task]],
    trial: dict[str, Any],
    folder: epath.Path,
    init_from: str | None,
) -> tuple[dict[str, Any], bool]:
    """What became of a trial, and whether a signal stopped it."""
    try:
        config, task = build(trial)
        if not (folder / RESULTS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            if loop.train(config, task, os.fspath(folder), init_from)["stopped"]:
                return {}, True
        results = json.loads((folder / RESULTS).read_text())
    except BertjaxError as error:
        say(f"the trial failed: {error}")
        return {"trial": trial, "error": str(error)}, False
    metrics = {name: value for name, value in results.items() if isinstance(value, float)}
    return {"trial": trial, "score": results[task.best_by], "score_name": task.best_by, "metrics": metrics}, False


def name_of(trial: dict[str, Any]) -> str:
    """A folder's name that says what is special about a trial."""
    return ",".join(f"{field.rpartition('.')[2]}={value}" for field, value in sorted(trial.items())) or "default"


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """All trials; each setting's mean, deviation and best over its seeds, the best setting first; the best trial."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        setting = {field: value for field, value in outcome["trial"].items() if field != _SEED}
        settings.setdefault(name_of(setting), []).append(outcome)
    rows = []
    for name, members in settings.items():
        scores = [member["score"] for member in members if "score" in member]
        if scores:
            deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
            row = {"mean": statistics.mean(scores), "deviation": deviation, "best": max(scores)}
            rows.append({"setting": name, "trials": len(scores), "failed": len(members) - len(scores), **row})
        else:
            rows.append({"setting": name, "trials": 0, "failed": len(members)})
    rows.sort(key=lambda row: -row.get("mean", float("-inf")))
    finished = [outcome for outcome in outcomes if "score" in outcome]
    best = max(finished, key=lambda outcome: outcome["score"], default=None)
    return {"trials": outcomes, "settings": rows, "best": best}


def table(whole: dict[str, Any]) -> str:
    """The settings as text, the best first."""
    lines = [
        f"{whole['best']['score_name'] + ' on dev':<44}{'trials':>7}{'mean':>9}{'dev.':>9}{'best':>9}{'failed':>8}"
    ]
    for row in whole["settings"]:
        scores = "".join(f"{row[name]:>9.4f}" if name in row else f"{'':>9}" for name in ("mean", "deviation", "best"))
        lines.append(f"{row['setting']:<44}{row['trials']:>7}{scores}{row['failed']:>8}")
    return "\n".join(lines)


def _keep_best_checkpoint(outcomes: list[dict[str, Any]], workdir: epath.Path) -> None:
    best = summary(outcomes)["best"]
    for outcome in outcomes:
        folder = Path(os.fspath(workdir / _TRIALS / name_of(outcome["trial"]))) / CHECKPOINTS
        if outcome is not best and "score" in outcome and folder.exists():
            epath.Path(folder).rmtree()
