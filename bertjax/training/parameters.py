"""Restoring and saving of a checkpoint's parameters, without the training state."""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bertjax.errors import BertjaxError, UsageError, first_line, listed
from bertjax.model.config import Architecture
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint
from bertjax.training.checkpoint_metadata import (
    CheckpointMetadata,
    check_fingerprint,
    raise_unless_damage,
    read_metadata,
)
from bertjax.training.fingerprint import fingerprint, fingerprint_on_host
from bertjax.training.new_pieces import VOCABULARY_PARAMS, NewPieces

logger = logging.getLogger(__name__)

# Target size of files. It is small, because Orbax buffers an entire file in memory before writing it.
_FILE_BYTES = 4 << 20


def load_params(
    path: str | Path, target: Any, reinit_params: tuple[str, ...] = (), new_pieces: NewPieces | None = None
) -> Any:
    """Restores the parameters of a checkpoint into `target`, to start a run or to evaluate.

    Args:
      path: a checkpoint, see `find_checkpoint`.
      target: tree of arrays, or of shapes with shardings. An array that is not in the checkpoint, such as a new output
        layer, is returned unchanged.
      reinit_params: top-level parameters that keep their values in `target`, even if the checkpoint contains them.
      new_pieces: pieces that the vocabulary of `target` adds to the checkpoint's (default: None, same vocabulary).

    Returns:
      A tree like `target`.

    Raises:
      UsageError: there is no checkpoint, a shape differs, or both checkpoint and `target` lack a parameter.
      BertjaxError: the checkpoint is damaged or cannot be read.
    """
    checkpoint = find_checkpoint(path)
    leaves = _flatten(target)
    with _open_params(checkpoint) as (checkpointer, saved):
        restored = {name for name in saved.keys() & leaves.keys() if name.split("/")[0] not in reinit_params}
        extended = {name for name in VOCABULARY_PARAMS if name in restored} if new_pieces else set()
        for name in sorted(restored - extended):
            if tuple(saved[name].shape) != tuple(leaves[name].shape):
                raise UsageError(
                    f"parameter {name} has shape {tuple(saved[name].shape)} in {checkpoint} but "
                    f"{tuple(leaves[name].shape)} in the model; use a checkpoint of the same model"
                )
        new, unused = sorted(leaves.keys() - restored), sorted(saved.keys() - restored)
        if missing := [name for name in new if isinstance(leaves[name], jax.ShapeDtypeStruct)]:
            raise UsageError(f"{checkpoint} lacks the parameters {listed(missing)}; use a checkpoint of the same model")
        _log_usage(checkpoint, restored, new, unused)
        # Restore unused arrays as well, because the fingerprint covers them. They need a sharding for these devices.
        first = getattr(next(iter(leaves.values())), "sharding", None)
        replicated = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
        shardings = {
            name: getattr(leaves[name], "sharding", None) if name in restored - extended else replicated
            for name in saved
        }
        params = _restore_all(checkpointer, checkpoint, saved, shardings)
    for name in extended:
        rows = new_pieces.extend(np.asarray(params[name]), len(leaves[name]))
        params[name] = jax.make_array_from_callback(rows.shape, leaves[name].sharding, rows.__getitem__)
    return nested({name: params[name] if name in restored else leaf for name, leaf in leaves.items()})


def load_all_params(checkpoint: epath.Path, shardings: Mapping[str, Sharding]) -> dict[str, Any]:
    """Restores all parameters of a checkpoint to the devices, as a nested dictionary.

    Args:
      checkpoint: directory of a step.
      shardings: sharding of each parameter of the model, by path.

    Raises:
      UsageError: a parameter of the checkpoint is not in `shardings`.
      BertjaxError: the checkpoint is damaged or cannot be read.
    """
    with _open_params(checkpoint) as (checkpointer, saved):
        try:
            known = {name: shardings[name] for name in saved}
        except KeyError as error:
            raise UsageError(
                f"unknown parameter of checkpoint {checkpoint}: {error.args[0]}; use a checkpoint of this version"
            ) from error
        return nested(_restore_all(checkpointer, checkpoint, saved, known))


def load_params_on_host(checkpoint: epath.Path) -> dict[str, np.ndarray]:
    """Restores all parameters of a checkpoint, as NumPy arrays by path."""
    params = {}
    with _open_params(checkpoint) as (checkpointer, saved):
        # Restore one array at a time, because Orbax needs memory for two copies of all arrays restored in one call.
        for name in saved:
            args = ocp.args.PyTreeRestore(
                nested({name: 0}),
                restore_args=nested({name: ocp.RestoreArgs(restore_type=np.ndarray)}),
                partial_restore=True,
            )
            params |= _flatten(checkpointer.restore(checkpoint / "params", args=args))
        check_fingerprint("params", fingerprint_on_host(nested(params)), read_metadata(checkpoint))
    return params


def save_params(
    workdir: epath.Path, params: dict[str, np.ndarray], kind: dict[str, Any], architecture: Architecture
) -> None:
    """Saves parameters as the checkpoint of step 0 of a workdir.

    Args:
      workdir: directory of the checkpoint.
      params: arrays by path.
      kind: kind of model, as `bertjax.model.heads.model_kind` describes it.
      architecture: architecture of the encoder.
    """
    tree = nested(params)
    metadata = CheckpointMetadata(
        step=0,
        model=kind,
        architecture=dataclasses.asdict(architecture),
        fingerprints={"params": fingerprint_on_host(tree)},
    )
    # Save memory: by default, Orbax copies all arrays first and buffers up to 2 GiB.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    handlers = {
        "params": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        "meta": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(workdir / CHECKPOINTS, options=options, item_handlers=handlers) as manager:
        arrays = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES)
        manager.save(0, args=ocp.args.Composite(params=arrays, meta=ocp.args.JsonSave(metadata.as_json())))
        manager.wait_until_finished()


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values by path, such as `encoder/pooler/bias`, to a nested dictionary."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _flatten(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in paths}


@contextlib.contextmanager
def _open_params(checkpoint: epath.Path) -> Iterator[tuple[ocp.Checkpointer, dict[str, Any]]]:
    """Yields a checkpointer and the metadata of each array by path. Unexpected errors are reported as damage."""
    try:
        with _quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            saved = checkpointer.metadata(checkpoint / "params").item_metadata
            if saved is None:
                raise ValueError("the list of arrays is missing")
            yield checkpointer, _flatten(saved.tree)
    except UsageError:
        raise
    except Exception as error:  # Orbax and its dependencies raise many exception types on damaged files.
        raise_unless_damage(error, checkpoint)
        raise BertjaxError(
            f"checkpoint {checkpoint} is damaged ({first_line(error)}); try an older checkpoint of the workdir"
        ) from error


def _restore_all(
    checkpointer: ocp.Checkpointer,
    checkpoint: epath.Path,
    saved: Mapping[str, Any],
    shardings: Mapping[str, Sharding | None],
) -> dict[str, Any]:
    """Restores all arrays by path with the given shardings, and checks their fingerprint."""
    abstract = nested(
        {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name]) for name, leaf in saved.items()}
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    params = checkpointer.restore(
        checkpoint / "params", args=ocp.args.PyTreeRestore(abstract, restore_args=restore_args)
    )
    check_fingerprint("params", fingerprint(params), read_metadata(checkpoint))
    return _flatten(params)


def _log_usage(checkpoint: epath.Path, restored: set[str], new: list[str], unused: list[str]) -> None:
    """Logs the restored, new and ignored parameters if they differ between model and checkpoint."""
    if new or unused:
        modules = Counter(name.split("/")[0] for name in restored)
        counts = ", ".join(f"{module} ({count} arrays)" for module, count in sorted(modules.items()))
        logger.info(f"restored from {checkpoint}: {counts}")
    if new:
        logger.info(f"initialized randomly: {', '.join(new)}")
    if unused:
        logger.info(f"ignored parameters of {checkpoint}: {', '.join(unused)}")


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Hides Orbax's warning about missing metadata of an item, which is expected."""
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl_logger.setLevel(level)
