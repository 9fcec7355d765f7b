"""Local runner of `prepare`: worker processes encode chunks of text, which the main process cuts from large sources."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from bertjax.data.corpus import store
from bertjax.data.corpus.chunks import Chunk, divide_chunk, encode_chunk, group_sources
from bertjax.data.corpus.merge import plan_splits, write_array
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.corpus.vocabulary_training import ordered_map
from bertjax.utils.io import AnyPath, is_remote
from bertjax.utils.terminal import progress_bar

# Chunks in flight per worker, enough to keep workers busy and few enough to bound the disk space for their texts.
_CHUNKS_PER_WORKER = 2


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
    groups, chunk_chars = group_sources(sources)
    sizes = [source.size_bytes for source in sources]
    shards = []
    with tempfile.TemporaryDirectory(dir=None if is_remote(folder) else folder) as temporary:
        work = Path(temporary)
        with progress_bar("prepare", None if None in sizes else sum(filter(None, sizes)), "B") as bar:

            def chunks() -> Iterator[Chunk]:
                for group in groups:
                    yield from divide_chunk(group, work, chunk_chars, bar.update)
                    if not group.is_large:
                        bar.update(sum(source.size_bytes or 0 for source in group.sources))

            calls = ((chunk, vocabulary, work, workers) for chunk in chunks())
            for shard in ordered_map(pool, encode_chunk, calls, _CHUNKS_PER_WORKER * workers):
                shards.append(shard)
                Path(f"{shard.path}.texts").unlink(missing_ok=True)
        heldout_below, entries = plan_splits(shards, heldout_fraction)
        arrays = itertools.product(store.SPLITS, store.ARRAYS)
        files = dict(write_array(folder, split, array, shards, heldout_below) for split, array in arrays)
    return {**entries, "files": files}
