"""Parameters of a checkpoint: whether they fit a task, new vocabulary pieces, loading and saving."""

import contextlib
import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.data.corpus.tokenizer import wordpiece_model
from bertjax.data.corpus.vocabulary import ENTRY, WORDPIECE, Vocabulary, load_entry, workdir_vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line, listed, quoted
from bertjax.model.config import Architecture
from bertjax.model.models import model_description
from bertjax.tasks.finetuning.output_layer import MULTILABEL, OUTPUT_LAYER, read_output_layer
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.checkpoint_metadata import (
    CheckpointMetadata,
    check_fingerprint,
    fingerprint,
    raise_unless_damage,
    read_metadata,
)
from bertjax.training.workdir import read_origin
from bertjax.utils.hub import is_hub
from bertjax.utils.io import read_json

logger = logging.getLogger(__name__)

# Masked-LM parameters with one row per vocabulary entry.
VOCABULARY_PARAMS = ("encoder/embeddings/token", "masked_lm/bias", "masked_lm/decoder", "generator_lm/bias")
# Target size of files. It is small, because Orbax buffers an entire file in memory before writing it.
_FILE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class NewPieces:
    """Pieces that a vocabulary appends to the vocabulary of a checkpoint.

    Attributes:
      first_id: id of the first new piece. It is the size of the checkpoint's vocabulary.
      parts: for each new piece, the ids of the old pieces that it consists of.
    """

    first_id: int
    parts: tuple[tuple[int, ...], ...]

    def extend(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Returns a parameter with `num_rows` rows: old pieces, new pieces, and zeros for the padding.

        `rows` is the checkpoint's parameter, [padded old vocabulary, ...]. The row of a new piece is the mean of the
        rows of its parts.
        """
        extended = np.zeros((num_rows, *rows.shape[1:]), rows.dtype)
        extended[: self.first_id] = rows[: self.first_id]
        for row, part in enumerate(self.parts, self.first_id):
            extended[row] = rows[list(part)].mean(axis=0)
        return extended


def find_new_pieces(old: Vocabulary, new: Vocabulary) -> NewPieces | None:
    """Returns the pieces that `new` adds to `old`. Returns None if `new` does not begin with all pieces of `old`."""
    is_extended = new.kind == old.kind == WORDPIECE and new.lower_case == old.lower_case and new.size > old.size
    if not is_extended or new.pieces[: old.size] != old.pieces:
        return None
    # Call the WordPiece model directly, because `Tokenizer` would treat the prefix `##` as punctuation in a text.
    wordpiece = wordpiece_model(old, max(map(len, new.pieces)))
    parts = [tuple(token.id for token in wordpiece.tokenize(piece)) for piece in new.pieces[old.size :]]
    # An empty line of a vocabulary file is a piece without parts, so use [UNK] as its only part.
    return NewPieces(old.size, tuple(ids or (old.unk_id,) for ids in parts))


def check_vocabulary(task: Task, checkpoint: epath.Path, can_add_pieces: bool = False) -> NewPieces | None:
    """Returns the pieces that the task's vocabulary adds to the checkpoint's, or None if the vocabularies are equal.

    Raises a UsageError if the vocabularies differ in another way, or if they differ and not `can_add_pieces`.
    """
    workdir = workdir_of(checkpoint)
    if ENTRY not in task.workdir_files or not (workdir / ENTRY).exists():
        return None
    entry, saved = json.loads(task.workdir_files[ENTRY]), workdir_vocabulary(workdir)
    if can_add_pieces:
        new_pieces = find_new_pieces(saved, load_entry(Path(), entry, task.workdir_files[entry["file"]]))
        if new_pieces:
            return new_pieces
    if saved.sha256 != entry["sha256"]:
        source = _source(checkpoint)
        vocabulary = source or workdir / read_json(workdir / ENTRY)["file"]
        has_field = hasattr(task.config.data, "vocabulary")
        fix = "omit config.data.vocabulary" if has_field else f"prepare the data with --vocab {vocabulary}"
        raise UsageError(f"the vocabulary of {source or checkpoint} differs from the data's vocabulary; {fix}")
    return None


def has_output_layer_of(task: Task, checkpoint: epath.Path) -> bool:
    """Returns True if the output layer of a checkpoint has the labels of a task, so that training can reuse it."""
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected or read_metadata(checkpoint).model != model_description(task.objective.model):
        return False
    # Only the task that trained an output layer without labels, such as a regression layer, can reuse this layer.
    fields = ("kind", "labels") if saved["labels"] else ("kind", "output")
    return all(saved[field] == expected[field] for field in fields)


def check_output_layer(task: Task, checkpoint: epath.Path) -> list[int]:
    """Returns the index of the output for each label of a task, or [] if outputs and labels have the same order.

    Raises a UsageError if the checkpoint's output layer was trained for a different task, even if the shapes match.
    """
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected:
        return []
    order: list[int] | None = []
    source = _source(checkpoint) or str(checkpoint)
    # The output layer of a converted checkpoint does not name its task, so check only whether it is multi-label.
    if saved["output"]:
        different = [field for field in ("output", "labels") if saved[field] != expected[field]]
    elif (saved["kind"] == MULTILABEL) != (expected["kind"] == MULTILABEL):
        different = ["kind"]
    else:
        order = _output_order(saved["labels"], expected["labels"], source)
        different = ["labels"] if order is None else []
    if different:
        was, needed = (f"{different[0]} {_quoted(layer[different[0]])}" for layer in (saved, expected))
        message = f"the output layer of {source} was trained with {was}"
        raise UsageError(f"{message}, but the config uses {needed}; use a checkpoint fine-tuned for this task")
    return order or []


def _output_layers(task: Task, checkpoint: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of the output layers of a checkpoint and of a task ({}: no output layer)."""
    layer = read_output_layer(workdir_of(checkpoint))
    return json.loads(layer.as_json()) if layer else {}, json.loads(task.workdir_files.get(OUTPUT_LAYER, b"{}"))


def _output_order(saved: list[str], labels: list[str], source: str) -> list[int] | None:
    """Returns the checkpoint's output index of each label, matched by name, or [] if output i is label i.

    If no name matches, output i is label i. Returns None if only some names match.
    """
    saved_names, names = [label.lower() for label in saved], [label.lower() for label in labels]
    if sorted(saved_names) == sorted(names):
        return [] if saved_names == names else [saved_names.index(name) for name in names]
    if len(saved) != len(labels) or {*saved_names} & {*names}:
        return None
    logger.info(f"matched the outputs {_quoted(saved)} of {source} to the labels {_quoted(labels)} by position")
    return []


def _source(checkpoint: epath.Path) -> str:
    """Returns the hub address or existing path that a checkpoint was converted from, or ""."""
    origin = read_origin(workdir_of(checkpoint))
    sources = [origin.get("address", ""), origin.get("source", "")]
    return next((name for name in sources if is_hub(name) or (name and Path(name).exists())), "")


def _quoted(value: str | list[str]) -> str:
    return quoted(value) if isinstance(value, str) else listed(value) or "(none)"


def load_params(
    path: str | os.PathLike, target: Any, reinit_params: tuple[str, ...] = (), new_pieces: NewPieces | None = None
) -> Any:
    """Loads the parameters of a checkpoint in the structure of `target`, to start a run or to evaluate.

    Args:
      path: workdir or checkpoint, see `find_checkpoint`.
      target: tree of arrays, or of shapes, with shardings. An array that is not in the checkpoint, such as a new output
        layer, is returned unchanged.
      reinit_params: top-level parameters that keep their values in `target`, even if the checkpoint contains them.
      new_pieces: vocabulary pieces that the run adds to the checkpoint's (default: None, equal vocabularies).

    Raises:
      UsageError: no checkpoint exists, a shape differs, or the checkpoint lacks a parameter for which `target` contains
        a shape instead of an array.
      BertjaxError: the checkpoint is damaged or cannot be read.
    """
    checkpoint = find_checkpoint(path)
    saved = load_params_on_host(checkpoint)
    leaves: dict[str, Any] = flatten_dict(target, sep="/")
    restored = {name for name in saved.keys() & leaves.keys() if name.split("/")[0] not in reinit_params}
    if new_pieces:
        for name in restored.intersection(VOCABULARY_PARAMS):
            saved[name] = new_pieces.extend(saved[name], len(leaves[name]))
    new, unused = sorted(leaves.keys() - restored), sorted(saved.keys() - restored)
    if missing := [name for name in new if isinstance(leaves[name], jax.ShapeDtypeStruct)]:
        raise UsageError(f"{checkpoint} lacks the parameters {listed(missing)}; use a checkpoint of the same model")
    if new or unused:
        modules = Counter(name.split("/")[0] for name in restored)
        counts = ", ".join(f"{module} ({count} arrays)" for module, count in sorted(modules.items()))
        logger.info(f"restored from {checkpoint}: {counts}")
    if new:
        logger.info(f"initialized randomly: {', '.join(new)}")
    if unused:
        logger.info(f"ignored parameters of {checkpoint}: {', '.join(unused)}")
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
        check_fingerprint("params", unflatten_dict(params, sep="/"), read_metadata(checkpoint))
    return params


def lacks_lm_head(checkpoint: epath.Path) -> bool:
    """Returns True if a checkpoint lacks a language-model head, such as `masked_lm`."""
    with _open_params(checkpoint) as (_, names):
        return not any(name.split("/")[0].endswith("_lm") for name in names)


def save_params(
    workdir: epath.Path, params: dict[str, np.ndarray], model: dict[str, Any], architecture: Architecture
) -> None:
    """Saves parameters, a dictionary of arrays by path, as the checkpoint of step 0 of a workdir.

    `model` is a description of the model, as `bertjax.model.heads.model_description` returns it.
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
        manager.save(0, args=ocp.args.Composite(params=arrays, meta=ocp.args.JsonSave(dataclasses.asdict(metadata))))
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
