"""Where a fine-tuning run takes its model's sizes and its vocabulary from: the checkpoint it starts with."""

import json
import logging

from etils import epath
from ml_collections import ConfigDict

from bertjax.data.corpus.vocabulary_files import ENTRY, workdir_vocabulary
from bertjax.errors import UsageError, listed, quoted
from bertjax.tasks.finetuning.output_layer import MULTILABEL, OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import workdir_of
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.utils.io import read_json

logger = logging.getLogger(__name__)


def check_vocabulary(task: Task, checkpoint: epath.Path) -> None:
    """Refuses a checkpoint whose pieces have other ids than the task's data.

    Raises:
      UsageError: it has another vocabulary.
    """
    theirs = workdir_of(checkpoint) / ENTRY
    if ENTRY in task.workdir_files and theirs.exists():
        ours = json.loads(task.workdir_files[ENTRY])["sha256"]
        found = workdir_vocabulary(workdir_of(checkpoint)).sha256
        if found != ours:
            raise UsageError(
                f"{checkpoint} was trained with another vocabulary than the data has (SHA-256 {found[:12]} and "
                f"{ours[:12]}); prepare the data with {theirs.parent / read_json(theirs)['file']}"
            )


def check_output_layer(task: Task, checkpoint: epath.Path) -> list[int]:
    """Refuses to evaluate an output layer as that of another task, whose shape it may well have.

    Args:
      task: what the layer is to be used for.
      checkpoint: whose layer it is.

    Returns:
      For each label of the task, which output of the layer it is; [] where all are in order.

    Raises:
      UsageError: the checkpoint was trained for another task, or its classes are others.
    """
    theirs = workdir_of(checkpoint) / OUTPUT_LAYER
    if OUTPUT_LAYER not in task.workdir_files or not theirs.exists():
        return []
    ours, found = json.loads(task.workdir_files[OUTPUT_LAYER]), read_json(theirs)
    # "" is converted from a format that does not tell.
    for what in ("output", "labels") if found["output"] else ():
        if found[what] != ours[what]:
            raise UsageError(
                f"the output layer of {checkpoint} has {what} {_shown(found[what])}, the config wants "
                f"{_shown(ours[what])}; give a checkpoint that was fine-tuned for it"
            )
    if not found["output"] and (found["kind"] == MULTILABEL) != (ours["kind"] == MULTILABEL):
        raise UsageError(
            f"the output layer of {checkpoint} is for {found['kind']}, the config wants {ours['output']}; give "
            f"kind={MULTILABEL} for the one and not for others"
        )
    return [] if found["output"] else _output_order(found["labels"], ours["labels"], checkpoint)


def _output_order(found: list[str], wanted: list[str], checkpoint: epath.Path) -> list[int]:
    """Which of the found labels each wanted one is: the one of its name, or, where none has its name, of its place."""
    names, ours = [label.lower() for label in found], [label.lower() for label in wanted]
    if sorted(names) == sorted(ours):
        return [] if names == ours else [names.index(label) for label in ours]
    if len(found) != len(wanted) or {*names} & {*ours}:
        raise UsageError(
            f"the output layer of {checkpoint} has labels {_shown(found)}, the config wants {_shown(wanted)}"
        )
    logger.info(f"the labels {_shown(found)} of {checkpoint} are taken for {_shown(wanted)}, in this order")
    return []


def _shown(value: str | list[str]) -> str:
    return quoted(value) if isinstance(value, str) else listed(value) or "(none)"


def adopt(config: ConfigDict, checkpoint: epath.Path) -> ConfigDict:
    """The config with what it leaves to the checkpoint: its architecture, whole, and the path of the vocabulary.

    Raises:
      UsageError: the config wants another architecture.
      BertjaxError: the checkpoint is damaged.
    """
    whole = config.copy_and_resolve_references()
    for name, value in vars(saved_architecture(checkpoint)).items():
        given = whole.model.get(name)
        if name == "vocab_size" and not given:
            # The vocabulary's, whose hash is compared.
            continue
        # How far the token table is padded is nobody's wish, and must be as it was saved.
        if given is not None and given != value and name != "pad_vocab_to_multiple_of":
            raise UsageError(
                f"config.model.{name} is {given}, {checkpoint} has {value}; leave size= out of the "
                "config, or give what the checkpoint has"
            )
        whole.model[name] = value
    if "vocabulary" in whole.data and not whole.data.vocabulary:
        whole.data.vocabulary = str(workdir_of(checkpoint) / ENTRY)
    return whole
