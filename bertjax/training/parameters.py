"""Functions that load and save the parameters of a checkpoint, without the rest of the train state."""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.errors import BertjaxError, UsageError, first_line, listed
from bertjax.model.config import Architecture
from bertjax.training.checkpoint import CHECKPOINTS
from bertjax.training.checkpoint_metadata import CheckpointMetadata, fingerprint, raise_unless_damage, read_metadata
from bertjax.training.compatibility import source_of
from bertjax.training.new_pieces import VOCABULARY_PARAMS, NewPieces

logger = logging.getLogger(__name__)

# Target size of files. It is small, because Orbax buffers an entire file in memory before writing it.
_FILE_BYTES = 4 << 20


def load_params(
    checkpoint: epath.Path,
    target: Any,
    output_params: tuple[str, ...] = (),
    outputs: Sequence[int] | None = (),
    new_pieces: NewPieces | None = None,
) -> Any:
    """Loads the parameters of a checkpoint in the structure of `target`, to start a run or to evaluate.

    Args:
      checkpoint: folder of the checkpoint.
      target: tree of arrays, or of shapes, with shardings. An array that is not in the checkpoint, such as a new output
        layer, is returned unchanged.
      output_params: top-level parameters of the output layer and, if there is one, of the feature head.
      outputs: for each output, its index in the checkpoint's output layer (default: the same order). If it is None,
        `output_params` keep their values in `target`, even if the checkpoint contains them.
      new_pieces: vocabulary pieces that the run adds to the checkpoint's (default: None, equal vocabularies).

    Raises:
      UsageError: a shape differs, or the checkpoint lacks a parameter for which `target` contains a shape instead of an
        array.
      BertjaxError: the checkpoint is damaged or cannot be read.
    """
    saved = load_params_on_host(checkpoint)
    leaves: dict[str, Any] = flatten_dict(target, sep="/")
    if "pooler/norm/scale" in leaves.keys() - saved.keys():
        # Initialize the pooler from the masked-LM head, as in transformers, where all ModernBERT models share it.
        for name in leaves:
            source = name.replace("pooler/dense/", "masked_lm/transform/").replace("pooler/norm/", "masked_lm/norm/")
            if source in saved.keys() - leaves.keys():
                saved[name] = saved.pop(source)
    own_outputs = {name for name in leaves if name.split("/")[0] in output_params}
    restored = saved.keys() & leaves.keys() - (own_outputs if outputs is None else set())
    if outputs:
        logger.info(f"reordered the outputs of {source_of(checkpoint)} to match the labels of the task: {outputs}")
        for name in restored & own_outputs:
            saved[name] = saved[name][..., outputs]
    if new_pieces:
        for name in restored.intersection(VOCABULARY_PARAMS):
            saved[name] = new_pieces.extend(saved[name], len(leaves[name]))
    new, unused = sorted(leaves.keys() - restored), sorted(saved.keys() - restored)
    if missing := [name for name in new if isinstance(leaves[name], jax.ShapeDtypeStruct)]:
        raise UsageError(f"{checkpoint} lacks the parameters {listed(missing)}; use a checkpoint of the same model")
    if new or unused:
        modules = sorted(Counter(name.split("/")[0] for name in restored).items())
        counts = ", ".join(f"{module} ({count} arrays)" for module, count in modules)
        logger.info(f"restored from {source_of(checkpoint)}: {counts}")
    if new:
        logger.info(f"initialized randomly: {', '.join(new)}")
    if unused:
        logger.info(f"ignored parameters of {source_of(checkpoint)}: {', '.join(unused)}")
    for name in sorted(restored):
        array, leaf = saved[name], leaves[name]
        if array.shape != leaf.shape:
            message = f"parameter {name} has shape {array.shape} in {checkpoint} but {leaf.shape} in the model"
            raise UsageError(f"{message}; use a checkpoint of the same model")
        leaves[name] = jax.make_array_from_callback(array.shape, leaf.sharding, array.__getitem__)
    return unflatten_dict(leaves, sep="/")


def load_params_on_host(checkpoint: epath.Path) -> dict[str, np.ndarray]:
    """Loads all parameters of a checkpoint as NumPy arrays by path, and checks their fingerprint."""
    params: dict[str, np.ndarray] = {}
    with _open_params(checkpoint) as (checkpointer, names):
        # Restore one array at a time, because Orbax needs memory for two copies of all arrays restored in one call.
        for name in names:
            args = ocp.args.PyTreeRestore(
                unflatten_dict({name: 0}, sep="/"),
                restore_args=unflatten_dict({name: ocp.RestoreArgs(restore_type=np.ndarray)}, sep="/"),
                partial_restore=True,
            )
            params |= flatten_dict(checkpointer.restore(checkpoint / "params", args=args), sep="/")
        read_metadata(checkpoint).check_fingerprint("params", unflatten_dict(params, sep="/"))
    return params


def lacks_lm_head(checkpoint: epath.Path) -> bool:
    """Returns True if a checkpoint lacks a language-model head, such as `masked_lm`."""
    with _open_params(checkpoint) as (_, names):
        return not any(name.split("/")[0].endswith("_lm") for name in names)


def save_params(
    workdir: epath.Path, params: dict[str, np.ndarray], model: dict[str, Any], architecture: Architecture
) -> None:
    """Saves parameters, a dictionary of arrays by path, as the checkpoint of step 0 of a workdir.

    `model` is a description of the model, as `bertjax.model.models.model_description` returns it.
    """
    tree = unflatten_dict(params, sep="/")
    metadata = CheckpointMetadata(0, model, dataclasses.asdict(architecture), {"params": fingerprint(tree)})
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


@contextlib.contextmanager
def _open_params(checkpoint: epath.Path) -> Iterator[tuple[ocp.Checkpointer, list[str]]]:
    """Yields a checkpointer and the paths of all arrays. Raises a BertjaxError if the files are damaged."""
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(max(level, logging.ERROR))  # Orbax warns about item metadata, which params do not need.
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            saved = checkpointer.metadata(checkpoint / "params").item_metadata
            if saved is None:
                raise ValueError("the list of arrays is missing")
            yield checkpointer, [*flatten_dict(saved.tree, sep="/")]
    except Exception as error:  # Orbax and its dependencies raise many exception types on damaged files.
        raise_unless_damage(error, checkpoint)
        raise BertjaxError(f"checkpoint {checkpoint} is damaged ({first_line(error)}); use an older one") from error
    finally:
        absl_logger.setLevel(level)
