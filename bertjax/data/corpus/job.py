"""Input and output of the runners of `prepare`."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.data.corpus import docstrings
from bertjax.data.corpus.added_pieces import extend_vocabulary
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.corpus.vocabulary_training import train_vocabulary
from bertjax.errors import BertjaxError
from bertjax.utils.io import atomic_file
from bertjax.utils.terminal import progress_bar


@dataclasses.dataclass(frozen=True)
class Job:
    """Description of a corpus that a runner creates.

    Attributes:
      sources: inputs, in order.
      problems: number of occurrences of each problem found while the inputs were listed.
      vocabulary: vocabulary to use; if None, a vocabulary is trained on a sample of the text.
      vocabulary_kind: kind of vocabulary, `wordpiece` or `sentencepiece`.
      vocabulary_size: number of pieces of the vocabulary to train.
      add_pieces: maximum number of pieces to append to `vocabulary`.
      lower_case: whether the vocabulary lower-cases text.
      heldout_fraction: fraction of documents to hold out, in [0, 1).
    """

    sources: tuple[Source, ...]
    problems: dict[str, int]
    vocabulary: Vocabulary | None
    vocabulary_kind: str
    vocabulary_size: int
    add_pieces: int
    lower_case: bool
    heldout_fraction: float

    @property
    def learns_vocabulary(self) -> bool:
        """True if the vocabulary depends on the text."""
        return self.vocabulary is None or self.add_pieces > 0


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Output of a runner.

    Attributes:
      vocabulary: the vocabulary used.
      added_pieces: manifest entry of the added pieces; None if no pieces were to be added.
      splits: number of `documents`, `sentences`, `tokens` and `text_bytes` of each split.
      problems: number of occurrences of each problem.
      files: manifest entry of each array file, by file name.
    """

    vocabulary: Vocabulary
    added_pieces: dict[str, float] | None
    splits: dict[str, dict[str, int]]
    problems: dict[str, int]
    files: dict[str, dict[str, Any]]


def learn_vocabulary(
    job: Job, results: Iterable[Any], progress: bool = False
) -> tuple[Vocabulary, dict[str, float] | None]:
    """Trains or extends the vocabulary of a job.

    Args:
      job: job with `learns_vocabulary`.
      results: results of `vocabulary_training.statistics`, in order.
      progress: whether to log the size of the sample.

    Returns:
      A tuple of the vocabulary and `JobResult.added_pieces`.
    """
    if job.vocabulary is not None:
        return extend_vocabulary(job.vocabulary, job.add_pieces, results, progress)
    return train_vocabulary(results, job.vocabulary_kind, job.vocabulary_size, job.lower_case, progress), None


def spool_docstrings(
    source: Source, directory: Path | epath.Path, problems: Counter[str], pool: Executor, progress: bool
) -> Source:
    """Replaces a `docs` source by a file of the docstrings, since collecting docstrings is slow.

    Returns other sources unchanged.
    """
    if source.kind != "docs":
        return source
    path = directory / "docstrings.spool"
    names = docstrings.modules()
    with (
        atomic_file(path) as local_path,
        open(local_path, "w", encoding="utf-8", errors="replace", newline="\n") as file,
        progress_bar("docs: parse", len(names), " modules", progress) as bar,
    ):
        for document in docstrings.documents(names, problems, pool, bar.update):
            file.write(document + "\n\n")
        file.flush()
        size = local_path.stat().st_size
    return Source("paragraphs", str(path), size)


def worker_lost() -> BertjaxError:
    """Returns the error to raise when a worker process has died."""
    return BertjaxError(
        "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"
    )
