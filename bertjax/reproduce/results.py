"""Results of a table's runs, read from results folders or from a file that `bertjax table --keep` wrote."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.reproduce.table import Run
from bertjax.training.checkpoint import resolve_checkpoint_path, saved_fingerprint
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.results import read_results
from bertjax.training.sweep import SEED, SWEEP, TRIALS, setting_of, trial_name
from bertjax.training.workdir import RESULTS, result_differences
from bertjax.utils.io import read_json_object, write_atomic

# Name of a results folder's index file, which stores the requested tables and the durations of runs.
INDEX = "reproduce.json"
# Arguments of experiments that are paths of data. Comparisons of settings ignore them, since data may be moved.
_PATH_ARGUMENTS = ("corpus", "path", "train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Metrics of a finished run.

    Attributes:
      metrics: metrics of each seed on dev or held-out data.
      started_from: fingerprint of the initial parameters (default: empty, random parameters).
      fingerprint: fingerprint of the resulting parameters (default: empty, unknown or several seeds).
      members: fingerprints of the models in an ensemble.
    """

    metrics: tuple[dict[str, float], ...]
    started_from: str = ""
    fingerprint: str = ""
    members: tuple[str, ...] = ()


class Source(NamedTuple):
    """Results folder, or results file with the settings and the outcome of each run by name (None: a folder)."""

    path: str
    saved: dict[str, tuple[list[str], Outcome]] | None = None

    def outcome(self, run: Run) -> Outcome | None:
        """Returns the outcome of a run, or None if the run is unfinished or not in this source."""
        if self.saved is None:
            folder = epath.Path(self.path) / run.name
            return _sweep_outcome(folder, run) if run.seeds else _run_outcome(folder, run)
        settings, outcome = self.saved.get(run.name, ([], None))
        if outcome and settings != _settings(run):
            raise UsageError(
                f"{self.path} contains {run.name} with settings that differ from the table's: {' '.join(settings)}; "
                "remove it from --results"
            )
        return outcome


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of one or more sources. If several sources contain the same entry, the first source is used.

    Attributes:
      sources: results folders and files.
      tables: experiment (`FILE:ARGUMENTS`) of each requested table, by table name.
      seconds: duration in seconds of each run that was not interrupted, by run name.
    """

    sources: tuple[Source, ...]
    tables: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Path of the first source that is a folder, for printed commands; `RESULTS` if all sources are files."""
        return next((source.path for source in self.sources if source.saved is None), "RESULTS")

    def finished(self, runs: Iterable[Run]) -> set[str]:
        """Returns the names of the runs that are finished."""
        return {run.name for run in runs if self.outcome(run)}

    def outcome(self, run: Run) -> Outcome | None:
        """Returns the outcome of a run, or None if it is unfinished.

        Raises an error if the outcome has different settings, seeds, initial parameters or ensemble members than `run`.
        """
        source, outcome = self._lookup(run)
        if source is None or outcome is None:
            return None
        members = {result.fingerprint for member in run.members if (result := self.outcome(member))}
        if len(outcome.metrics) != max(run.seeds, 1):
            difference = f"has {len(outcome.metrics)} seeds, not {max(run.seeds, 1)}"
        elif run.init_from and self._init_fingerprint(run.init_from, run.init_step) not in ("", outcome.started_from):
            difference = f"did not start from the parameters of {run.init_from.name}"
        elif len(outcome.members) != len(run.members) or not members <= {*outcome.members}:
            difference = "has other ensemble members than the table"
        else:
            return outcome
        raise _mismatch(f"{source.path}/{run.name}", difference)

    def _lookup(self, run: Run) -> tuple[Source | None, Outcome | None]:
        return next(((source, found) for source in self.sources if (found := source.outcome(run))), (None, None))

    def _init_fingerprint(self, run: Run, step: int) -> str:
        """Returns the fingerprint of a run's parameters at `step` (0: see `Run.init_step`), or "" if it is unknown."""
        if run.fingerprint:
            return run.fingerprint
        if not step:
            outcome = self.outcome(run)
            return outcome.fingerprint if outcome else ""
        source = self._lookup(run)[0]
        checkpoint = epath.Path(run.checkpoint(source.path, step)) if source else None
        return saved_fingerprint(checkpoint) if checkpoint and checkpoint.exists() else ""


def _mismatch(path: str | epath.Path, difference: str) -> BertjaxError:
    return BertjaxError(f"{path} {difference}; delete or rename {path} to repeat the run")


def load_results(paths: Sequence[str]) -> Results:
    """Reads results folders and files. A folder may be empty or missing; a file, recognized by `.json`, may not."""
    sources, tables, seconds = zip(*map(_load_source, paths), strict=True)
    return Results(sources, _first_of(tables), _first_of(seconds))


def _first_of(dictionaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for values in reversed(dictionaries) for name, value in values.items()}


def _load_source(path: str) -> tuple[Source, dict[str, str], dict[str, float]]:
    """Reads a source, the experiments of its requested tables, and the durations of its runs."""
    folder = resolve_checkpoint_path(path)
    is_file = folder.suffix == ".json" or (folder.exists() and not folder.is_dir())
    file = folder if is_file else folder / INDEX
    if not is_file and not file.exists():
        return Source(os.fspath(folder)), {}, {}
    try:
        content = read_json_object(file)
        saved = {name: _from_json(run) for name, run in content["runs"].items()} if is_file else None
        return Source(os.fspath(folder), saved), content["tables"], content["seconds"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is not a results file ({type(error).__name__}: {first_line(error)}); use a file of `bertjax "
            "table --keep` or a folder of `bertjax reproduce`"
        ) from error


def _from_json(run: dict[str, Any]) -> tuple[list[str], Outcome]:
    texts = run["started_from"], run["fingerprint"]
    return run["settings"], Outcome(tuple(run["metrics"]), *texts, tuple(run["members"]))


def update_index(path: str, tables: Mapping[str, str], seconds: Mapping[str, float]) -> None:
    """Adds the experiments of requested tables and the durations of runs to a results folder's index.

    Reads the index again first, to keep entries that another process of `bertjax reproduce` has added.
    """
    _, old_tables, old_seconds = _load_source(path)
    folder = epath.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"tables": {**old_tables, **tables}, "seconds": {**old_seconds, **seconds}}
    write_atomic(folder / INDEX, json.dumps(content, indent=1) + "\n")


def save_results(results: Results, runs: Iterable[Run], tables: dict[str, str], file: Path) -> int:
    """Writes the outcomes of finished runs to a JSON file that `load_results` reads. Returns the number of runs.

    Raises a UsageError if the file already exists and contains other runs, which would be lost.
    """
    runs_by_name = {
        run.name: {"settings": _settings(run), **dataclasses.asdict(outcome)}
        for run in sorted(runs, key=lambda run: run.name)
        if (outcome := results.outcome(run))
    }
    lost = sorted({*(_load_source(str(file))[0].saved or ())} - runs_by_name.keys()) if file.exists() else []
    if lost:
        raise UsageError(
            f"--keep {file} contains {len(lost)} runs that would be lost, such as {lost[0]}; use a different file, "
            f"or add --results {file} and request all tables of this file"
        )
    seconds = {name: round(value, 1) for name, value in results.seconds.items() if name in runs_by_name}
    content = {"tables": tables, "seconds": dict(sorted(seconds.items())), "runs": runs_by_name}
    write_atomic(file, json.dumps(content, indent=1) + "\n")
    return len(runs_by_name)


def _settings(run: Run) -> list[str]:
    """Returns the experiment, its arguments and the overrides of a run, without paths of data."""
    file, _, arguments = run.config.partition(":")
    settings = [item for item in arguments.split(",") if item and item.partition("=")[0] not in _PATH_ARGUMENTS]
    return [Path(file).stem, *settings, *run.overrides]


def _run_outcome(folder: epath.Path, run: Run) -> Outcome | None:
    if not (folder / RESULTS).exists():
        return None
    results = read_results(folder)
    _check_config(run.members[0] if run.members else run, folder, results["config"])
    members = tuple(member["fingerprint"] for member in results.get("members", ()))
    started_from, fingerprint = results.get("started_from", ""), results.get("parameters_fingerprint", "")
    return Outcome((_floats(results),), started_from, fingerprint, members)


def _sweep_outcome(folder: epath.Path, run: Run) -> Outcome | None:
    """Returns the outcome of all seeds of the setting that is best on dev, or None if trials are missing."""
    if not (folder / SWEEP).exists():
        return None
    try:
        sweep = read_json_object(folder / SWEEP)
    except (OSError, ValueError) as error:
        raise _mismatch(folder / SWEEP, f"is damaged ({first_line(error)})") from error
    if sweep["left"] or sweep["best"] is None:
        return None
    finished = [trial for trial in sweep["trials"] if "score" in trial]
    folders = [folder / TRIALS / trial_name(trial["trial"]) for trial in finished]
    if not all((path / RESULTS).exists() for path in folders):
        return None
    for trial, path in zip(finished, folders, strict=True):
        _check_config(run, folder, read_results(path)["config"], trial["trial"])
    if len({trial["started_from"] for trial in finished}) > 1:
        raise _mismatch(folder, "has trials that started from different parameters")
    best = sweep["settings"][0]["setting"]
    trials = [trial for trial in finished if trial_name(setting_of(trial["trial"])) == best]
    if len(trials) < run.seeds:
        return None
    trials.sort(key=lambda trial: trial["trial"][SEED])
    return Outcome(tuple(_floats(trial["metrics"]) for trial in trials), trials[0]["started_from"])


def _check_config(run: Run, folder: epath.Path, config: dict[str, Any], trial: Mapping[str, Any] | None = None) -> None:
    """Raises a UsageError if `config`, from saved results, differs from the config of `run`, such as in the scale."""
    fields = [f"--config.{field}={value}" for field, value in (trial or {}).items()]
    expected: dict[str, Any] = dataclasses.asdict(experiment_config(run.config, [*run.overrides, *fields]))
    # Unset model fields come from the initial checkpoint, so they cannot be compared here.
    model = {
        name: config["model"].get(name) if run.init_from and value is None else value
        for name, value in expected["model"].items()
    }
    labels = {"labels": config["data"].get("labels")} if "labels" in expected["data"] else {}
    expected = {**expected, "model": model, "data": {**expected["data"], **labels}}
    if differences := result_differences(expected, config, of_best=run.init_from is not None):
        raise UsageError(
            f"the settings of {folder} differ from the table's: {differences}; choose another --results, or delete or "
            "rename the folder"
        )


def _floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if type(value) is float}
