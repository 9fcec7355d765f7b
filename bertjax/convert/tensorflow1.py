"""Checkpoints of google-research/bert: `bert_config.json`, `vocab.txt` and TensorFlow's files, read by TensorFlow.

TensorFlow is imported only when a checkpoint is read or written. Names are those of `modeling.py`,
`run_pretraining.py`, `run_classifier.py` and `run_squad.py`.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bertjax.convert import names
from bertjax.convert.foreign_config import check_vocabulary, foreign_fields, model_of, read_config
from bertjax.convert.portable import Portable
from bertjax.data.corpus.vocabulary import VOCABULARY_FILES, Vocabulary, load_vocabulary
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.tasks.finetuning.output_layer import CLASSES, SPANS

CONFIG = "bert_config.json"
# All that `write` leaves in a folder.
FILES = (CONFIG, "vocab.txt", "*.model", "bert_model.ckpt.*")
_PREFIX, _VOCABULARY = "bert_model.ckpt", "vocab.txt"
# `BertConfig` of `modeling.py`.
_DEFAULTS = {
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
# Not of google-research/bert, whose code takes no notice of them: what it has no words for.
_OUR_ACTIVATION, _OUR_EPSILON, _OUR_CASE = "bertjax_activation", "layer_norm_eps", "do_lower_case"
_THEIR_EPSILON = 1e-12
_OUR_LABELS = "bertjax_labels"
_STATE = re.compile('^model_checkpoint_path: "(.*)"$', re.MULTILINE)
_CLASSIFIERS = {CLASSES: "output_weights", SPANS: "cls/squad/output_weights"}
# Of training: Adam's moments and the step, which no conversion takes along.
_SLOTS = ("/adam_m", "/adam_v", "/Adam", "/Adam_1")
_COUNTERS = ("global_step", "beta1_power", "beta2_power")
# What is merged at the end; small enough that little is held twice.
_SHARD_BYTES = 16 << 20


def prefix_of(path: Path) -> Path | None:
    """The prefix of the checkpoint that a folder or a name like `bert_model.ckpt` means; None where there is none.

    Raises:
      UsageError: the folder has several, and does not tell which is meant.
    """
    if path.is_dir():
        found = {file.name.removesuffix(".index") for file in path.glob("*.index")}
        chosen = [name for name in (_newest(path), _PREFIX, *(found if len(found) == 1 else ())) if name in found]
        if found and not chosen:
            raise UsageError(f"{path} has {len(found)} checkpoints, {listed(sorted(found))}; give one of them")
        return path / chosen[0] if chosen else None
    named = path.with_suffix("") if path.suffix == ".index" else path
    return named if Path(f"{named}.index").is_file() else None


def _newest(folder: Path) -> str:
    """What TensorFlow's file `checkpoint` names as the newest; "" where there is none."""
    try:
        found = _STATE.search((folder / "checkpoint").read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return os.path.basename(found[1]) if found else ""


def read(path: Path) -> Portable:
    """The checkpoint of a folder, or of a prefix in one.

    Raises:
      UsageError: it has not the arrays that its config tells.
      BertjaxError: a file cannot be read.
    """
    import tensorflow as tf

    prefix = prefix_of(path)
    file = prefix.parent / CONFIG
    config = read_config(file)
    given = config.get("hidden_act", "gelu")
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise UsageError(f"{file} has hidden_act {given!r}; known: {', '.join(_ACTIVATIONS)}")
    model = model_of(
        config,
        file,
        _DEFAULTS,
        hidden_act=config.get(_OUR_ACTIVATION, _ACTIVATIONS[given]),
        layer_norm_eps=config.get(_OUR_EPSILON, _THEIR_EPSILON),
    )
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        everything = reader.get_variable_to_shape_map()
    except Exception as error:  # TensorFlow has a class of its own for each kind of damage.
        raise BertjaxError(f"cannot read {prefix}: {str(error).splitlines()[0]}; copy it anew") from error
    shapes = {
        name: tuple(shape)
        for name, shape in everything.items()
        if not name.endswith(_SLOTS) and name.rpartition("/")[2] not in _COUNTERS
    }
    slots = len(everything) - len(shapes)
    output = next((kind for kind, name in _CLASSIFIERS.items() if len(shapes.get(name, ())) == 2), "")
    count = shapes[_CLASSIFIERS[output]][0] if output else 0
    vocabulary = _vocabulary(prefix.parent, config.get(_OUR_CASE))
    check_vocabulary(vocabulary, model, prefix.parent)

    def get(name: str) -> np.ndarray:
        try:
            return reader.get_tensor(name)
        except Exception as error:
            raise BertjaxError(f"cannot read {name} of {prefix}: {str(error).splitlines()[0]}") from error

    params = names.import_params(
        names.parameters(model, _classifier(output, count)),
        model.num_hidden_layers,
        names.TENSORFLOW,
        shapes,
        get,
        str(prefix),
    )
    labels = ()
    if output == CLASSES and count > 1:
        labels = tuple(config.get(_OUR_LABELS) or (f"LABEL_{index}" for index in range(count)))
        if len(labels) != count or not all(isinstance(label, str) for label in labels):
            raise UsageError(f"{file}: {_OUR_LABELS} is {list(labels)}; the output layer has {count} classes")
    notes = (f"read: {prefix.name}",)
    if slots:
        notes += (f"{slots} arrays of training (Adam's moments, the step) are left behind",)
    return Portable(model, params, vocabulary, output, labels, notes)


def write(portable: Portable, folder: Path) -> list[str]:
    """Writes a folder and returns what there is to say about it; takes the arrays out of `portable.params`.

    Raises:
      UsageError: google-research/bert has no output layer of that kind.
    """
    if portable.output and portable.output not in _CLASSIFIERS:
        raise UsageError(f"google-research/bert has no output layer for {portable.output}; use --format huggingface")
    table = names.parameters(portable.model, _classifier(portable.output, portable.outputs))
    layers = portable.model.num_hidden_layers
    _save(names.export_params(table, layers, names.TENSORFLOW, portable.params), folder / _PREFIX)
    notes = []
    model = portable.model
    config = foreign_fields(model, names.TENSORFLOW)
    if model.hidden_act == "gelu_erf":
        config["hidden_act"] = "gelu"
        config[_OUR_ACTIVATION] = model.hidden_act
        notes.append(
            "the model's gelu is the exact one; google-research/bert computes the tanh form, so its outputs will "
            "differ a little there"
        )
    else:
        config["hidden_act"] = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[model.hidden_act]
    if model.layer_norm_eps != _THEIR_EPSILON:
        config[_OUR_EPSILON] = model.layer_norm_eps
        notes.append(f"layer_norm_eps is {model.layer_norm_eps:g}; google-research/bert always has {_THEIR_EPSILON:g}")
    if portable.labels:
        config[_OUR_LABELS] = list(portable.labels)
    if portable.vocabulary is None:
        notes.append("no vocabulary: the source has none")
    else:
        config[_OUR_CASE] = portable.vocabulary.lower_case
        (folder / VOCABULARY_FILES[portable.vocabulary.kind]).write_bytes(portable.vocabulary.content)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return notes


def _save(arrays: Iterator[tuple[str, np.ndarray]], prefix: Path) -> None:
    """Writes arrays by TensorFlow in parts, and merges these into one checkpoint."""
    import tensorflow as tf

    parts: list[str] = []
    batch: list[tuple[str, np.ndarray]] = []

    def flush() -> None:
        if batch:
            parts.append(f"{prefix}.part-{len(parts)}")
            tensor_names, values = zip(*batch, strict=True)
            with tf.device("/CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=parts[-1], tensor_names=tensor_names, shape_and_slices=[""] * len(batch), tensors=values
                )
            batch.clear()

    for name, array in arrays:
        batch.append((name, array))
        if sum(array.nbytes for _, array in batch) >= _SHARD_BYTES:
            flush()
    flush()
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix), delete_old_dirs=False)
    for part in parts:
        for file in prefix.parent.glob(f"{os.path.basename(part)}.*"):
            file.unlink()


def _classifier(output: str, count: int) -> tuple[int, dict[str, str]] | None:
    return (count, {names.TENSORFLOW: _CLASSIFIERS[output]}) if output else None


def _vocabulary(folder: Path, lower_case: bool | None) -> Vocabulary | None:
    found = [file for file in (folder / _VOCABULARY, *folder.glob("*.model")) if file.is_file()]
    return load_vocabulary(found[0], lower_case) if found else None
