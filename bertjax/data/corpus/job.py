"""Input and output of the runners of `prepare`."""

import dataclasses
from collections import Counter
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.data.corpus import docstrings
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import BertjaxError
from bertjax.utils.io import atomic_file
from bertjax.utils.terminal import progress_bar


@dataclasses.dataclass(frozen=True)
class Job:
    """Input of a runner: the corpus to make.

    Attributes:
      sources: inputs, in order.
      problems: problem to its count, from listing the inputs.
      vocabulary: vocabulary to use; None trains one on a sample of the text.
      vocabulary_kind: `wordpiece` or `sentencepiece`, of a trained vocabulary.
      vocabulary_size: number of pieces of a trained vocabulary.
      lower_case: whether a trained vocabulary lower-cases text.
      heldout_fraction: fraction of documents to hold out, in [0, 1).
    """

    sources: tuple[Source, ...]
    problems: dict[str, int]
    vocabulary: Vocabulary | None
    vocabulary_kind: str
    vocabulary_size: int
    lower_case: bool
    heldout_fraction: float


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Output of a runner.

    Attributes:
      vocabulary: the vocabulary used.
      splits: split to its number of `documents`, `sentences`, `tokens` and `text_bytes`.
      problems: problem to the number of its occurrences.
      files: name of each array's file to the manifest's entry of it.
    """

    vocabulary: Vocabulary
    splits: dict[str, dict[str, int]]
    problems: dict[str, int]
    files: dict[str, dict[str, Any]]


def spool_docstrings(
    source: Source, directory: Path | epath.Path, problems: Counter[str], pool: Executor, progress: bool
) -> Source:
    """Writes docstrings, which are slow to find, to a file and returns that; returns other sources unchanged."""
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
    """Returns the error of a worker process that died."""
    return BertjaxError(
        "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"
    )
