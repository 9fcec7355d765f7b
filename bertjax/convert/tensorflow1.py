"""Conversion from and to google-research/bert checkpoints: `bert_config.json`, `vocab.txt` and TensorFlow variables.

TensorFlow is imported only to read or write a checkpoint. Variable names are those of `modeling.py`,
`run_pretraining.py`, `run_classifier.py` and `run_squad.py`.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.convert import names
from bertjax.convert.portable import (
    DEFAULT_EPSILON,
    PortableCheckpoint,
    fit_vocabulary,
    parameter_table,
    parse_bert_config,
    read_config,
    read_vocabulary_file,
    shared_fields,
)
from bertjax.data.corpus.vocabulary import MAX_WORD_CHARS, TOKENIZER_JSON, VOCABULARY_FILES, Vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line, listed
from bertjax.inference.output_kinds import OUTPUT_KINDS

CONFIG = "bert_config.json"
_PREFIX, _VOCABULARY = "bert_model.ckpt", "vocab.txt"
# Files of an exported checkpoint. A folder that contains other files is never overwritten.
FILES = (CONFIG, _VOCABULARY, "*.model", f"{_PREFIX}.*")
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
# Additional config fields that bertjax writes and google-research/bert ignores.
_ACTIVATION_FIELD, _LABELS_FIELD = "bertjax_activation", "bertjax_labels"
_WORD_LIMIT_FIELD = "bertjax_max_word_chars"
_EPSILON_FIELD, _LOWER_CASE_FIELD = "layer_norm_eps", "do_lower_case"
_TOKEN_EMBEDDINGS = "bert/embeddings/word_embeddings"
_LATEST_CHECKPOINT = re.compile('^model_checkpoint_path: "(.*)"$', re.MULTILINE)
# Approximate bytes per chunk. Checkpoints are written in chunks to limit memory.
_CHUNK_BYTES = 16 << 20


def find_prefix(path: Path) -> Path | None:
    """Returns the prefix of the checkpoint at `path`, or None if the path contains no checkpoint.

    `path` is a folder, a prefix such as `DIR/bert_model.ckpt`, or an `.index` file.
    """
    if path.is_dir():
        prefixes = {file.name.removesuffix(".index") for file in path.glob("*.index")}
        candidates = [_latest_prefix(path), _PREFIX, *(prefixes if len(prefixes) == 1 else ())]
        matches = [name for name in candidates if name in prefixes]
        if prefixes and not matches:
            raise UsageError(
                f"{path} contains {len(prefixes)} checkpoints: {listed(sorted(prefixes))}; use the path of one of them"
            )
        return path / matches[0] if matches else None
    prefix = path.with_suffix("") if path.suffix == ".index" else path
    return prefix if Path(f"{prefix}.index").is_file() else None


def _latest_prefix(folder: Path) -> str:
    """Returns the latest checkpoint's name in TensorFlow's file `checkpoint`, or "" if this file does not exist."""
    try:
        match = _LATEST_CHECKPOINT.search((folder / "checkpoint").read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return os.path.basename(match[1]) if match else ""


def read_vocabulary(folder: Path, lower_case: bool | None = None) -> Vocabulary | None:
    """Returns the vocabulary of a checkpoint's folder, or None if the folder contains no vocabulary.

    `lower_case`, if not None, replaces `do_lower_case` of its config.
    """
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    lower_case = config.get(_LOWER_CASE_FIELD) if lower_case is None else lower_case
    return read_vocabulary_file(folder, lower_case, config.get(_WORD_LIMIT_FIELD, MAX_WORD_CHARS))


def training_kind(name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Returns the kind of a variable of the training run, such as `adam_m`, or "" for a variable of the model.

    BERT has no scalar parameters, so scalars are counters, such as `global_step` or a loss scale. Optimizers and moving
    averages name their variables after the parameter, as `PARAMETER/SLOT` or `SCOPE/PARAMETER/SLOT`, or have a scope
    with a copy of each parameter, `SCOPE/PARAMETER`.
    """
    scope, _, inner = name.partition("/")
    if inner in shapes and f"{scope}/{_TOKEN_EMBEDDINGS}" in shapes:
        return f"{scope}/..."
    parts = name.split("/")
    spans = itertools.combinations(range(len(parts)), 2)
    is_training = len(shapes[name]) == 0 or any("/".join(parts[start:end]) in shapes for start, end in spans)
    return parts[-1] if is_training else ""


def read(path: Path, lower_case: bool | None = None) -> PortableCheckpoint:
    """Reads a checkpoint from a folder, or from a path prefix such as `bert_model.ckpt`.

    `lower_case`, if not None, replaces `do_lower_case` of its config.
    """
    import tensorflow as tf

    prefix = find_prefix(path) or path
    config_file = prefix.parent / CONFIG
    tf_config = read_config(config_file)
    activation = tf_config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UsageError(
            f"{config_file} has unsupported hidden_act {activation!r}; use one of {', '.join(_ACTIVATIONS)}"
        )
    config = parse_bert_config(
        tf_config,
        config_file,
        type_vocab_size=16,
        hidden_act=tf_config.get(_ACTIVATION_FIELD, _ACTIVATIONS[activation]),
        layer_norm_eps=tf_config.get(_EPSILON_FIELD, DEFAULT_EPSILON),
    )
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        all_shapes = reader.get_variable_to_shape_map()
    except Exception as error:  # TensorFlow raises different exception types for different kinds of damage.
        raise BertjaxError(f"cannot read {prefix}: {first_line(error)}; copy it again") from error
    training_kinds = {name: training_kind(name, all_shapes) for name in all_shapes}
    shapes = {name: tuple(shape) for name, shape in all_shapes.items() if not training_kinds[name]}
    kernels = {name: kind.tensorflow_kernel for name, kind in OUTPUT_KINDS.items() if kind.tensorflow_kernel}
    output_kind = next((kind for kind, kernel in kernels.items() if len(shapes.get(kernel, ())) == 2), "")
    num_outputs = shapes[kernels[output_kind]][0] if output_kind else 0
    num_rows = config.vocab_size
    vocabulary = read_vocabulary(prefix.parent, lower_case)
    vocabulary, config, padding_notes = fit_vocabulary(vocabulary, config, prefix.parent)

    def read_array(name: str) -> np.ndarray:
        try:
            return reader.get_tensor(name)
        except Exception as error:
            raise BertjaxError(
                f"cannot read {name} of {prefix}: {first_line(error)}; copy the checkpoint again"
            ) from error

    params = names.import_params(
        parameter_table(config, output_kind, num_outputs, num_rows),
        config.num_hidden_layers,
        names.TENSORFLOW,
        shapes,
        read_array,
        str(prefix),
    )
    labels: tuple[str, ...] = ()
    # A single output means regression, which has no labels.
    if output_kind and OUTPUT_KINDS[output_kind].has_labels and num_outputs > 1:
        labels = _read_labels(tf_config, num_outputs, config_file)
    notes = [f"read {prefix.name}", *padding_notes]
    if skipped := all_shapes.keys() - shapes.keys():
        kinds = sorted({training_kinds[name] for name in skipped})
        notes.append(f"ignored {len(skipped)} variables of the training run: {listed(kinds)}")
    return PortableCheckpoint(config, params, vocabulary, output_kind, labels, tuple(notes))


def _read_labels(tf_config: dict[str, Any], num_outputs: int, config_file: Path) -> tuple[str, ...]:
    labels = tuple(tf_config.get(_LABELS_FIELD) or (f"LABEL_{index}" for index in range(num_outputs)))
    if len(labels) != num_outputs or not all(isinstance(label, str) for label in labels):
        raise UsageError(
            f"{config_file}: {_LABELS_FIELD} is {list(labels)}, but the output layer has {num_outputs} classes; "
            "list one name per class"
        )
    return labels


def write(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a checkpoint folder and returns notes for the user.

    Removes the arrays from `checkpoint.params` to save memory.
    """
    kind = OUTPUT_KINDS.get(checkpoint.output_kind)
    if kind and not kind.tensorflow_kernel:
        raise UsageError(
            f"google-research/bert has no output layer for {checkpoint.output_kind}; use the format huggingface"
        )
    if checkpoint.vocabulary and checkpoint.vocabulary.kind == TOKENIZER_JSON:
        raise UsageError(
            f"google-research/bert has no tokenizer like {checkpoint.vocabulary.path}; use the format huggingface"
        )
    config, notes = checkpoint.config, []
    tf_config = shared_fields(checkpoint, names.TENSORFLOW)
    if config.hidden_act == "gelu_erf":
        tf_config["hidden_act"] = "gelu"
        tf_config[_ACTIVATION_FIELD] = config.hidden_act
        notes.append("google-research/bert computes gelu with tanh rather than erf; its outputs will differ slightly")
    else:
        tf_config["hidden_act"] = {own: name for name, own in _ACTIVATIONS.items()}[config.hidden_act]
    if config.layer_norm_eps != DEFAULT_EPSILON:
        tf_config[_EPSILON_FIELD] = config.layer_norm_eps
        notes.append(
            f"google-research/bert uses {DEFAULT_EPSILON:g} instead of layer_norm_eps={config.layer_norm_eps:g}"
        )
    if checkpoint.labels:
        tf_config[_LABELS_FIELD] = list(checkpoint.labels)
    if checkpoint.vocabulary is None:
        notes.append("the source has no vocabulary")
    else:
        tf_config[_LOWER_CASE_FIELD] = checkpoint.vocabulary.lower_case
        if (limit := checkpoint.vocabulary.max_word_chars) != MAX_WORD_CHARS:
            tf_config[_WORD_LIMIT_FIELD] = limit
            notes.append(f"google-research/bert splits words of up to {MAX_WORD_CHARS} characters instead of {limit}")
        (folder / VOCABULARY_FILES[checkpoint.vocabulary.kind]).write_bytes(checkpoint.vocabulary.content)
    arrays = names.export_params(checkpoint.parameters, config.num_hidden_layers, names.TENSORFLOW, checkpoint.params)
    _save(arrays, folder / _PREFIX)
    (folder / CONFIG).write_text(json.dumps(tf_config, indent=2) + "\n", encoding="utf-8")
    return notes


def _save(arrays: Iterator[tuple[str, np.ndarray]], prefix: Path) -> None:
    """Writes arrays in chunks to limit memory, and merges the chunks into one checkpoint."""
    import tensorflow as tf

    chunks: list[str] = []
    batch: list[tuple[str, np.ndarray]] = []

    def flush() -> None:
        if batch:
            chunks.append(f"{prefix}.chunk-{len(chunks)}")
            tensor_names, tensors = zip(*batch, strict=True)
            with tf.device("/CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=chunks[-1], tensor_names=tensor_names, shape_and_slices=[""] * len(batch), tensors=tensors
                )
            batch.clear()

    for name, array in arrays:
        batch.append((name, array))
        if sum(array.nbytes for _, array in batch) >= _CHUNK_BYTES:
            flush()
    flush()
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=chunks, destination_prefix=str(prefix), delete_old_dirs=False)
