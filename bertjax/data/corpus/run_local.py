"""Runner for this machine: worker processes encode batches, and this process writes them in order."""

import gc
import itertools
import tempfile
from collections import Counter
from pathlib import Path

from etils import epath

from bertjax.data.corpus import encode, readers
from bertjax.data.corpus.job import Job, JobResult, learn_vocabulary, spool_docstrings, worker_lost
from bertjax.data.corpus.merge import plan_merge, write_array
from bertjax.data.corpus.shards import ShardWriter
from bertjax.data.corpus.vocabulary_training import ordered_map, sample_statistics
from bertjax.utils.io import is_remote
from bertjax.utils.process_pool import process_pool
from bertjax.utils.terminal import progress_bar

# Batches in flight per worker, enough to keep workers busy and few enough to bound memory.
_BATCHES_PER_WORKER = 2


def run(job: Job, directory: Path | epath.Path, workers: int, progress: bool) -> JobResult:
    """Writes the arrays of a corpus. Their content does not depend on the number of workers."""
    problems = Counter(job.problems)
    with tempfile.TemporaryDirectory(dir=None if is_remote(directory) else directory) as folder:
        work = Path(folder)
        with process_pool(workers, worker_lost, gc.disable) as pool:
            sources = [spool_docstrings(source, work, problems, pool, progress) for source in job.sources]
            vocabulary, added_pieces = job.vocabulary, None
            if job.learns_vocabulary:
                results = sample_statistics(sources, job.vocabulary_kind, job.lower_case, pool, progress)
                vocabulary, added_pieces = learn_vocabulary(job, results, progress)
        sizes = [source.size_bytes for source in sources]
        encoder = encode.Encoder(vocabulary, job.heldout_fraction, encode.cache_entries(workers))
        with (
            process_pool(workers, worker_lost, encode.start_worker, encoder) as pool,
            ShardWriter(work / "shard", vocabulary.size) as writer,
            progress_bar("prepare", None if None in sizes else sum(sizes), "B", progress) as bar,
        ):
            texts = itertools.chain.from_iterable(readers.read(source, problems, bar.update) for source in sources)
            calls = ((batch,) for batch in encode.batches(texts))
            for batch in ordered_map(pool, encode.encode_batch, calls, _BATCHES_PER_WORKER * workers):
                problems.update(batch.problems)
                writer.add(batch)
                bar.set_postfix_str(f"{writer.documents:,} documents", refresh=False)
            shard = writer.finish(problems)
        plan = plan_merge([shard], job.heldout_fraction, {})
        files = dict(write_array(array, directory) for array in plan.arrays)
    return JobResult(vocabulary, added_pieces, plan.splits, plan.problems, files)
