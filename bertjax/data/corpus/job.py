"""`Job`: what `prepare` asks a runner to make. `Made`: what the runner reports back."""

import dataclasses
from collections import Counter
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.data.corpus import docstrings
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.utils.io import atomic_file
from bertjax.utils.terminal import progress_bar


@dataclasses.dataclass(frozen=True)
class Job:
    """A corpus to be made.

    Attributes:
      sources: of its text.
      problems: what was met in finding them, and how often.
      given: its vocabulary; None trains one on a sample of the text.
      vocabulary_kind, vocabulary_size: of one that is trained.
      lower_case: of one that is trained, whether it lower-cases.
      heldout_share: of the documents, in [0, 1).
    """

    sources: tuple[Source, ...]
    problems: dict[str, int]
    given: Vocabulary | None
    vocabulary_kind: str
    vocabulary_size: int
    lower_case: bool
    heldout_share: float


@dataclasses.dataclass(frozen=True)
class Made:
    """The files of a corpus that were made, and what a manifest says of them.

    Attributes:
      vocabulary: which lies among them.
      splits: counts of each split.
      problems: what was met, and how often.
      files: name to size in bytes and SHA-256.
      shards: `SPLIT.ARRAY` to the number of files it lies in; empty where each array is one file.
    """

    vocabulary: Vocabulary
    splits: dict[str, dict[str, int]]
    problems: Counter[str]
    files: dict[str, dict[str, Any]]
    shards: dict[str, int]


def spooled(
    source: Source, directory: Path | epath.Path, problems: Counter[str], pool: Executor, progress: bool
) -> Source:
    """The source, or for docstrings, which take longest to find, a file of them that is quick to read twice."""
    if source.kind != "docs":
        return source
    path = directory / "docstrings.spool"
    names = docstrings.modules()
    with (
        atomic_file(path) as here,
        open(here, "w", encoding="utf-8", errors="replace", newline="\n") as file,
        progress_bar("docs: parse", len(names), " modules", progress) as bar,
    ):
        for document in docstrings.documents(names, problems, pool, bar.update):
            file.write(document + "\n\n")
        file.flush()
        size = here.stat().st_size
    return Source("paragraphs", str(path), size)
