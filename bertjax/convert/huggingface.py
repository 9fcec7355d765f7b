"""Folders as Hugging Face's `save_pretrained` writes them: config, safetensors, tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.convert import names
from bertjax.convert.foreign_config import check_vocabulary, foreign_fields, model_of, read_config
from bertjax.convert.foreign_tokenizer import FILES as TOKENIZER_FILES
from bertjax.convert.foreign_tokenizer import read_tokenizer, write_tokenizer
from bertjax.convert.foreign_weights import WEIGHTS, read_arrays
from bertjax.convert.portable import Portable
from bertjax.errors import UsageError, listed
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.utils.io import read_json

CONFIG = "config.json"
# All that `write` leaves in a folder.
FILES = (CONFIG, WEIGHTS, *TOKENIZER_FILES)
# Theirs to ours. Theirs `gelu` is the exact one, by erf; google-research/bert's is the tanh form.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# What Hugging Face takes where its config says nothing.
_DEFAULTS = {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
_EPSILON = 1e-12
_KINDS = {"hidden_act": str, "architectures": list, "num_labels": int, "id2label": dict}
_MULTI_LABEL = "multi_label_classification"
# Architecture to what its output layer tells, and the parts it has beside the encoder.
_PARTS = {
    "BertForPreTraining": ("", {names.POOLER, names.MASKED_LM, names.NEXT_SENTENCE}),
    "BertForMaskedLM": ("", {names.MASKED_LM}),
    "BertForNextSentencePrediction": ("", {names.POOLER, names.NEXT_SENTENCE}),
    "BertModel": ("", {names.POOLER}),
    "BertForSequenceClassification": (CLASSES, {names.POOLER, names.CLASSIFIER}),
    "BertForMultipleChoice": (CHOICES, {names.POOLER, names.CLASSIFIER}),
    "BertForTokenClassification": (TAGS, {names.CLASSIFIER}),
    "BertForQuestionAnswering": (SPANS, {names.CLASSIFIER}),
}
# Copies of what stands elsewhere, and a buffer of positions 0, 1, 2, ...
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


def is_folder(path: Path) -> bool:
    """Whether something is a folder with a config of this kind, or with one that cannot be read."""
    if not (path / CONFIG).is_file():
        return False
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or "model_type" in config or "architectures" in config


def read(folder: Path) -> Portable:
    """A folder's checkpoint.

    Raises:
      UsageError: it is no BERT, has settings that bertjax does not support, or not the arrays that its config tells.
      BertjaxError: a file cannot be read.
    """
    config = _config(folder)
    output = _output(config)
    labels = _labels(config) if output in (CLASSES, MULTILABEL, TAGS) else ()
    model = model_of(
        config,
        folder / CONFIG,
        _DEFAULTS,
        hidden_act=_ACTIVATIONS[config.get("hidden_act", "gelu")],
        layer_norm_eps=config.get("layer_norm_eps", _EPSILON),
    )
    vocabulary, notes = read_tokenizer(folder)
    check_vocabulary(vocabulary, model, folder)
    shapes, get = read_arrays(folder, _architecture_of(config))
    prefix = "" if any(name.startswith("bert.") for name in shapes) else "bert."
    given = {_our_spelling(name, prefix): name for name in shapes}
    if len(given) < len(shapes):
        twice = [name for name in shapes if name not in given.values()]
        raise UsageError(f"{folder} has {listed(twice)} twice, under an old and a new name")
    _check_tied(given, get, folder)
    own = {name: shapes[theirs] for name, theirs in given.items() if name not in (*_TIED, *_BUFFERS)}
    if vocabulary and config.get("pad_token_id", vocabulary.pad_id) != vocabulary.pad_id:
        notes.append(f"pad_token_id is {config['pad_token_id']}, [PAD] is piece {vocabulary.pad_id}; taken: the piece")
    dtypes: set[str] = set()

    def array(name: str) -> np.ndarray:
        found = get(given[name])
        dtypes.add(found.dtype.name)
        return found

    params = names.import_params(
        names.parameters(model, _classifier(output, labels)),
        model.num_hidden_layers,
        names.HUGGINGFACE,
        own,
        array,
        str(folder),
    )
    if dtypes - {"float32"}:
        notes.append(f"weights of {', '.join(sorted(dtypes))} are taken over as float32")
    if output == CLASSES and len(labels) == 1:
        # As Hugging Face does: one output is a number.
        labels = ()
    return Portable(model, params, vocabulary, output, labels, tuple(notes))


def write(portable: Portable, folder: Path) -> list[str]:
    """Writes a folder and returns what there is to say about it; takes the arrays out of `portable.params`."""
    from safetensors.numpy import save_file

    architecture = _architecture(portable)
    notes = _unused(architecture, portable.parts)
    table = names.parameters(portable.model, _classifier(portable.output, portable.labels, portable.outputs))
    config = _config_file(portable, architecture)
    tensors = dict(names.export_params(table, portable.model.num_hidden_layers, names.HUGGINGFACE, portable.params))
    if architecture == "BertModel":
        tensors = {name.removeprefix("bert."): array for name, array in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # The library lets its owner alone read it.
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*notes, *write_tokenizer(portable.vocabulary, portable.model, folder)]


def _config(folder: Path) -> dict[str, Any]:
    config = read_config(folder / CONFIG)
    kind = config.get("model_type", "bert")
    if kind != "bert":
        raise UsageError(f"{folder} is a model of type {kind!r}; bertjax takes BERT alone")
    for name, wanted in _KINDS.items():
        if not isinstance(config.get(name), wanted | None):
            raise UsageError(f"{folder / CONFIG}: {name} is {config[name]!r}")
    several = config.get("problem_type") == "regression" and len(_labels(config)) > 1
    refused = [
        *(["a regression of several numbers"] if several else []),
        *([f"position_embedding_type {config['position_embedding_type']!r}"] if _has_relative(config) else []),
        *(["is_decoder"] if config.get("is_decoder") else []),
        *(["add_cross_attention"] if config.get("add_cross_attention") else []),
        *(["a quantization_config"] if config.get("quantization_config") else []),
        *(["untied embeddings"] if not config.get("tie_word_embeddings", True) else []),
        *([f"hidden_act {config['hidden_act']!r}"] if config.get("hidden_act", "gelu") not in _ACTIVATIONS else []),
    ]
    if refused:
        raise UsageError(f"{folder} has {listed(refused)}, which bertjax does not support")
    return config


def _has_relative(config: dict[str, Any]) -> bool:
    return config.get("position_embedding_type", "absolute") != "absolute"


def _architecture_of(config: dict[str, Any]) -> str:
    return (config.get("architectures") or ["BertModel"])[0]


def _output(config: dict[str, Any]) -> str:
    given = _architecture_of(config)
    if not isinstance(given, str) or given not in _PARTS:
        raise UsageError(f"the architecture {given!r} is none of {', '.join(_PARTS)}")
    output = _PARTS[given][0]
    return MULTILABEL if output == CLASSES and config.get("problem_type") == _MULTI_LABEL else output


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    labels = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels") or 2)}
    names_ = [labels.get(str(index)) for index in range(len(labels))]
    if not all(isinstance(name, str) for name in names_) or len({*names_}) < len(names_):
        raise UsageError(f"id2label is {labels!r}; it must have a name of its own for each number from 0")
    return tuple(names_)


def _classifier(output: str, labels: tuple[str, ...], outputs: int = 0) -> tuple[int, dict[str, str]] | None:
    if not output:
        return None
    kernel = "qa_outputs.weight" if output == SPANS else "classifier.weight"
    count = outputs or {CHOICES: 1, SPANS: 2}.get(output, len(labels))
    return count, {names.HUGGINGFACE: kernel}


def _our_spelling(name: str, prefix: str) -> str:
    """Names as the classes with a head have them, in the spelling of today."""
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return f"{prefix}{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def _check_tied(given: dict[str, str], get: Callable[[str], np.ndarray], folder: Path) -> None:
    for copy, original in _TIED.items():
        if copy in given and original in given and not np.array_equal(get(given[copy]), get(given[original])):
            raise UsageError(f"{folder}: {copy} differs from {original}; bertjax has them tied, as the paper does")


def _architecture(portable: Portable) -> str:
    """The class with the same output layer whose heads are those there are; the pooler matters less."""
    there = portable.parts - {names.ENCODER}
    layer = CLASSES if portable.output == MULTILABEL else portable.output

    def distance(name: str) -> tuple[int, ...]:
        lacking, extra = _PARTS[name][1] - there, there - _PARTS[name][1]
        return len(lacking - {names.POOLER}), len(extra - {names.POOLER}), len(lacking), len(extra)

    return min((name for name, (output, _) in _PARTS.items() if output == layer), key=distance)


def _unused(architecture: str, there: set[str]) -> list[str]:
    """What differs between the parts there are and those that the class has."""
    wanted = _PARTS[architecture][1]
    extra, lacking = sorted(there - wanted - {names.ENCODER}), sorted(wanted - there)
    return [
        *([f"{architecture} does not use {', '.join(extra)}; written all the same"] if extra else []),
        *([f"{architecture} will make anew what the source lacks: {', '.join(lacking)}"] if lacking else []),
    ]


def _config_file(portable: Portable, architecture: str) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    config = {
        "architectures": [architecture],
        "model_type": "bert",
        **foreign_fields(portable.model, names.HUGGINGFACE),
        "layer_norm_eps": portable.model.layer_norm_eps,
        "hidden_act": activations[portable.model.hidden_act],
        "pad_token_id": portable.vocabulary.pad_id if portable.vocabulary else 0,
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    if portable.output in (CLASSES, MULTILABEL, TAGS):
        labels = portable.labels or ("LABEL_0",)
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
        if portable.output == CLASSES:
            config["problem_type"] = "single_label_classification" if portable.labels else "regression"
        if portable.output == MULTILABEL:
            config["problem_type"] = _MULTI_LABEL
    return config
