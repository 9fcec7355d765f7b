"""A corpus of one file an array as one of several."""

import json
import shutil
from pathlib import Path

from bertjax.data.corpus import store
from bertjax.data.corpus.blocks import checksums_of


def shard(corpus: Path, output: Path, shard_bytes: int) -> Path:
    """Cuts the arrays of a corpus into files of so many bytes; everything else stays as it is."""
    output.mkdir()
    manifest = json.loads((corpus / store.MANIFEST).read_text())
    shards = {}
    for split in store.SPLITS:
        for array in store.ARRAYS:
            data = (corpus / store.array_file(split, array)).read_bytes()
            del manifest["files"][store.array_file(split, array)]
            pieces = [data[at : at + shard_bytes] for at in range(0, max(1, len(data)), shard_bytes)]
            shards[f"{split}.{array}"] = len(pieces)
            for number, piece in enumerate(pieces):
                file = output / store.shard_file(split, array, number, len(pieces))
                file.write_bytes(piece)
                manifest["files"][file.name] = {"bytes": len(piece), "sha256": checksums_of(file).sha256}
            table = store.checksum_file(split, array)
            shutil.copy(corpus / table, output / table)
    shutil.copy(corpus / manifest["vocabulary"]["file"], output)
    store.write_manifest(output, {**manifest, "shards": shards})
    return output
