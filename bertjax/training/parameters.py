"""The parameters of a checkpoint alone: to start another run, to evaluate, to convert."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bertjax.errors import BertjaxError, UsageError, first_line, listed
from bertjax.training.checkpoint import (
    CHECKPOINTS,
    check_fingerprint,
    find_checkpoint,
    raise_unless_damage,
)
from bertjax.training.checkpoint_metadata import read_meta, sealed
from bertjax.training.fingerprint import fingerprint, fingerprint_on_host

logger = logging.getLogger(__name__)

_OUTPUTS = "classifier/bias"
# Of the files of a converted checkpoint: what Orbax holds back in memory before it writes.
_FILE_BYTES = 4 << 20


def load_params(path: str | Path, target: Any, fresh: tuple[str, ...] = ()) -> Any:
    """Parameters alone, to start another run or to evaluate: `target` with every array the checkpoint has.

    Args:
      path: see `find_checkpoint`.
      target: tree of arrays, returned where the checkpoint lacks them (a new output layer), or of shapes with
        shardings, all of which must be there.
      fresh: top-level parameters that are new whatever the checkpoint has.

    Raises:
      UsageError: no checkpoint, a shape that differs, or a parameter that `target` has no value for.
      BertjaxError: the checkpoint is damaged, or cannot be read.
    """
    path = find_checkpoint(path)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            saved = _saved_arrays(checkpointer, path / "params")
            wanted = _flat(target)
            taken = {name for name in {*saved} & {*wanted} if name.split("/")[0] not in fresh}
            for name in sorted(taken):
                if tuple(saved[name].shape) != tuple(wanted[name].shape):
                    raise UsageError(
                        f"parameter {name} has shape {tuple(saved[name].shape)} in {path} and "
                        f"{tuple(wanted[name].shape)} in the model"
                    )
            new, unused = sorted({*wanted} - taken), sorted({*saved} - taken)
            lacking = [name for name in new if isinstance(wanted[name], jax.ShapeDtypeStruct)]
            if lacking:
                raise UsageError(f"{path} has no parameters {listed(lacking)}")
            if new or unused:
                modules = Counter(name.split("/")[0] for name in taken)
                counts = ", ".join(f"{module} ({count} arrays)" for module, count in sorted(modules.items()))
                logger.info(f"from {path}: {counts}")
            if new:
                logger.info(f"new, with random values: {', '.join(new)}")
            if unused:
                logger.info(f"in {path}, not used here: {', '.join(unused)}")
            # What is not used is read for the fingerprint; where it was when it was saved there may be no device now.
            anywhere = _whole_on_each_device(wanted)
            places = {name: getattr(wanted[name], "sharding", None) if name in taken else anywhere for name in saved}
            spec = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[name])
                for name, leaf in saved.items()
            }
            whole = checkpointer.restore(path / "params", args=ocp.args.StandardRestore(nested(spec)))
        check_fingerprint(fingerprint(whole), read_meta(path), "params")
    except UsageError:
        raise
    except Exception as error:  # Damage shows as any exception of Orbax and what is below it.
        raise_unless_damage(error, path)
        raise BertjaxError(f"checkpoint {path} is damaged ({first_line(error)}); try an older one beside it") from error
    restored = _flat(whole)
    return nested({name: restored[name] if name in taken else leaf for name, leaf in wanted.items()})


def _whole_on_each_device(wanted: Mapping[str, Any]) -> Sharding | None:
    """On the devices of the first of these arrays; None where it is on none."""
    sharding = getattr(next(iter(wanted.values())), "sharding", None)
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def load_whole(checkpoint: epath.Path, shardings: Callable[[int], Mapping[str, Sharding]]) -> dict[str, Any]:
    """All parameters that a step's directory has, on the devices.

    Args:
      checkpoint: the directory.
      shardings: outputs of its output layer, 0 where it has none, to those of all parameters it may have.

    Raises:
      BertjaxError: it is damaged, or cannot be read.
    """
    try:
        with _without_warnings(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            saved = _saved_arrays(checkpointer, checkpoint / "params")
            places = shardings(saved[_OUTPUTS].shape[0] if _OUTPUTS in saved else 0)
            spec = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[name])
                for name, leaf in saved.items()
            }
            whole = checkpointer.restore(checkpoint / "params", args=ocp.args.StandardRestore(nested(spec)))
        check_fingerprint(fingerprint(whole), read_meta(checkpoint), "params")
    except Exception as error:  # Damage shows as any exception of Orbax and what is below it.
        raise_unless_damage(error, checkpoint)
        raise BertjaxError(
            f"checkpoint {checkpoint} is damaged ({first_line(error)}); try an older one beside it"
        ) from error
    return whole


def load_all_params(checkpoint: epath.Path) -> dict[str, np.ndarray]:
    """All parameters of a step's directory by path, on the host.

    Raises:
      BertjaxError: the checkpoint is damaged, or cannot be read.
    """
    params = {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            saved = _saved_arrays(checkpointer, checkpoint / "params")
            # One after the other: Orbax holds all it restores at a time twice.
            for name in saved:
                one = ocp.args.PyTreeRestore(
                    item=nested({name: 0}),
                    restore_args=nested({name: ocp.RestoreArgs(restore_type=np.ndarray)}),
                    partial_restore=True,
                )
                params |= _flat(checkpointer.restore(checkpoint / "params", args=one))
        check_fingerprint(fingerprint_on_host(nested(params)), read_meta(checkpoint), "params")
    except Exception as error:  # Damage shows as any exception of Orbax and what is below it.
        raise_unless_damage(error, checkpoint)
        raise BertjaxError(f"checkpoint {checkpoint} is damaged ({first_line(error)})") from error
    return params


def save_params(workdir: epath.Path, params: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
    """Saves parameters by path as the checkpoint of step 0 of a workdir, whose `identity` is sealed into it."""
    tree = nested(params)
    prints = {"params": fingerprint_on_host(tree)}
    meta = sealed({"step": 0, "score": None, "fingerprints": prints, "identity": identity})
    # Orbax would copy all arrays first, and keep what it writes in memory up to 2 GiB.
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
        written = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES)
        manager.save(0, args=ocp.args.Composite(params=written, meta=ocp.args.JsonSave(meta)))
        manager.wait_until_finished()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps from a user's program what Orbax warns of and is as it should be: items have no metadata of their own."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _saved_arrays(checkpointer: ocp.Checkpointer, path: epath.Path) -> dict[str, Any]:
    """What is known of each array before it is read."""
    found = checkpointer.metadata(path).item_metadata
    if found is None:
        raise ValueError(f"{path} does not tell what arrays it holds")
    return _flat(found.tree)


def _flat(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in paths}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Arrays by path to the tree of them that a model takes."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
