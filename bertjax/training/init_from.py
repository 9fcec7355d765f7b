"""Compatibility checks between a checkpoint and a task, and embeddings of new vocabulary pieces."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bertjax.data.corpus.tokenizer import Tokenizer, wordpiece_model
from bertjax.data.corpus.vocabulary import (
    ENTRY,
    TOKENIZER_JSON,
    WORDPIECE,
    Vocabulary,
    load_entry,
    load_tokenizer_json,
    workdir_vocabulary,
)
from bertjax.errors import UsageError, listed, quoted
from bertjax.model.models import model_description
from bertjax.tasks.finetuning.output_layer import MULTILABEL, OUTPUT_LAYER, read_output_layer
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import workdir_of
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.workdir import read_origin
from bertjax.utils.hub import is_hub

logger = logging.getLogger(__name__)

# Masked-LM parameters with one row per vocabulary entry.
VOCABULARY_PARAMS = ("encoder/embeddings/token", "masked_lm/bias", "masked_lm/decoder", "generator_lm/bias")


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
    is_extended = new.kind == old.kind and new.lower_case == old.lower_case and new.size > old.size
    if not is_extended or new.pieces[: old.size] != old.pieces:
        return None
    added: set[str] = set()
    if new.kind == WORDPIECE:
        # Call the WordPiece model directly, because `Tokenizer` would treat the prefix `##` as punctuation in a text.
        model = wordpiece_model(old, max(map(len, new.pieces)))
    elif new.kind == TOKENIZER_JSON:
        # Call the model directly here, too. Only tokens that the user added are text.
        model = load_tokenizer_json(old.path, old.content).model
        added = {token["content"] for token in json.loads(new.content)["added_tokens"]}
        (settings, merges), (new_settings, new_merges) = map(_settings_and_merges, (old, new))
        if new_settings != settings or new_merges[: len(merges)] != merges:
            return None
    else:
        return None
    encode = Tokenizer(old).encode
    parts = [
        tuple(encode(piece) if piece in added else (token.id for token in model.tokenize(piece)))
        for piece in new.pieces[old.size :]
    ]
    # An empty line of a vocabulary file is a piece without parts, so use [UNK] as its only part.
    return NewPieces(old.size, tuple(ids or (old.unk_id,) for ids in parts))


def _settings_and_merges(vocabulary: Vocabulary) -> tuple[dict[str, Any], list[Any]]:
    """Returns the settings of a `tokenizer.json` without its pieces, and the merges of BPE ([]: not BPE)."""
    data = json.loads(load_tokenizer_json(vocabulary.path, vocabulary.content).to_str())
    del data["added_tokens"], data["model"]["vocab"]
    return data, data["model"].pop("merges", [])


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


def has_output_layer_of(task: Task, checkpoint: epath.Path) -> bool:
    """Returns True if the output layer of a checkpoint has the labels of a task, so that training can reuse it."""
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected or read_metadata(checkpoint).model != model_description(task.objective.model):
        return False
    # Only the task that trained an output layer without labels, such as a regression layer, can reuse this layer.
    fields = ("kind", "labels") if saved["labels"] else ("kind", "output")
    return all(saved[field] == expected[field] for field in fields)


def check_output_layer(task: Task, checkpoint: epath.Path) -> list[int]:
    """Returns for each label of a task the index of the checkpoint's output, or [] if the order is the same.

    Raises a UsageError if the checkpoint's output layer was trained for a different task, even if the shapes match.
    """
    saved, expected = _output_layers(task, checkpoint)
    if not saved or not expected:
        return []
    order: list[int] | None = []
    source = source_of(checkpoint)
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
    """Returns the output layers of a checkpoint and a task as dictionaries ({}: no output layer)."""
    layer = read_output_layer(workdir_of(checkpoint))
    return json.loads(layer.as_json()) if layer else {}, json.loads(task.workdir_files.get(OUTPUT_LAYER, b"{}"))


def _output_order(saved: list[str], labels: list[str], source: str) -> list[int] | None:
    """Returns for each label the index of the checkpoint's output with this name, or [] if output i is label i.

    If no name matches, output i is label i. Returns None if only some names match.
    """
    saved_names, names = [label.lower() for label in saved], [label.lower() for label in labels]
    if sorted(saved_names) == sorted(names):
        return [] if saved_names == names else [saved_names.index(name) for name in names]
    if len(saved) != len(labels) or {*saved_names} & {*names}:
        return None
    logger.info(f"matched the outputs {_quoted(saved)} of {source} to the labels {_quoted(labels)} by position")
    return []


def source_of(checkpoint: epath.Path) -> str:
    """Returns the Hub address or existing path that a checkpoint was converted from, or its own path."""
    origin = read_origin(workdir_of(checkpoint))
    sources = [origin.get("address", ""), origin.get("source", "")]
    return next((name for name in sources if is_hub(name) or (name and Path(name).exists())), str(checkpoint))


def _quoted(value: str | list[str]) -> str:
    return quoted(value) if isinstance(value, str) else listed(value) or "(none)"
