"""What runs came to: read from a folder of results, or from the one small file in which they were kept."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.config.load import load_config
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.reproduce.table import Run
from bertjax.tasks.build import parse_config
from bertjax.training.checkpoint import saved_fingerprint
from bertjax.training.checkpoint_config import parse_config
from bertjax.training.progress import read_results
from bertjax.training.sweep import SEED, SWEEP, TRIALS, name_of, outcome_of, setting_of, summary
from bertjax.training.workdir import RESULTS, resolve, result_differences
from bertjax.utils.io import read_json_object, write_atomic

# In a folder of results: which tables were asked for, and how long runs took.
ASKED = "reproduce.json"
_TABLES, _SECONDS, _RUNS, _ASKED = "tables", "seconds", "runs", "asked"
# Arguments of experiments that say where data lies.
_PLACES = ("corpus", "path", "train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run came to.

    Attributes:
      metrics: of each seed, on dev or on held-out text.
      started_from: fingerprint of the parameters that it started from; "" where they were random.
      fingerprint: of the parameters that it leaves behind, its last or its best; "" of several seeds.
      members: of an ensemble, the fingerprints of theirs.
    """

    metrics: tuple[dict[str, float], ...]
    started_from: str = ""
    fingerprint: str = ""
    members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Results:
    """A folder of results, or a file in which they are kept, perhaps with others behind it.

    Attributes:
      place: of either.
      tables: number or name to the `FILE:ARGUMENTS` it was last asked for with.
      seconds: that a run took, of those that were not interrupted.
      kept: of a file, what was asked of each run by `_asked`, and what it came to; None of a folder.
      others: what the runs that are not here are looked up in, such as results of another machine.
    """

    place: str
    tables: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    kept: dict[str, tuple[list[str], Outcome]] | None = None
    others: tuple["Results", ...] = ()

    @property
    def folder(self) -> str:
        """Of further runs: the first that is a folder, or a word for it where there are files alone."""
        return next((one.place for one in (self, *self.others) if one.kept is None), "RESULTS")

    def is_done(self, run: Run) -> bool:
        """Whether a run was run to its end; raises as `outcome`."""
        return self.outcome(run) is not None

    def outcome(self, run: Run) -> Outcome | None:
        """What a run came to; None where it has not been run to its end.

        Raises:
          UsageError: its results are of other settings than the table asks for.
          BertjaxError: they are damaged, or started from other parameters.
        """
        there = self._found(run)
        if there is None:
            return None
        where, found = f"{there[0].place}/{run.name}", there[1]
        if len(found.metrics) != max(run.seeds, 1):
            raise BertjaxError(
                f"{where} has {len(found.metrics)} seeds, and the table asks for {max(run.seeds, 1)}; choose other "
                "--results, or move that folder away"
            )
        before = self._parameters(run.start, run.start_step) if run.start else ""
        if before and found.started_from != before:
            raise BertjaxError(
                f"{where} started from other parameters than {run.start.name} ended with; move that folder away, and "
                "it is run again"
            )
        members = [outcome.fingerprint for member in run.members if (outcome := self.outcome(member))]
        if len(found.members) != len(run.members) or not set(members) <= set(found.members):
            raise BertjaxError(
                f"{where} is of other members than the table asks for; move that folder away, and it is run again"
            )
        return found

    def _parameters(self, run: Run, step: int) -> str:
        """Fingerprint of what a run ended with, or had at a step (see `Run.start_step`); "" where it is not known."""
        if not step:
            outcome = self.outcome(run)
            return outcome.fingerprint if outcome else ""
        found = self._found(run)
        checkpoint = epath.Path(run.checkpoint(found[0].place, step)) if found else None
        return saved_fingerprint(checkpoint) if checkpoint and checkpoint.exists() else ""

    def _found(self, run: Run) -> tuple["Results", Outcome] | None:
        """Where the results of a run are, and what it came to."""
        for one in (self, *self.others):
            outcome = one._read(run) if one.kept is None else one._kept_of(run)
            if outcome:
                return one, outcome
        return None

    def _kept_of(self, run: Run) -> Outcome | None:
        asked, outcome = self.kept.get(run.name, (None, None))
        if outcome and asked != _asked(run):
            raise UsageError(
                f"{self.place} has {run.name} of other settings than the table asks for ({' '.join(asked)}); leave "
                "that file out, or ask for what it has"
            )
        return outcome

    def _read(self, run: Run) -> Outcome | None:
        folder = epath.Path(self.place) / run.name
        if run.seeds:
            return _of_sweep(folder, run)
        if not (folder / RESULTS).exists():
            return None
        results = read_results(folder)
        if "config" not in results or ("members" in results) != bool(run.members):
            raise BertjaxError(f"{folder / RESULTS} is of something else than {run.name}; move that folder away")
        if run.members:
            _check_config(run.members[0], folder, results["config"], {})
            return Outcome((_numbers(results),), members=tuple(each["fingerprint"] for each in results["members"]))
        _check_config(run, folder, results["config"], {})
        return Outcome((_numbers(results),), results.get("started_from", ""), results.get("parameters_fingerprint", ""))


def read(path: str) -> Results:
    """Results at a path; of a folder that is empty or not there, none.

    Raises:
      UsageError: it is a file of something else.
      BertjaxError: what a folder holds is damaged.
    """
    where = resolve(path)
    if not where.is_dir() and where.exists():
        return _kept(where)
    asked = where / ASKED
    if not asked.exists():
        return Results(os.fspath(where))
    try:
        content = read_object(asked)
        return Results(os.fspath(where), dict(content[_TABLES]), dict(content[_SECONDS]))
    except (OSError, ValueError, KeyError, TypeError, BertjaxError) as error:
        raise BertjaxError(
            f"{asked} is damaged ({first_line(error)}); remove it, and `bertjax reproduce` writes it again"
        ) from error


def together(results: Sequence[Results]) -> Results:
    """Those of several places as one; a run that several have is that of the first."""
    first, *others = results
    tables = {name: config for one in reversed(results) for name, config in one.tables.items()}
    seconds = {name: taken for one in reversed(results) for name, taken in one.seconds.items()}
    return dataclasses.replace(first, tables=tables, seconds=seconds, others=tuple(others))


def _kept(file: epath.Path) -> Results:
    try:
        content = read_object(file)
        outcomes = {
            name: (
                kept[_ASKED],
                Outcome(tuple(kept["metrics"]), kept["started_from"], kept["fingerprint"], tuple(kept["members"])),
            )
            for name, kept in content[_RUNS].items()
        }
        return Results(os.fspath(file), dict(content[_TABLES]), dict(content[_SECONDS]), outcomes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BertjaxError) as error:
        raise UsageError(
            f"{file} is no file of results ({first_line(error)}); give one that `bertjax table --keep` wrote, or the "
            "folder of `bertjax reproduce`"
        ) from error


def note(place: str, tables: Mapping[str, str], seconds: Mapping[str, float]) -> None:
    """Writes down in a folder of results which tables were asked for, and how long runs took, beside what is there.

    What is there is read anew: other tables may be under way in the same folder.
    """
    there = read(place)
    content = {_TABLES: {**there.tables, **tables}, _SECONDS: {**there.seconds, **seconds}}
    folder = epath.Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ASKED, json.dumps(content, indent=1) + "\n")


def keep(results: Results, runs: Iterable[Run], tables: dict[str, str], file: Path) -> int:
    """Writes what finished runs came to into one file that `read` takes; returns how many they are.

    Raises:
      UsageError: there is a file that is of something else, or has runs that would be lost.
    """
    there = {
        run.name: {_ASKED: _asked(run), **dataclasses.asdict(outcome)}
        for run in sorted(runs, key=lambda run: run.name)
        if (outcome := results.outcome(run))
    }
    lost = sorted(_kept(epath.Path(file)).kept.keys() - there.keys()) if file.exists() else []
    if lost:
        raise UsageError(
            f"--keep {file} has {len(lost)} runs that would be lost, such as {lost[0]}; name another file, or give "
            "this one with --results too and all of its tables"
        )
    seconds = {name: round(results.seconds[name], 1) for name in there if name in results.seconds}
    content = {_TABLES: tables, _SECONDS: seconds, _RUNS: there}
    write_atomic(file, json.dumps(content, indent=1) + "\n")
    return len(there)


def _asked(run: Run) -> list[str]:
    """What a run is asked for, wherever its data lies."""
    file, _, given = run.config.partition(":")
    kept = [item for item in given.split(",") if item and item.partition("=")[0] not in _PLACES]
    return [Path(file).stem, *kept, *run.overrides]


def _check_config(run: Run, folder: epath.Path, config: dict[str, Any], trial: dict[str, Any]) -> None:
    """Refuses results of a run with other settings, such as of another scale in the same folder."""
    fields = [f"--config.{field}={value}" for field, value in trial.items()]
    wanted = dataclasses.asdict(parse_config(load_config(run.config, [*run.overrides, *fields])))
    # What is left to the checkpoint that it starts from is not known here.
    model = {
        name: config["model"].get(name) if run.start and not value else value for name, value in wanted["model"].items()
    }
    left = {name: config["data"].get(name) for name in ("labels",) if name in wanted["data"]}
    asked = {**wanted, "model": model, "data": {**wanted["data"], **left}}
    if found := result_differences(asked, config, of_best=run.start is not None):
        raise UsageError(
            f"{folder} has results of other settings than the table asks for ({found}); choose other --results, or "
            "move that folder away"
        )


def _of_sweep(folder: epath.Path, run: Run) -> Outcome | None:
    """Of the setting that is best on dev, all seeds; None while trials are missing."""
    if not (folder / SWEEP).exists():
        return None
    try:
        whole = read_object(folder / SWEEP)
        trials = [trial["trial"] for trial in whole["trials"] if "metrics" in trial]
        if whole["left"] or not trials:
            return None
    except (OSError, ValueError, KeyError, TypeError, BertjaxError) as error:
        raise BertjaxError(
            f"{folder / SWEEP} is damaged ({first_line(error)}); remove it, and the sweep writes it again"
        ) from error
    folders = [folder / TRIALS / name_of(trial) for trial in trials]
    if not all((each / RESULTS).exists() for each in folders):
        return None
    found = [read_results(each) for each in folders]
    for trial, results in zip(trials, found, strict=True):
        _check_config(run, folder, results["config"], trial)
    outcomes = [outcome_of(*each) for each in zip(trials, found, strict=True)]
    if len({outcome["started_from"] for outcome in outcomes}) > 1:
        raise BertjaxError(f"trials in {folder} started from different parameters; move that folder away")
    best = summary(outcomes)["settings"][0]["setting"]
    chosen = [outcome for outcome in outcomes if name_of(setting_of(outcome["trial"])) == best]
    if len(chosen) < run.seeds:
        return None
    chosen.sort(key=lambda outcome: outcome["trial"][SEED])
    return Outcome(tuple(_numbers(outcome["metrics"]) for outcome in chosen), chosen[0]["started_from"])


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if type(value) is float}
