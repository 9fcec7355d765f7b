"""What a table of results is made of: cells, and the runs that fill them, each of which is one command."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence

IsDone = Callable[["Run"], bool]


def _never(run: "Run") -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Run:
    """A pre-training, a fine-tuning with several seeds, or an ensemble of such.

    Attributes:
      name: its folder below that of all results, such as `sst2/bert`; the same in every table that needs it.
      config: `FILE:ARGUMENTS` of an experiment; "" for an ensemble.
      overrides: `--config.FIELD=VALUE`.
      start: the run whose parameters it starts from, one of a single seed.
      start_step: of which checkpoint; 0 is the last one of a pre-training, and the best one of a fine-tuning.
      seeds: random restarts, from the config's seed on; 0 is one run of that seed.
      members: of an ensemble, each of a single seed.
      flops: of all its training, for estimates.
      lacks: the data without which it cannot be run; "" where that is at hand.
    """

    name: str
    config: str = ""
    overrides: tuple[str, ...] = ()
    start: "Run | None" = None
    start_step: int = 0
    seeds: int = 0
    members: tuple["Run", ...] = ()
    flops: float = 0.0
    lacks: str = ""

    @property
    def needs(self) -> tuple["Run", ...]:
        """The runs that come first."""
        return (*((self.start,) if self.start else ()), *self.members)

    def lacking(self, is_done: IsDone = _never) -> str:
        """All the data that it, or a run before it, cannot be run without; "" where it is done, or lacks nothing."""
        return "; ".join(dict.fromkeys(run.lacks for run in in_order([self], is_done) if run.lacks))

    def command(self, results: str) -> str:
        """What to type to run it, once the runs that come first are there.

        Args:
          results: the folder of all results.
        """
        if self.members:
            words = ["ensemble", *(word for run in self.members for word in ("--checkpoint", run.checkpoint(results)))]
            return shlex.join(["bertjax", *words, "--split", "dev", "--output", f"{results}/{self.name}"])
        words = ["sweep" if self.seeds else "train", "--config", self.config, *self.overrides]
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        words += ["--init_from", self.start.checkpoint(results, self.start_step)] if self.start else []
        return shlex.join(["bertjax", *words, "--workdir", f"{results}/{self.name}"])

    def checkpoint(self, results: str, step: int = 0) -> str:
        """The path of what it leaves behind for others."""
        folder = f"{results}/{self.name}"
        return f"{folder}/checkpoints/{step}" if step else folder


@dataclasses.dataclass(frozen=True)
class Cell:
    """A figure of a table: the mean over all seeds of its runs.

    Attributes:
      row, column: names, those of the paper where it has them.
      runs: with the same settings and different seeds of pre-training.
      metric: of their results.
      factor: what it is multiplied by; 100 for percent.
      mean_of: columns whose means in this row it is the mean of, in place of runs.
    """

    row: str
    column: str
    runs: tuple[Run, ...]
    metric: str
    factor: float = 100.0
    mean_of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """What is to be found out for a table or figure.

    Attributes:
      number: of the paper's, or a name of our own.
      title: what it shows; "" is that of the paper.
      scale: at which it is run, in a few words.
      cells: in the order of rows and columns.
      notes: how the figures are to be read.
    """

    number: str
    title: str
    scale: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    def runs(self) -> list[Run]:
        """All of them, each after those that it needs and in the order of the cells."""
        return in_order([run for cell in self.cells for run in cell.runs])


def in_order(runs: Sequence[Run], is_done: IsDone = _never) -> list[Run]:
    """Runs and all that they need, each once and after what it needs; without what is done, and what that needed."""

    def walk(run: Run) -> Iterator[Run]:
        if not is_done(run):
            for earlier in run.needs:
                yield from walk(earlier)
            yield run

    return list(dict.fromkeys(each for run in runs for each in walk(run)))
