"""A corpus made on this machine: batches of text are encoded in processes, and written in order."""

import gc
import itertools
from collections import Counter
from pathlib import Path

from bertjax.data.corpus import encoding, readers, store
from bertjax.data.corpus.job import Job, Made, spooled
from bertjax.data.corpus.output import CorpusWriter
from bertjax.data.corpus.tokenizer import VOCABULARY_FILES
from bertjax.data.corpus.vocabulary import ordered_map, train_vocabulary
from bertjax.errors import BertjaxError
from bertjax.utils.process_pool import process_pool
from bertjax.utils.terminal import progress_bar

# Batches handed out and not yet written, a worker: enough that none waits, few enough to keep memory small.
_BATCHES_AHEAD = 2


def worker_lost() -> BertjaxError:
    """What is raised where a worker process ended by itself."""
    return BertjaxError(
        "a worker process was killed, perhaps for lack of memory; run again, with fewer --workers if it recurs"
    )


def run(job: Job, directory: Path, workers: int, progress: bool) -> Made:
    """Makes the files of a corpus in a folder; the bytes do not depend on the number of workers.

    Raises:
      UsageError: a source or the size of the vocabulary cannot be used.
      BertjaxError: reading or a worker failed, or the inputs hold no text.
      OSError: the disk is full.
    """
    problems = Counter(job.problems)
    with process_pool(workers, worker_lost, gc.disable) as pool:
        to_read = [spooled(source, directory, problems, pool, progress) for source in job.sources]
        if job.given:
            used = job.given
            (directory / VOCABULARY_FILES[used.kind]).write_bytes(used.content)
        else:
            used = train_vocabulary(
                to_read,
                directory / VOCABULARY_FILES[job.vocabulary_kind],
                kind=job.vocabulary_kind,
                size=job.vocabulary_size,
                lower_case=job.lower_case,
                pool=pool,
                progress=progress,
            )
    encoder = encoding.Encoder(used, job.heldout_share, encoding.cache_entries(workers))
    with (
        process_pool(workers, worker_lost, encoding.start_worker, encoder) as pool,
        CorpusWriter(directory, used.size, job.heldout_share) as writer,
        progress_bar("prepare", _total_bytes(to_read), "B", progress) as bar,
    ):
        texts = itertools.chain.from_iterable(readers.read(source, problems, bar.update) for source in to_read)
        calls = ((batch,) for batch in encoding.batches(texts))
        for encoded in ordered_map(pool, encoding.encode_batch, calls, _BATCHES_AHEAD * workers):
            problems.update(encoded.problems)
            writer.add(encoded)
            bar.set_postfix_str(f"{writer.documents:,} documents", refresh=False)
        splits = writer.finish(problems)
    for source in set(to_read) - set(job.sources):
        Path(source.name).unlink()
    return Made(used, splits, problems, store.describe_files(directory), {})


def _total_bytes(sources: list[readers.Source]) -> int | None:
    sizes = [source.size_bytes for source in sources]
    return None if None in sizes else sum(sizes)
