"""Reader of Orbax checkpoint files without Orbax. This module imports neither JAX nor TensorFlow."""

import os
from pathlib import Path


def checkpoint_entries(workdir: Path, unfinished: bool) -> list[str]:
    """Returns the names of the complete or the unfinished checkpoints of a workdir."""
    names = os.listdir(workdir / "checkpoints") if (workdir / "checkpoints").is_dir() else []
    return [name for name in names if ("tmp" in name) == unfinished and name[0].isdigit()]


def newest_checkpoint(workdir: Path) -> int | None:
    """Returns the step of the newest complete checkpoint."""
    return max(map(int, checkpoint_entries(workdir, unfinished=False)), default=None)


def checkpoint_arrays(checkpoint: Path) -> dict[str, bytes]:
    """Returns the metadata of a checkpoint and the stored bytes of each array, read without Orbax."""
    import tensorstore

    arrays = {"meta": (checkpoint / "meta" / "metadata").read_bytes()}
    for item in filter(Path.is_dir, (checkpoint / "params", checkpoint / "training")):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
        arrays |= {f"{item.name}/{key.decode()}": store.read(key).result().value for key in store.list().result()}
    return arrays
