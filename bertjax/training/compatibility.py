"""Compatibility checks between a checkpoint and a task: their vocabularies and output layers."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.data.corpus.vocabulary import ENTRY, load_entry, workdir_vocabulary
from bertjax.data.finetuning.cells import label_key
from bertjax.errors import UsageError, listed, quoted
from bertjax.model.models import model_description
from bertjax.tasks.finetuning.output_layer import MULTILABEL, OUTPUT_LAYER, read_output_layer
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import workdir_of
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.new_pieces import NewPieces, find_new_pieces
from bertjax.training.workdir import read_origin
from bertjax.utils.hub import is_hub

logger = logging.getLogger(__name__)


def check_vocabulary(task: Task, checkpoint: epath.Path, can_add_pieces: bool = False) -> NewPieces | None:
    """Returns the pieces that the task's vocabulary adds to the checkpoint's, or None if the vocabularies are equal.

    Raises a UsageError if the vocabularies differ in another way, or if they differ and `can_add_pieces` is False.
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
        source = source_of(checkpoint)
        vocabulary = saved.path if source == str(checkpoint) else source
        has_field = hasattr(task.config.data, "vocabulary")
        fix = "omit config.data.vocabulary" if has_field else f"prepare the data with --vocab {vocabulary}"
        raise UsageError(f"the vocabulary of {source} differs from the data's vocabulary; {fix}")
    return None


def reusable_outputs(task: Task, checkpoint: epath.Path) -> list[int] | None:
    """Returns, for each label of the task, its index in the checkpoint's output layer ([]: same order).

    Returns None if the output layer cannot be reused, so that training initializes a new one.
    """
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected or read_metadata(checkpoint).model != model_description(task.objective.model):
        return None
    if saved["kind"] != expected["kind"]:
        return None
    if not saved["output"]:  # The output layer of a converted checkpoint does not name its task.
        return _output_order(saved["labels"], expected["labels"])
    # An output layer without labels, such as a regression layer, can be reused only by the task that trained it.
    field = "labels" if saved["labels"] else "output"
    return [] if saved[field] == expected[field] else None


def check_output_layer(task: Task, checkpoint: epath.Path) -> list[int]:
    """Returns, for each label of the task, its index in the checkpoint's output layer ([]: same order).

    Raises a UsageError if the checkpoint's output layer was trained for a different task, even if the shapes match.
    """
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected:
        return []
    order: list[int] | None = []
    source, labels, names = source_of(checkpoint), expected["labels"], saved["labels"]
    # The output layer of a converted checkpoint does not name its task. Compare only its type and its labels.
    if saved["output"]:
        different = [field for field in ("output", "labels") if saved[field] != expected[field]]
    elif (saved["kind"] == MULTILABEL) != (expected["kind"] == MULTILABEL):
        different = ["kind"]
    else:
        order = _output_order(names, labels)
        different = ["labels"] if order is None and not _matches_by_position(names, labels, source) else []
    if different:
        was, needed = (f"{different[0]} {_quoted(layer[different[0]])}" for layer in (saved, expected))
        message = f"the output layer of {source} was trained with {was}"
        raise UsageError(f"{message}, but the config uses {needed}; use a checkpoint fine-tuned for this task")
    return order or []


def _output_layers(task: Task, checkpoint: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the output layers of a checkpoint and a task as dictionaries ({}: no output layer)."""
    layer = read_output_layer(workdir_of(checkpoint))
    return json.loads(layer.as_json()) if layer else {}, json.loads(task.workdir_files.get(OUTPUT_LAYER, b"{}"))


def _output_order(saved: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Returns, for each label, the index of the checkpoint's output with this name ([]: same order).

    Returns None if the names differ. Ignores case, unless names differ only in case. `LABEL_1` and `1` are equal.
    """
    for spelling in (label_key, str.lower):
        saved_names, names = [*map(spelling, saved)], [*map(spelling, labels)]
        if len({*names}) == len(names) and sorted(saved_names) == sorted(names):
            return [] if saved_names == names else [saved_names.index(name) for name in names]
    return None


def _matches_by_position(saved: Sequence[str], labels: Sequence[str], source: str) -> bool:
    """Returns True if there are as many outputs as labels, and either are named 0, 1, and so on. Logs the match."""
    numbers = [str(index) for index in range(len(labels))]
    are_numbers = [[*map(label_key, each)] == numbers for each in (saved, labels)]
    if len(saved) != len(labels) or not any(are_numbers):
        return False
    matched = f"matched the outputs {_quoted(saved)} of {source} to the labels {_quoted(labels)} by position"
    if are_numbers[0]:
        logger.info(matched)
    else:
        logger.warning(f"{matched}; check that outputs and labels agree, because files may number classes differently")
    return True


def source_of(checkpoint: epath.Path) -> str:
    """Returns the Hub address or existing path that a checkpoint was converted from, or its own path."""
    origin = read_origin(workdir_of(checkpoint))
    sources = [origin.get("address", ""), origin.get("source", "")]
    return next((name for name in sources if is_hub(name) or (name and Path(name).exists())), str(checkpoint))


def _quoted(value: str | Sequence[str]) -> str:
    return quoted(value) if isinstance(value, str) else listed(value) or "(none)"
