"""Local runner of `prepare`: worker processes encode batches of text, and the main process writes them in order.

This module also defines `Job` and `JobResult`, the input and output of the runners `run_local` and `run_beam`.
"""

import dataclasses
import gc
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from bertjax.data.corpus import docstrings, readers
from bertjax.data.corpus.documents import batches
from bertjax.data.corpus.merge import plan_merge, write_array
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.shards import ShardWriter, encode_batch
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.corpus.vocabulary_training import learn_vocabulary, ordered_map, sample_training_data
from bertjax.errors import BertjaxError
from bertjax.utils.io import AnyPath, atomic_file, is_remote
from bertjax.utils.process_pool import process_pool
from bertjax.utils.terminal import progress_bar

# Batches in flight per worker, enough to keep workers busy and few enough to bound memory.
_BATCHES_PER_WORKER = 2
WORKER_DIED = "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"


@dataclasses.dataclass(frozen=True)
class Job:
    """Description of a corpus that a runner creates.

    Attributes:
      sources: inputs, in order.
      problems: number of occurrences of each problem found while the inputs were listed.
      vocabulary: vocabulary to use or to extend; if None, a vocabulary is trained on a sample of the text.
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

    def learn_vocabulary(self, samples: Iterable[Any]) -> tuple[Vocabulary, dict[str, float] | None]:
        """Trains or extends the vocabulary with `vocabulary_training.learn_vocabulary`."""
        return learn_vocabulary(
            samples,
            kind=self.vocabulary_kind,
            size=self.vocabulary_size,
            lower_case=self.lower_case,
            base=self.vocabulary,
            add_pieces=self.add_pieces,
        )


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Output of a runner.

    Attributes:
      vocabulary: vocabulary of the corpus.
      added_pieces: statistics of the added pieces, for `added_pieces` in the manifest; None if `Job.add_pieces` is 0.
      splits: number of `documents`, `sentences`, `tokens` and `text_bytes` of each split.
      problems: number of occurrences of each problem.
      files: size and SHA-256 of each array file, by file name, as in `files` of the manifest.
    """

    vocabulary: Vocabulary
    added_pieces: dict[str, float] | None
    splits: dict[str, dict[str, int]]
    problems: dict[str, int]
    files: dict[str, dict[str, Any]]


def run(job: Job, folder: AnyPath, workers: int) -> JobResult:
    """Writes the arrays of a corpus. Their content does not depend on the number of workers."""
    problems = Counter(job.problems)
    with tempfile.TemporaryDirectory(dir=None if is_remote(folder) else folder) as temporary:
        work = Path(temporary)
        # Garbage collection is useless and slow in workers, which create millions of small lists but no cycles.
        with process_pool(workers, BertjaxError(WORKER_DIED), gc.disable) as pool:
            sources = [spool_docstrings(source, work, problems, pool) for source in job.sources]
            vocabulary, added_pieces = job.vocabulary, None
            if vocabulary is None or job.add_pieces:
                samples = sample_training_data(sources, job.vocabulary_kind, job.lower_case, pool)
                vocabulary, added_pieces = job.learn_vocabulary(samples)
            sizes = [source.size_bytes for source in sources]
            with (
                ShardWriter(work / "shard", vocabulary.size) as writer,
                progress_bar("prepare", None if None in sizes else sum(filter(None, sizes)), "B") as bar,
            ):
                texts = itertools.chain.from_iterable(readers.read(source, problems, bar.update) for source in sources)
                calls = ((batch, vocabulary, workers) for batch in batches(texts))
                for batch in ordered_map(pool, encode_batch, calls, _BATCHES_PER_WORKER * workers):
                    problems.update(batch.problems)
                    writer.add(batch)
                    bar.set_postfix_str(f"{writer.documents:,} documents", refresh=False)
                shard = writer.finish(problems)
        plan = plan_merge([shard], job.heldout_fraction, {})
        files = dict(write_array(array, folder) for array in plan.arrays)
    return JobResult(vocabulary, added_pieces, plan.splits, plan.problems, files)


def spool_docstrings(source: Source, folder: AnyPath, problems: Counter[str], pool: Executor) -> Source:
    """Writes the docstrings of a `docs` source to a file, and returns the file as a source.

    The file saves time, because collecting docstrings is slow and `prepare` reads each source up to twice. A source of
    another kind is returned unchanged.
    """
    if source.kind != "docs":
        return source
    path = folder / "docstrings.spool"
    names = docstrings.modules()
    with (
        atomic_file(path) as local_path,
        open(local_path, "w", encoding="utf-8", errors="replace", newline="\n") as file,
        progress_bar("docs: parse", len(names), " modules") as bar,
    ):
        for document in docstrings.documents(names, problems, pool, bar.update):
            file.write(document + "\n\n")
        file.flush()
        size = local_path.stat().st_size
    return Source("paragraphs", str(path), size)
