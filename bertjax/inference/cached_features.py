"""Fine-tuning on features: what a frozen encoder gives is computed once a machine, and kept on its disk."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from filelock import FileLock

from bertjax.config.run import RunConfig
from bertjax.data.corpus.checksums import file_sha256
from bertjax.data.finetuning.examples import Examples
from bertjax.errors import BertjaxError
from bertjax.inference.features import token_states
from bertjax.inference.trained_model import read_trained
from bertjax.model.partitioning import resolve_layout
from bertjax.tasks.build import build_task
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.utils.io import (
    CACHE_DIR_VARIABLE,
    atomic_file,
    cache_dir,
    check_free_space,
    read_json_object,
    remove_temporaries,
    write_atomic,
)
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)


def training_task(settings: RunConfig, start: str | None) -> Task:
    """The task of settings, to be trained from a checkpoint; with `feature_head.features`, on states that are on disk.

    Of several processes each computes the encoder in its steps, and so does a run without a checkpoint to start from.

    Raises:
      UsageError: the data or the checkpoint cannot be used.
      BertjaxError: the checkpoint is damaged, or the disk too small.
    """
    task = build_task(settings, train=True)
    if not isinstance(task, FinetuningTask) or not settings.feature_head.features:
        return task
    if start is None or jax.process_count() > 1:
        return task
    return task.with_cached_features(
        lambda examples: _kept_states(settings, start, examples), saved_fingerprint(find_checkpoint(start))
    )


def _kept_states(settings: RunConfig, start: str, examples: Examples) -> np.ndarray:
    """States of the tokens of examples, of the layers that the settings name: float32 [tokens, C, D], on disk."""
    checkpoint = find_checkpoint(start)
    # The checkpoint decides the function; this run decides how it is computed, as where the encoder is in the step.
    model = resolve_layout(dataclasses.replace(checkpoint_model(checkpoint), dtype=settings.model["dtype"]))
    layers, length = settings.feature_head.layers(model.num_hidden_layers), int(np.diff(examples.offsets).max())
    told = {
        "parameters": saved_fingerprint(checkpoint),
        "architecture": vars(model.architecture),
        "dtype": model.dtype,
        "layers": layers,
        "sequences": _hash_of(examples),
    }
    name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir()
    shape = int(examples.offsets[-1]), len(layers), model.hidden_size
    path = folder / f"features-{name}.bin"
    with FileLock(folder / f".{path.name}.lock"):
        if not _is_whole(path):
            # Tens of gigabytes where a run was killed, and nobody else writes this one.
            remove_temporaries(folder, path.name)
            size = 4 * int(np.prod(shape))
            check_free_space(
                folder, size, "features of the frozen encoder", f"name another folder in {CACHE_DIR_VARIABLE}"
            )
            logger.info(f"features of the frozen encoder, {size / 1e9:,.2f} GB, are kept in {path}")
            trained = dataclasses.replace(read_trained(start), config=model)
            _write(path, shape, token_states(trained, layers, max(8, length)), examples)
    return np.memmap(path, np.float32, "r", shape=shape)


def _write(
    path: Path,
    shape: tuple[int, ...],
    states_of: Callable[[Examples], Iterator[tuple[int, np.ndarray]]],
    examples: Examples,
) -> None:
    """Writes states as they are made, in memory a batch at a time, and last what tells that they are whole."""
    count = len(examples.offsets) - 1
    try:
        with atomic_file(path) as unfinished, progress_bar("features", count, " texts") as bar:
            states = np.memmap(unfinished, np.float32, "w+", shape=shape)
            for sequence, found in states_of(examples):
                states[examples.offsets[sequence] : examples.offsets[sequence + 1]] = found
                bar.update()
            states.flush()
    except OSError as error:
        raise BertjaxError(
            f"cannot write {path} ({error.strerror}); free some space or name another folder in {CACHE_DIR_VARIABLE}"
        ) from error
    write_atomic(_seal_of(path), json.dumps({"sha256": file_sha256(path)}) + "\n")


def _is_whole(path: Path) -> bool:
    """Whether the states are there as they were written; they are read through once for it."""
    try:
        return file_sha256(path) == read_json_object(_seal_of(path))["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def _seal_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _hash_of(examples: Examples) -> str:
    """SHA-256 of what the encoder sees."""
    digest = hashlib.sha256(examples.offsets.tobytes())
    for name in ("input_ids", "segment_ids"):
        digest.update(examples.tokens[name].tobytes())
    return digest.hexdigest()
