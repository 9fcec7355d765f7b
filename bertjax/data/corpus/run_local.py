"""Local runner of `prepare`: worker processes encode batches of text, and the main process writes them in order."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from bertjax.data.corpus import readers, store
from bertjax.data.corpus.documents import batches
from bertjax.data.corpus.merge import plan_splits, write_array
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.shards import encode_batch, write_shard
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.corpus.vocabulary_training import ordered_map
from bertjax.utils.io import AnyPath, is_remote
from bertjax.utils.terminal import progress_bar

# Batches in flight per worker, enough to keep workers busy and few enough to bound memory.
_BATCHES_PER_WORKER = 2


def run(
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    heldout_fraction: float,
    folder: AnyPath,
    pool: Executor,
    workers: int,
) -> dict[str, Any]:
    """Writes the arrays of a corpus. Their content does not depend on the number of workers.

    Returns the manifest's entries `splits`, `problems` and `files`.
    """
    problems: Counter[str] = Counter()
    sizes = [source.size_bytes for source in sources]
    with tempfile.TemporaryDirectory(dir=None if is_remote(folder) else folder) as work:
        with progress_bar("prepare", None if None in sizes else sum(filter(None, sizes)), "B") as bar:
            texts = itertools.chain.from_iterable(readers.read(source, problems, bar.update) for source in sources)
            calls = ((batch, vocabulary, workers) for batch in batches(texts))
            encoded = ordered_map(pool, encode_batch, calls, _BATCHES_PER_WORKER * workers)
            shards = [write_shard(Path(work, "shard"), encoded, vocabulary, problems)]
        heldout_below, entries = plan_splits(shards, heldout_fraction)
        arrays = itertools.product(store.SPLITS, store.ARRAYS)
        files = dict(write_array(folder, split, array, shards, heldout_below) for split, array in arrays)
    return {**entries, "files": files}
