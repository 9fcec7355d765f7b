"""Conversion from and to folders in the format of Hugging Face's `save_pretrained`: config, safetensors, tokenizer."""

import contextlib
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.convert import names, sentence_transformers
from bertjax.convert.files import naming, read_object, write_json
from bertjax.convert.huggingface_tokenizer import FILES as TOKENIZER_FILES
from bertjax.convert.huggingface_tokenizer import VOCABULARY, read_tokenizer, write_tokenizer
from bertjax.convert.output_kinds import OUTPUT_KINDS
from bertjax.convert.portable import SHARED_FIELDS, PortableCheckpoint, fit_vocabulary, parse_bert_config
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.model.config import ARCHITECTURE_FIELDS, Architecture
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL
from bertjax.utils.io import read_json

CONFIG = "config.json"
WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Files of an exported checkpoint. A folder that contains other files is never overwritten.
FILES = (CONFIG, WEIGHTS, *sentence_transformers.FILES, *TOKENIZER_FILES)
# Files to download for a model on the hub, besides those of sentence-transformers.
READ_FILES = (CONFIG, WEIGHTS, _INDEX, "model-*-of-*.safetensors", *TOKENIZER_FILES)
# Activations by their names in transformers, where `gelu` is the exact erf form, unlike in google-research/bert.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_EXPORTED_ACTIVATIONS = {own: name for name, own in reversed(_ACTIVATIONS.items())}
# Only values of these config fields that bertjax supports, besides an unset field.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bert",),
    "position_embedding_type": ("absolute",),
    "hidden_act": tuple(_ACTIVATIONS),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
}
_MULTILABEL_PROBLEM = "multi_label_classification"
# Output kind and modules (besides the encoder) of each model class in transformers.
_CLASSES: dict[str, tuple[str, set[str]]] = {
    "BertForPreTraining": ("", {names.POOLER, names.MASKED_LM, names.NEXT_SENTENCE}),
    "BertForMaskedLM": ("", {names.MASKED_LM}),
    "BertForNextSentencePrediction": ("", {names.POOLER, names.NEXT_SENTENCE}),
    "BertModel": ("", {names.POOLER}),
    # `CLASSES` and `MULTILABEL` have the same model class. In reverse, `CLASSES` overwrites `MULTILABEL`, which `read`
    # selects by the config's `problem_type`.
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
_IGNORED_ARRAYS = (*_TIED_ARRAYS, "bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
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
    file = folder / CONFIG
    hf_config = read_object(file)
    with naming(file):
        for name, values in _SUPPORTED.items():
            if hf_config.get(name) and hf_config[name] not in values:
                raise UsageError(f"{file} has {name}={hf_config[name]!r}, which bertjax does not support")
        architecture = (hf_config.get("architectures") or ["BertModel"])[0]
        if architecture not in _CLASSES:
            raise UsageError(f"{file} has the architecture {architecture!r}; use one of {', '.join(_CLASSES)}")
        output_kind = _CLASSES[architecture][0]
        if output_kind == CLASSES and hf_config.get("problem_type") == _MULTILABEL_PROBLEM:
            output_kind = MULTILABEL
        kind = OUTPUT_KINDS.get(output_kind)
        labels = _labels(hf_config, file) if kind and kind.has_labels else ()
        if hf_config.get("problem_type") == "regression" and len(labels) > 1:
            raise UsageError(f"{file} defines a regression with several outputs, which bertjax does not support")
        activation = _ACTIVATIONS[hf_config.get("hidden_act") or "gelu"]
        config = parse_bert_config({**hf_config, "hidden_act": activation}, file)
    vocabulary, notes = read_tokenizer(folder, lower_case)
    embedder = sentence_transformers.read(root, config)
    if embedder and embedder.refusal:
        notes.append(f"no default pooling: {embedder.refusal}")
    vocabulary, config, num_rows, padding_notes = fit_vocabulary(vocabulary, config, folder)
    notes += padding_notes
    shapes, read_array = open_weights(folder)
    prefix = "" if any(name.startswith("bert.") for name in shapes) else "bert."
    stored_names = {_canonical_name(name, prefix): name for name in shapes}
    if duplicates := [name for name in shapes if name not in stored_names.values()]:
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
        names.parameter_table(config, output_kind, num_outputs, num_rows),
        {name: shapes[stored] for name, stored in stored_names.items() if name not in _IGNORED_ARRAYS},
        read_by_canonical_name,
        str(folder),
    )
    if dtypes - {"float32"}:
        notes.append(f"converted weights from {', '.join(sorted(dtypes))} to float32")
    if output_kind == CLASSES:
        if activation := sentence_transformers.cross_encoder_activation(root, hf_config, len(labels)):
            notes.append(f"predict does not apply {activation} to logits, unlike CrossEncoder")
        if len(labels) == 1:
            # As in transformers, a single output means regression.
            labels = ()
    return PortableCheckpoint(config, params, vocabulary, output_kind, labels, tuple(notes), embedder)


def write(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a Hugging Face folder and returns notes for the user.

    Removes the arrays from `checkpoint.params` to save memory.
    """
    from safetensors.numpy import save_file

    class_name = _class_name(checkpoint)
    hf_config = _make_config(checkpoint, class_name)
    modules = checkpoint.modules - {names.ENCODER}
    unused, missing = (sorted(part) for part in (modules - _CLASSES[class_name][1], _CLASSES[class_name][1] - modules))
    notes = [f"{class_name} ignores {', '.join(unused)}, which the folder contains"] if unused else []
    notes += [f"{class_name} will initialize {', '.join(missing)} randomly"] if missing else []
    arrays = dict(names.export_params(checkpoint.parameters, checkpoint.params))
    if class_name == "BertModel":
        arrays = {name.removeprefix("bert."): array for name, array in arrays.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    # Let other users read the file; safetensors makes it readable only for its owner.
    (folder / WEIGHTS).chmod(0o644)
    write_json(folder / CONFIG, hf_config)
    if checkpoint.embedder and not checkpoint.embedder.refusal:
        sentence_transformers.write(checkpoint.embedder, folder)
    return [*notes, *write_tokenizer(checkpoint.vocabulary, checkpoint.config, folder)]


def _labels(config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    id2label = config.get("id2label") or {
        str(index): f"LABEL_{index}" for index in range(config.get("num_labels") or 2)
    }
    labels: list[Any] = [id2label.get(str(index)) for index in range(len(id2label))]
    if not all(isinstance(label, str) for label in labels) or len({*labels}) < len(labels):
        raise UsageError(f"{file}: id2label is {id2label!r}; it must have a unique name for each id from 0")
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
        raise UsageError(f"{folder} has untied embeddings (tie_word_embeddings=false) but lacks {decoder}")
    for copy, original in _TIED_ARRAYS.items():
        if {copy, original} <= stored_names.keys() and not np.array_equal(
            read_array(stored_names[copy]), read_array(stored_names[original])
        ):
            raise UsageError(
                f"{folder}: {copy} differs from {original}; bertjax supports only tied embeddings, so remove the "
                "arrays cls.* to use the model without its heads for pre-training"
            )


def _class_name(checkpoint: PortableCheckpoint) -> str:
    """Returns the transformers class with the output layer or the pre-training heads of the checkpoint."""
    if kind := OUTPUT_KINDS.get(checkpoint.output_kind):
        return kind.huggingface_class
    heads = checkpoint.modules & {names.MASKED_LM, names.NEXT_SENTENCE}
    return next(name for name, (kind, modules) in _CLASSES.items() if not kind and modules - {names.POOLER} == heads)


def _make_config(checkpoint: PortableCheckpoint, class_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`. Raises a UsageError for an architecture that it cannot express."""
    for name in {*ARCHITECTURE_FIELDS} - {*SHARED_FIELDS, "hidden_act", "pad_vocab_to_multiple_of"}:
        if (value := getattr(checkpoint.config, name)) != getattr(Architecture(), name):
            raise UsageError(
                f"Hugging Face's format cannot express model.{name}={value}; use the bertjax checkpoint itself"
            )
    config = {
        "architectures": [class_name],
        "model_type": "bert",
        **{name: getattr(checkpoint.config, name) for name in SHARED_FIELDS},
        "vocab_size": checkpoint.num_rows,
        "hidden_act": _EXPORTED_ACTIVATIONS[checkpoint.config.hidden_act],
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


def open_weights(folder: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Opens the safetensors weights of a folder.

    Returns:
      The shape of each array, and a function that reads one array by name.
    """
    from safetensors import safe_open

    shapes, files = {}, {}
    for path in _weight_files(folder):
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


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BertjaxError(f"cannot read {path}: {error}; copy it again") from error
    except AttributeError as error:  # NumPy lacks the dtype of an array, such as float8.
        raise UsageError(f"cannot read {path}: {error}; weights must be {', '.join(names.FLOAT_DTYPES)}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        raise missing_weights(str(folder), [file.name for file in folder.iterdir()], folder, f"{folder}-safetensors")
    with naming(index):
        files = sorted({*read_object(index)["weight_map"].values()})
        if outside := [name for name in files if Path(name).name != name]:
            raise UsageError(f"{index} lists files outside its folder: {listed(outside)}; copy the original index")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise UsageError(f"{folder} lacks files that {_INDEX} lists: {listed(missing)}; copy all shards")
    return [folder / name for name in files]


def missing_weights(model: str, files: Collection[str], folder: Path, destination: str) -> UsageError:
    """Returns the error for a model without safetensors; for a pickle, with a command that converts it.

    `model` is a folder or a name on the hub, `files` are its files, `folder` contains its config, and `destination` is
    the folder of the command's result.
    """
    pickles = [name for name in files if Path(name).name in _PICKLES]
    if not pickles:
        return UsageError(f"{model} contains no {WEIGHTS}; use a BERT model with safetensors weights")
    architectures = read_object(folder / CONFIG, optional=True).get("architectures") or ()
    # Use only known names of classes in the command, whatever the config contains.
    class_name = next((name for name in _CLASSES if name in architectures), "BertForPreTraining")
    return UsageError(
        f"{model} contains {pickles[0]} but no {WEIGHTS}; bertjax does not open pickles, which can run code. If you "
        f'trust the file, run: python -c "import sys; from transformers import {class_name} as M; '
        f'M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {shlex.quote(model)} '
        f"{shlex.quote(destination)}, and copy {VOCABULARY} there"
    )
