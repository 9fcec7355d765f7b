"""Conversion from and to folders in the format of Hugging Face's `save_pretrained`: config, safetensors, tokenizer."""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.convert import names, sentence_transformers
from bertjax.convert.huggingface_tokenizer import FILES as TOKENIZER_FILES
from bertjax.convert.huggingface_tokenizer import VOCABULARY, read_tokenizer, write_tokenizer
from bertjax.convert.portable import (
    DEFAULT_EPSILON,
    PortableCheckpoint,
    fit_vocabulary,
    parameter_table,
    parse_bert_config,
    read_config,
    shared_fields,
)
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL
from bertjax.utils.io import read_json

CONFIG = "config.json"
WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Files of an exported checkpoint. A folder that contains other files is never overwritten.
FILES = (CONFIG, WEIGHTS, *sentence_transformers.FILES, *TOKENIZER_FILES)
# Files to download for a model on the hub, besides those of sentence-transformers.
READ_FILES = (CONFIG, WEIGHTS, _INDEX, "model-*-of-*.safetensors", *TOKENIZER_FILES)
# Activations by their names in transformers, where `gelu` is the exact erf form, unlike in google-research/bert.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_FIELD_TYPES = {"hidden_act": str, "architectures": list, "num_labels": int, "id2label": dict}
_MULTILABEL_PROBLEM = "multi_label_classification"
# Output kind and modules (besides the encoder) of each model class in transformers.
_CLASSES: dict[str, tuple[str, set[str]]] = {
    "BertForPreTraining": ("", {names.POOLER, names.MASKED_LM, names.NEXT_SENTENCE}),
    "BertForMaskedLM": ("", {names.MASKED_LM}),
    "BertForNextSentencePrediction": ("", {names.POOLER, names.NEXT_SENTENCE}),
    "BertModel": ("", {names.POOLER}),
    # `CLASSES` and `MULTILABEL` have the same model class. Iterate in reverse, so that `CLASSES` overwrites
    # `MULTILABEL`. `_output_kind` returns `MULTILABEL` if the config's `problem_type` requires it.
    **{
        kind.huggingface_class: (name, {names.POOLER, names.CLASSIFIER} if kind.pools else {names.CLASSIFIER})
        for name, kind in reversed(OUTPUT_KINDS.items())
    },
}
# Maps copies of tied arrays to the original arrays. Only older checkpoints store the copies.
_TIED_ARRAYS = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


def is_checkpoint_folder(path: Path) -> bool:
    """Returns whether a folder has a Hugging Face config. A damaged `config.json` counts, because `read` reports it."""
    path = sentence_transformers.transformer_folder(path)
    if not (path / CONFIG).is_file():
        return False
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or "model_type" in config or "architectures" in config


def read(folder: Path, lower_case: bool | None = None) -> PortableCheckpoint:
    """Reads config, weights, vocabulary and modules of sentence-transformers from a folder in Hugging Face's format.

    `lower_case`, if not None, replaces `do_lower_case` of its tokenizer.
    """
    root, folder = folder, sentence_transformers.transformer_folder(folder)
    hf_config = _read_supported_config(folder)
    output_kind = _output_kind(hf_config, folder)
    kind = OUTPUT_KINDS.get(output_kind)
    labels = _labels(hf_config, folder) if kind and kind.has_labels else ()
    config = parse_bert_config(
        hf_config,
        folder / CONFIG,
        type_vocab_size=2,
        hidden_act=_ACTIVATIONS[hf_config.get("hidden_act", "gelu")],
        layer_norm_eps=hf_config.get("layer_norm_eps", DEFAULT_EPSILON),
    )
    vocabulary, notes = read_tokenizer(folder, lower_case)
    embedder = sentence_transformers.read(root, config.hidden_size, config.max_position_embeddings)
    if embedder and embedder.refusal:
        notes.append(f"no default pooling: {embedder.refusal}")
    num_rows = config.vocab_size
    vocabulary, config, padding_notes = fit_vocabulary(vocabulary, config, folder)
    notes += padding_notes
    shapes, read_array = open_weights(folder, _class_of(hf_config))
    prefix = "" if any(name.startswith("bert.") for name in shapes) else "bert."
    stored_names = {_canonical_name(name, prefix): name for name in shapes}
    if len(stored_names) < len(shapes):
        duplicates = [name for name in shapes if name not in stored_names.values()]
        raise UsageError(
            f"{folder} contains arrays twice, under an old and a new name: {listed(duplicates)}; remove the old arrays"
        )
    _check_tied_arrays(stored_names, read_array, folder, hf_config.get("tie_word_embeddings", True))
    if vocabulary and hf_config.get("pad_token_id", vocabulary.pad_id) != vocabulary.pad_id:
        notes.append(f"ignored pad_token_id={hf_config['pad_token_id']}: [PAD] is token {vocabulary.pad_id}")
    dtypes: set[str] = set()

    def read_by_canonical_name(name: str) -> np.ndarray:
        array = read_array(stored_names[name])
        dtypes.add(array.dtype.name)
        return array

    num_outputs = (kind.num_outputs or len(labels)) if kind else 0
    params = names.import_params(
        parameter_table(config, output_kind, num_outputs, num_rows),
        config.num_hidden_layers,
        names.HUGGINGFACE,
        {name: shapes[stored] for name, stored in stored_names.items() if name not in (*_TIED_ARRAYS, *_BUFFERS)},
        read_by_canonical_name,
        str(folder),
    )
    if dtypes - {"float32"}:
        notes.append(f"converted weights from {', '.join(sorted(dtypes))} to float32")
    if output_kind == CLASSES and (
        activation := sentence_transformers.cross_encoder_activation(root, hf_config, len(labels))
    ):
        notes.append(f"predict does not apply {activation} to logits, as CrossEncoder of sentence-transformers does")
    if output_kind == CLASSES and len(labels) == 1:
        # As in transformers, a single output means regression.
        labels = ()
    return PortableCheckpoint(config, params, vocabulary, output_kind, labels, tuple(notes), embedder)


def write(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a Hugging Face folder and returns notes for the user.

    Removes the arrays from `checkpoint.params` to save memory.
    """
    from safetensors.numpy import save_file

    class_name = _closest_class(checkpoint)
    hf_config = _make_config(checkpoint, class_name)
    notes = _module_notes(class_name, checkpoint.modules)
    num_layers = checkpoint.config.num_hidden_layers
    arrays = dict(names.export_params(checkpoint.parameters, num_layers, names.HUGGINGFACE, checkpoint.params))
    if class_name == "BertModel":
        arrays = {name.removeprefix("bert."): array for name, array in arrays.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    # Let other users read the file; safetensors makes it readable only for its owner.
    (folder / WEIGHTS).chmod(0o644)
    (folder / CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    if checkpoint.embedder and not checkpoint.embedder.refusal:
        sentence_transformers.write(checkpoint.embedder, folder, checkpoint.config.hidden_size)
    return [*notes, *write_tokenizer(checkpoint.vocabulary, checkpoint.config, folder)]


def _read_supported_config(folder: Path) -> dict[str, Any]:
    config = read_config(folder / CONFIG)
    model_type = config.get("model_type", "bert")
    if model_type != "bert":
        raise UsageError(f"{folder} is a model of type {model_type!r}; bertjax supports only BERT")
    for name, field_type in _FIELD_TYPES.items():
        if not isinstance(config.get(name), field_type | None):
            raise UsageError(f"{folder / CONFIG}: {name} is {config[name]!r}; it must be of type {field_type.__name__}")
    position_embedding_type = config.get("position_embedding_type", "absolute")
    activation = config.get("hidden_act", "gelu")
    unsupported = {
        "a regression with several outputs": config.get("problem_type") == "regression"
        and len(_labels(config, folder)) > 1,
        f"position_embedding_type {position_embedding_type!r}": position_embedding_type != "absolute",
        "is_decoder": config.get("is_decoder"),
        "add_cross_attention": config.get("add_cross_attention"),
        "quantization_config": config.get("quantization_config"),
        f"hidden_act {activation!r}": activation not in _ACTIVATIONS,
    }
    if any(unsupported.values()):
        options = listed(name for name, is_set in unsupported.items() if is_set)
        raise UsageError(f"{folder} has options that bertjax does not support: {options}; use a standard BERT model")
    return config


def known_class(folder: Path) -> str:
    """Returns the transformers class in a folder's config, or `BertForPreTraining` if bertjax does not know the class.

    The result is safe to show in a command, whatever the config contains.
    """
    try:
        class_name = read_json(folder / CONFIG)["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        class_name = ""
    return next((name for name in _CLASSES if name == class_name), "BertForPreTraining")


def _class_of(config: dict[str, Any]) -> str:
    return (config.get("architectures") or ["BertModel"])[0]


def _output_kind(config: dict[str, Any], folder: Path) -> str:
    class_name = _class_of(config)
    if not isinstance(class_name, str) or class_name not in _CLASSES:
        raise UsageError(
            f"{folder / CONFIG} has the unsupported architecture {class_name!r}; use one of {', '.join(_CLASSES)}"
        )
    output_kind = _CLASSES[class_name][0]
    is_multilabel = output_kind == CLASSES and config.get("problem_type") == _MULTILABEL_PROBLEM
    return MULTILABEL if is_multilabel else output_kind


def _labels(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    id2label = config.get("id2label")
    if not id2label:
        id2label = {str(index): f"LABEL_{index}" for index in range(config.get("num_labels") or 2)}
    labels: list[Any] = [id2label.get(str(index)) for index in range(len(id2label))]
    if not all(isinstance(label, str) for label in labels) or len({*labels}) < len(labels):
        raise UsageError(f"{folder / CONFIG}: id2label is {id2label!r}; it must have a unique name for each id from 0")
    return tuple(labels)


def _canonical_name(name: str, prefix: str) -> str:
    """Converts an old array name, or a name without the prefix `bert.`, to the current name."""
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return f"{prefix}{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def _check_tied_arrays(
    stored_names: dict[str, str], read_array: Callable[[str], np.ndarray], folder: Path, is_tied: bool
) -> None:
    # Without tied embeddings, a masked-LM head needs a decoder of its own. An encoder alone has no decoder to tie.
    decoder, bias = _TIED_ARRAYS
    if not is_tied and decoder not in stored_names and {bias, _TIED_ARRAYS[bias]} & stored_names.keys():
        raise UsageError(
            f"{folder} has untied embeddings (tie_word_embeddings=false) but lacks {decoder}; copy it again"
        )
    for copy, original in _TIED_ARRAYS.items():
        if {copy, original} <= stored_names.keys() and not np.array_equal(
            read_array(stored_names[copy]), read_array(stored_names[original])
        ):
            raise UsageError(
                f"{folder}: {copy} differs from {original}; bertjax supports only tied embeddings, so remove the "
                "arrays cls.* to use the model without its heads for pre-training"
            )


def _closest_class(checkpoint: PortableCheckpoint) -> str:
    """Returns the name of the transformers class that has the same output layer as the checkpoint.

    For a checkpoint without an output layer, returns the class with the most similar heads.
    """
    if kind := OUTPUT_KINDS.get(checkpoint.output_kind):
        return kind.huggingface_class
    modules = checkpoint.modules - {names.ENCODER}

    def distance(class_name: str) -> tuple[int, ...]:
        class_modules = _CLASSES[class_name][1]
        missing, unused = class_modules - modules, modules - class_modules
        # The pooler only breaks ties, because it is the least important module.
        return len(missing - {names.POOLER}), len(unused - {names.POOLER}), len(missing), len(unused)

    return min((name for name, (output_kind, _) in _CLASSES.items() if not output_kind), key=distance)


def _module_notes(class_name: str, modules: set[str]) -> list[str]:
    class_modules = _CLASSES[class_name][1]
    unused, missing = sorted(modules - class_modules - {names.ENCODER}), sorted(class_modules - modules)
    return [
        *([f"{class_name} ignores {', '.join(unused)}, which the folder contains"] if unused else []),
        *([f"{class_name} will initialize {', '.join(missing)} randomly"] if missing else []),
    ]


def _make_config(checkpoint: PortableCheckpoint, class_name: str) -> dict[str, Any]:
    activations = {own: name for name, own in reversed(_ACTIVATIONS.items())}
    config = {
        "architectures": [class_name],
        "model_type": "bert",
        **shared_fields(checkpoint, names.HUGGINGFACE),
        "layer_norm_eps": checkpoint.config.layer_norm_eps,
        "hidden_act": activations[checkpoint.config.hidden_act],
        "pad_token_id": checkpoint.vocabulary.pad_id if checkpoint.vocabulary else 0,
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    kind = OUTPUT_KINDS.get(checkpoint.output_kind)
    if kind and kind.has_labels:
        labels = checkpoint.labels or ("LABEL_0",)
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    if checkpoint.output_kind == CLASSES:
        config["problem_type"] = "single_label_classification" if checkpoint.labels else "regression"
    if checkpoint.output_kind == MULTILABEL:
        config["problem_type"] = _MULTILABEL_PROBLEM
    return config


def has_weights(path: Path) -> bool:
    """Returns whether a folder, or its folder of the module `Transformer`, contains safetensors weights."""
    path = sentence_transformers.transformer_folder(path)
    return (path / WEIGHTS).is_file() or (path / _INDEX).is_file()


def open_weights(folder: Path, architecture: str) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Opens the safetensors weights of a folder. `architecture` is the transformers class, for error messages.

    Returns:
      The shape of each array, and a function that reads one array by name.
    """
    from safetensors import safe_open

    shapes, files = {}, {}
    for path in _weight_files(folder, architecture):
        with _naming_file(path):
            # Read without mmap, because mapped pages would count as used memory until the file is closed.
            file = safe_open(path, framework="numpy", backend="pread")
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), (path, file)

    def read_array(name: str) -> np.ndarray:
        path, file = files[name]
        with _naming_file(path):
            return file.get_tensor(name)

    return shapes, read_array


def pickle_error(model: str, pickle: str, architecture: str, destination: str) -> UsageError:
    """Returns the error for a model whose weights are a pickle, with a command that converts it to safetensors.

    `model` is a folder or a name on the hub. `architecture` is the model's class in transformers.
    """
    return UsageError(
        f"{model} contains {pickle} but no {WEIGHTS}; bertjax does not open pickles, which can run code. If you trust "
        f'the file, run: python -c "import sys; from transformers import {architecture} as M; '
        f'M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {shlex.quote(model)} '
        f"{shlex.quote(destination)}, and copy {VOCABULARY} there"
    )


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BertjaxError(f"cannot read {path}: {error}; copy it again") from error
    except AttributeError as error:  # NumPy lacks the dtype of an array, such as float8.
        raise UsageError(f"cannot read {path}: {error}; weights must be {', '.join(names.FLOAT_DTYPES)}") from error


def _weight_files(folder: Path, architecture: str) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / _INDEX
    if index.is_file():
        try:
            files = sorted({*read_json(index)["weight_map"].values()})
            outside = [name for name in files if Path(name).name != name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"cannot read {index}: {error}; copy it again") from error
        if outside:
            raise UsageError(f"{index} lists files outside its folder: {listed(outside)}; copy the original index")
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise UsageError(f"{folder} lacks files that {_INDEX} lists: {listed(missing)}; copy all shards")
        return [folder / name for name in files]
    if pickles := [name for name in PICKLES if (folder / name).is_file()]:
        raise pickle_error(str(folder), pickles[0], architecture, f"{folder}-safetensors")
    raise UsageError(f"{folder} contains neither {WEIGHTS} nor {_INDEX}; copy the weights to this folder")
