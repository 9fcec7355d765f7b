"""Results of a table's runs, read from results folders or from a file that `bertjax table --keep` wrote."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.reproduce.table import Run
from bertjax.training.checkpoint import resolve_checkpoint_path, saved_fingerprint
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.results import read_results
from bertjax.training.sweep import SEED, SWEEP, TRIALS, setting_of, trial_name
from bertjax.training.workdir import RESULTS, result_differences
from bertjax.utils.io import read_json_object
from bertjax.utils.json_files import write_json

# Name of a results folder's index file, which stores the requested tables and the durations of runs.
INDEX = "reproduce.json"
# Experiment arguments that are data paths. Comparisons of settings ignore them, because data may be moved.
_PATH_ARGUMENTS = ("corpus", "path", "train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Metrics of a finished run."""

    settings: Sequence[str]  # experiment name, config arguments and overrides of the run, without data paths
    # Metrics of each seed on dev or held-out data. For a sweep, the seeds of the best setting.
    metrics: Sequence[dict[str, float]]
    started_from: str = ""  # fingerprint of the initial parameters (default: empty, random parameters)
    fingerprint: str = ""  # fingerprint of the resulting parameters (default: empty, unknown or several seeds)
    members: Sequence[str] = ()  # fingerprints of the models in an ensemble


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of one or more folders and files. If several sources contain the same entry, the first source is used."""

    # Path and outcomes of each source. The outcomes of a file are keyed by run name. Those of a folder are None,
    # because they are read from its workdirs.
    sources: tuple[tuple[str, Mapping[str, Outcome] | None], ...]
    # Experiment (`FILE:ARGUMENTS`) of each requested table, keyed by table name.
    tables: dict[str, str] = dataclasses.field(default_factory=dict)
    # Duration in seconds of each run that was not interrupted, keyed by run name.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Results folder for printed commands: the first folder among the sources (`RESULTS` if all are files)."""
        return next((path for path, outcomes in self.sources if outcomes is None), "RESULTS")

    def finished(self, runs: Iterable[Run]) -> set[str]:
        return {run.name for run in runs if self.outcome(run)}

    def outcome(self, run: Run) -> Outcome | None:
        """Returns the outcome of a run, or None if it is unfinished.

        Raises a BertjaxError if settings, seeds, initial parameters or ensemble members differ from `run`'s.
        """
        path, outcome = self._lookup(run)
        if outcome is None:
            return None
        if outcome.settings != _settings(run):
            raise UsageError(
                f"{path} contains {run.name} with settings that differ from the table's: "
                f"{' '.join(outcome.settings)}; remove it from --results"
            )
        members = {result.fingerprint for member in run.members if (result := self.outcome(member))}
        if len(outcome.metrics) != max(run.seeds, 1):
            difference = f"has {len(outcome.metrics)} seeds, not {max(run.seeds, 1)}"
        elif run.init_from and self._init_fingerprint(run.init_from, run.init_step) not in ("", outcome.started_from):
            difference = f"did not start from the parameters of {run.init_from.name}"
        elif len(outcome.members) != len(run.members) or not members <= {*outcome.members}:
            difference = "has other ensemble members than the table"
        else:
            return outcome
        raise _mismatch(f"{path}/{run.name}", difference)

    def _lookup(self, run: Run) -> tuple[str, Outcome | None]:
        """Returns the path of the first source that has a run's outcome, and the outcome. If unfinished: ("", None)."""
        for path, outcomes in self.sources:
            kept = outcomes is not None
            outcome = outcomes.get(run.name) if kept else read_outcome(epath.Path(path) / run.name, run)
            if outcome:
                return path, outcome
        return "", None

    def _init_fingerprint(self, run: Run, step: int) -> str:
        """Returns the fingerprint of a checkpoint of `run`, or "" if unknown. `step` is as in `Run.init_step`."""
        if run.fingerprint:
            return run.fingerprint
        if not step:
            outcome = self.outcome(run)
            return outcome.fingerprint if outcome else ""
        path = self._lookup(run)[0]
        checkpoint = epath.Path(run.checkpoint(path, step)) if path else None
        return saved_fingerprint(checkpoint) if checkpoint and checkpoint.exists() else ""


def _mismatch(path: str | epath.Path, difference: str) -> BertjaxError:
    return BertjaxError(f"{path} {difference}; delete or rename {path} to repeat the run")


def load_results(paths: Sequence[str]) -> Results:
    """Reads results folders and files. Folders may be empty or missing, but files (`.json`) must exist."""
    results = Results(())
    for path in reversed(paths):
        folder = resolve_checkpoint_path(path)
        is_file = folder.suffix == ".json" or (folder.exists() and not folder.is_dir())
        file = folder if is_file else folder / INDEX
        try:
            content = read_json_object(file) if is_file or file.exists() else {"tables": {}, "seconds": {}}
            outcomes = {name: Outcome(**run) for name, run in content["runs"].items()} if is_file else None
            tables, seconds = results.tables | content["tables"], results.seconds | content["seconds"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{file} is not a results file ({type(error).__name__}: {first_line(error)}); use a file of `bertjax "
                "table --keep` or a folder of `bertjax reproduce`"
            ) from error
        results = Results(((os.fspath(folder), outcomes), *results.sources), tables, seconds)
    return results


def update_index(path: str, tables: Mapping[str, str], seconds: Mapping[str, float]) -> None:
    """Adds the experiments of requested tables and the durations of runs to a results folder's index.

    Reads the index again first, so that entries of another `bertjax reproduce` process are not lost.
    """
    old, folder = load_results([path]), epath.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / INDEX, {"tables": {**old.tables, **tables}, "seconds": {**old.seconds, **seconds}})


def save_results(results: Results, runs: Iterable[Run], tables: dict[str, str], file: Path) -> int:
    """Writes the outcomes of finished runs to a JSON file that `load_results` reads. Returns the number of runs.

    Raises a UsageError if the file already exists and contains other runs, which would be lost.
    """
    outcomes = {
        run.name: dataclasses.asdict(outcome)
        for run in sorted(runs, key=lambda run: run.name)
        if (outcome := results.outcome(run))
    }
    kept = load_results([str(file)]).sources[0][1] if file.exists() else None
    lost = sorted({*(kept or ())} - outcomes.keys())
    if lost:
        raise UsageError(
            f"--keep {file} would remove {len(lost)} runs from this file, such as {lost[0]}; use a different file, or "
            f"add --results {file} and all tables that it contains"
        )
    seconds = {name: round(value, 1) for name, value in sorted(results.seconds.items()) if name in outcomes}
    write_json(file, {"tables": tables, "seconds": seconds, "runs": outcomes})
    return len(outcomes)


def _settings(run: Run) -> list[str]:
    """Returns a run's experiment name, config arguments and overrides, without data paths."""
    file, _, arguments = run.config.partition(":")
    settings = [item for item in arguments.split(",") if item and item.partition("=")[0] not in _PATH_ARGUMENTS]
    return [Path(file).stem, *settings, *run.overrides]


def read_outcome(folder: epath.Path, run: Run) -> Outcome | None:
    """Reads a run's outcome from its workdir (None: unfinished). For a sweep, uses the best setting on dev."""
    workdirs = _best_trials(folder) if run.seeds else {folder: {}}
    if len(workdirs) < max(run.seeds, 1) or not all((path / RESULTS).exists() for path in workdirs):
        return None
    results = {path: read_results(path) for path in workdirs}
    for path, fields in workdirs.items():
        _check_config(run.members[0] if run.members else run, folder, results[path]["config"], fields)
    if len({result.get("started_from") for result in results.values()}) > 1:
        raise _mismatch(folder, "has trials that started from different parameters")
    first, *_ = results.values()
    return Outcome(
        settings=_settings(run),
        metrics=[{name: value for name, value in each.items() if type(value) is float} for each in results.values()],
        started_from=first.get("started_from", ""),
        fingerprint="" if run.seeds else first.get("parameters_fingerprint", ""),
        members=[member["fingerprint"] for member in first.get("members", ())],
    )


def _best_trials(folder: epath.Path) -> dict[epath.Path, dict[str, Any]]:
    """Maps the workdir of each trial of the best setting to the trial's fields, sorted by seed.

    Returns {} if the sweep is unfinished or has a failed trial.
    """
    if not (folder / SWEEP).exists():
        return {}
    try:
        sweep = read_json_object(folder / SWEEP)
        # A diverged trial counts as finished. Trials with other errors, such as a full disk, should be repeated.
        has_failed = any("error" in trial and not trial.get("diverged") for trial in sweep["trials"])
        if sweep["left"] or sweep["best"] is None or has_failed:
            return {}
        finished: list[dict[str, Any]] = [trial["trial"] for trial in sweep["trials"] if "score" in trial]
        finished.sort(key=lambda fields: fields[SEED])
        best = sweep["settings"][0]["setting"]
        return {folder / TRIALS / trial_name(each): each for each in finished if trial_name(setting_of(each)) == best}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _mismatch(folder / SWEEP, f"is damaged ({first_line(error)})") from error


def _check_config(run: Run, folder: epath.Path, config: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Raises a UsageError if the saved `config` differs from the config of `run`, for example after a scale change."""
    overrides = [*run.overrides, *(f"--config.{field}={value}" for field, value in fields.items())]
    expected: dict[str, Any] = dataclasses.asdict(experiment_config(run.config, overrides))
    # Unset model fields come from the initial checkpoint, and labels from the data, so they cannot be compared here.
    if run.init_from:
        unset = [name for name, value in expected["model"].items() if value is None]
        expected["model"] |= {name: config["model"].get(name) for name in unset}
    if "labels" in expected["data"]:
        expected["data"]["labels"] = config["data"].get("labels")
    if differences := result_differences(expected, config, of_best=run.init_from is not None):
        raise UsageError(
            f"the settings of {folder} differ from the table's: {differences}; choose another --results, or delete or "
            "rename the folder"
        )
