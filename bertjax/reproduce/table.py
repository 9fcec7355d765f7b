"""Tables of results: cells, the runs whose metrics fill the cells, and the paper's numbers (`paper.json`)."""

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bertjax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """One command: a pre-training run, fine-tuning runs with several seeds, or an ensemble of fine-tuning runs."""

    name: str  # folder in the results folder, such as `sst2/bert`. Tables that share a run use the same name.
    config: str = ""  # `FILE:ARGUMENTS` of an experiment (empty for an ensemble)
    overrides: tuple[str, ...] = ()  # `--config.FIELD=VALUE` flags
    init_from: "Run | None" = None  # single-seed run whose checkpoint initializes this run
    # Step of the checkpoint (default: 0, the last checkpoint of a pre-training run, or the best checkpoint of a
    # fine-tuning run).
    init_step: int = 0
    # Number of consecutive seeds per sweep setting, starting at the config's seed (default: 0, a single run with
    # that seed).
    seeds: int = 0
    members: tuple["Run", ...] = ()  # single-seed fine-tuning runs of an ensemble
    released: str = ""  # path or Hub address of a released checkpoint (default: empty). If set, the run trains nothing.
    fingerprint: str = ""  # fingerprint of the parameters of `released`
    # Pre-trained model, for time estimates of runs that start from this one (default: BASE).
    model: ModelConfig = ModelConfig()
    flops: float = 0.0  # training FLOPs, for time estimates
    missing_data: str = ""  # description of required data that is not available (default: empty, nothing is missing)

    @property
    def dependencies(self) -> tuple["Run", ...]:
        """Runs that must finish before this one starts."""
        return (self.init_from, *self.members) if self.init_from else self.members

    def command(self, results: str) -> str:
        """Returns the shell command for this run, with its workdir in the folder `results`."""
        if self.members:
            words = ["ensemble", *(word for run in self.members for word in ("--checkpoint", run.checkpoint(results)))]
            return shlex.join(["bertjax", *words, "--split", "dev", "--output", f"{results}/{self.name}"])
        words = ["sweep" if self.seeds else "train", "--config", self.config, *self.overrides]
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        words += ["--init_from", self.init_from.checkpoint(results, self.init_step)] if self.init_from else []
        return shlex.join(["bertjax", *words, "--workdir", f"{results}/{self.name}"])

    def checkpoint(self, results: str, step: int = 0) -> str:
        """Returns the path of the released checkpoint or else of the run's step `step` (default: 0, its workdir)."""
        return self.released or f"{results}/{self.name}" + (f"/checkpoints/{step}" if step else "")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table: the mean of a metric over all seeds of its runs."""

    # `row`, `column`: labels, as in the paper if its table has this cell.
    row: str
    column: str
    runs: tuple[Run, ...]  # runs that differ only in their pre-training seed
    metric: str  # name of the metric in the runs' results, or `flops` or `seconds` of the runs
    factor: float = 100.0  # multiplier of the metric (default: 100, percent)
    # Columns of the same row whose mean is shown (default: (), `metric` of `runs` is shown).
    mean_of: tuple[str, ...] = ()
    digits: int = 1  # number of decimals


@dataclasses.dataclass(frozen=True)
class Table:
    """Table or figure, and the runs that fill it."""

    name: str  # number of the table in the paper, such as `5`, or a name such as `figure3`
    title: str  # heading (empty: the paper's title)
    scale: str  # description of the models and settings of the runs, for the notes
    cells: tuple[Cell, ...]  # cells in the order of rows and columns
    notes: tuple[str, ...] = ()  # remarks printed below the table

    def runs(self, done: Set[str] = frozenset()) -> list[Run]:
        """Returns all runs except those in `done`, dependencies first. The runs of the first seed come first."""
        by_seed = itertools.zip_longest(*(cell.runs for cell in self.cells))
        return run_order(filter(None, itertools.chain.from_iterable(by_seed)), done)


def run_order(runs: Iterable[Run], done: Set[str] = frozenset()) -> list[Run]:
    """Returns `runs` and their dependencies, dependencies first, except released checkpoints and the runs in `done`."""
    ordered: dict[Run, None] = {}
    for run in runs:
        if run.name not in done and not run.released:
            ordered |= dict.fromkeys((*run_order(run.dependencies, done), run))
    return list(ordered)


def missing_data(runs: Sequence[Run], done: Set[str] = frozenset()) -> str:
    """Describes the missing data of `runs` and their unfinished dependencies. Returns "" if no data is missing."""
    return "; ".join(dict.fromkeys(run.missing_data for run in run_order(runs, done) if run.missing_data))


class PaperTable(NamedTuple):
    """Table or figure of the paper."""

    # `title`, `section`: heading, and section of the paper.
    title: str = ""
    section: str = ""
    columns: Sequence[str] = ()  # column labels
    # Numbers of each row, by row label (None: empty cell). All numbers except perplexities are percentages.
    rows: Mapping[str, Sequence[float | None]] = MappingProxyType({})
    notes: Sequence[str] = ()  # remarks on the numbers


# The paper's tables by name: `1` to `8` and `figure5`.
PAPER_TABLES = {
    name: PaperTable(**table)
    for name, table in json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))["tables"].items()
}
