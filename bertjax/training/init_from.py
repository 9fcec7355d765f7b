"""Compatibility checks between a task and the checkpoint that it starts from or evaluates."""

import json
import logging
from collections.abc import Collection

from etils import epath
from ml_collections import ConfigDict

from bertjax.data.corpus.vocabulary import ENTRY, load_vocabulary, workdir_vocabulary
from bertjax.errors import UsageError, listed, quoted
from bertjax.model.heads import model_kind
from bertjax.tasks.finetuning.output_layer import MULTILABEL, OUTPUT_LAYER, read_output_layer
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import workdir_of
from bertjax.training.checkpoint_metadata import read_metadata, saved_architecture
from bertjax.training.new_pieces import NewPieces, find_new_pieces
from bertjax.utils.io import read_json

logger = logging.getLogger(__name__)


def adopt(config: ConfigDict, checkpoint: epath.Path, explicit: Collection[str] = ()) -> ConfigDict:
    """Returns a copy of a config with the architecture of a checkpoint, and with its vocabulary if unset.

    Args:
      config: config of an experiment.
      checkpoint: directory of a step.
      explicit: architecture fields that the user set.

    Raises:
      UsageError: the user set an architecture field to a different value.
      BertjaxError: the checkpoint is damaged.
    """
    config = config.copy_and_resolve_references()
    for name, saved in vars(saved_architecture(checkpoint)).items():
        configured = config.model.get(name)
        if name == "vocab_size" and not configured:
            # The vocabulary determines its size, and `check_vocabulary` compares the vocabularies.
            continue
        # The checkpoint's padding of the token table overrides the config, because it determines the table's shape.
        if name in explicit and configured != saved and name != "pad_vocab_to_multiple_of":
            raise UsageError(
                f"config.model.{name}={configured} differs from {saved} of {checkpoint}; leave size= and "
                f"config.model.{name} out, or use the checkpoint's value"
            )
        if configured is not None and configured != saved:
            logger.debug(f"config.model.{name}={saved}, from {checkpoint}")
        config.model[name] = saved
    if "vocabulary" in config.data and not config.data.vocabulary:
        config.data.vocabulary = str(workdir_of(checkpoint) / ENTRY)
    return config


def has_output_layer_of(task: Task, checkpoint: epath.Path) -> bool:
    """Returns whether the output layer of a checkpoint has the labels of a task, so that training can continue it."""
    layer = read_output_layer(workdir_of(checkpoint))
    if layer is None or OUTPUT_LAYER not in task.workdir_files:
        return False
    if read_metadata(checkpoint).model != model_kind(task.objective.model):
        return False
    saved, expected = json.loads(layer.as_json()), json.loads(task.workdir_files[OUTPUT_LAYER])
    # Outputs without labels, such as scores, are the same only for the same task.
    fields = ("kind", "labels") if layer.labels else ("kind", "output")
    return all(saved[field] == expected[field] for field in fields)


def check_vocabulary(task: Task, checkpoint: epath.Path) -> None:
    """Raises a UsageError if the vocabularies of a checkpoint and of the task's data differ."""
    file = workdir_of(checkpoint) / ENTRY
    if ENTRY not in task.workdir_files or not file.exists():
        return
    expected = json.loads(task.workdir_files[ENTRY])["sha256"]
    saved = workdir_vocabulary(workdir_of(checkpoint)).sha256
    if saved != expected:
        raise UsageError(
            f"the vocabulary of {checkpoint} differs from the data's vocabulary (SHA-256 {saved[:12]} and "
            f"{expected[:12]}); prepare the data with {file.parent / read_json(file)['file']}"
        )


def check_initial_vocabulary(task: Task, checkpoint: epath.Path) -> NewPieces | None:
    """Checks the vocabulary of an initial checkpoint against that of the task's data.

    Returns:
      The pieces that the data's vocabulary adds to the checkpoint's. None if the vocabularies are equal.

    Raises:
      UsageError: the vocabularies differ, and the task cannot start with new pieces.
    """
    if task.can_add_pieces and (workdir_of(checkpoint) / ENTRY).exists() and ENTRY in task.workdir_files:
        entry = json.loads(task.workdir_files[ENTRY])
        vocabulary = load_vocabulary(entry["file"], entry["lower_case"], task.workdir_files[entry["file"]])
        if new_pieces := find_new_pieces(workdir_vocabulary(workdir_of(checkpoint)), vocabulary):
            return new_pieces
    check_vocabulary(task, checkpoint)
    return None


def check_output_layer(task: Task, checkpoint: epath.Path) -> list[int]:
    """Checks that the output layer of a checkpoint fits a task, and matches its outputs to the task's labels.

    Args:
      task: task to evaluate.
      checkpoint: directory of a step.

    Returns:
      For each label of the task, the index of its output. [] if outputs and labels have the same order.

    Raises:
      UsageError: the output layer was trained for a different task, even if the shapes match.
    """
    layer = read_output_layer(workdir_of(checkpoint))
    if OUTPUT_LAYER not in task.workdir_files or layer is None:
        return []
    expected, saved = json.loads(task.workdir_files[OUTPUT_LAYER]), json.loads(layer.as_json())
    if saved["output"]:
        for field in ("output", "labels"):
            if saved[field] != expected[field]:
                raise UsageError(
                    f"the output layer of {checkpoint} was trained with {field} {_quoted(saved[field])}, but the "
                    f"config uses {_quoted(expected[field])}; use a checkpoint fine-tuned for this task"
                )
        return []
    # The output layer of a converted checkpoint does not name its task, so compare the kinds of labels.
    if (saved["kind"] == MULTILABEL) != (expected["kind"] == MULTILABEL):
        raise UsageError(
            f"the output layer of {checkpoint} is for {saved['kind']}, but the config is for {expected['output']}; use "
            f"kind={MULTILABEL} if a text can have several labels, and another kind otherwise"
        )
    return _output_order(saved["labels"], expected["labels"], checkpoint)


def _output_order(saved: list[str], labels: list[str], checkpoint: epath.Path) -> list[int]:
    """Returns the index of each label's output, matched by name. Returns [] if the order stays the same."""
    saved_names, names = [label.lower() for label in saved], [label.lower() for label in labels]
    if sorted(saved_names) == sorted(names):
        return [] if saved_names == names else [saved_names.index(name) for name in names]
    if len(saved) != len(labels) or {*saved_names} & {*names}:
        raise UsageError(
            f"the output layer of {checkpoint} was trained with labels {_quoted(saved)}, but the config uses "
            f"{_quoted(labels)}; use a checkpoint fine-tuned for these labels"
        )
    logger.info(f"outputs {_quoted(saved)} of {checkpoint} are used as labels {_quoted(labels)}, in this order")
    return []


def _quoted(value: str | list[str]) -> str:
    return quoted(value) if isinstance(value, str) else listed(value) or "(none)"
