"""Folders as Hugging Face's `save_pretrained` writes them: config, safetensors, tokenizer."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.corpus.tokenizer import SPECIAL_PIECES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.errors import BertjaxError, UsageError
from bertjax.interop import names
from bertjax.interop.portable import CHOICES, CLASSES, SPANS, TAGS, Portable
from bertjax.interop.their_config import check_vocabulary, model_of, read_config, their_fields
from bertjax.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
CONFIG = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_VOCABULARY, _TOKENIZER = "vocab.txt", "tokenizer_config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
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
    """Whether something is a folder of this kind, whatever its weights are."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def read(folder: Path) -> Portable:
    """A folder's checkpoint.

    Raises:
      UsageError: it is no BERT, has settings that bertjax has not, or not the arrays that its config tells.
      BertjaxError: a file cannot be read.
    """
    config = _config(folder)
    output = _output(config)
    labels = _labels(config) if output in (CLASSES, TAGS) else ()
    model = model_of(
        config,
        folder / CONFIG,
        _DEFAULTS,
        activation=_ACTIVATIONS[config.get("hidden_act", "gelu")],
        layer_norm_eps=config.get("layer_norm_eps", _EPSILON),
    )
    vocabulary = _vocabulary(folder)
    check_vocabulary(vocabulary, model, folder)
    shapes, get = _arrays(folder, _architecture_of(config))
    prefix = "" if any(name.startswith("bert.") for name in shapes) else "bert."
    given = {_our_spelling(name, prefix): name for name in shapes}
    _check_tied(given, get, folder)
    own = {name: shapes[theirs] for name, theirs in given.items() if name not in (*_TIED, *_BUFFERS)}
    notes = []
    if vocabulary and config.get("pad_token_id", vocabulary.pad_id) != vocabulary.pad_id:
        notes.append(f"pad_token_id is {config['pad_token_id']}, [PAD] is piece {vocabulary.pad_id}; taken: the piece")
    dtypes = {str(get(name).dtype) for name in list(given.values())[:1]}
    if dtypes - {"float32"}:
        notes.append(f"weights of {', '.join(sorted(dtypes))} are taken over as float32")
    params = names.import_params(
        names.parameters(model, _classifier(output, labels)),
        model.num_layers,
        names.HUGGINGFACE,
        own,
        lambda name: get(given[name]),
        str(folder),
    )
    if output == CLASSES and len(labels) == 1:
        # As Hugging Face does: one output is a number.
        labels = ()
    return Portable(model, params, vocabulary, output, labels, tuple(notes))


def write(portable: Portable, folder: Path) -> list[str]:
    """Writes a folder and returns what there is to say about it; takes the arrays out of `portable.params`.

    Raises:
      UsageError: the checkpoint has parts that no class of Hugging Face has together.
    """
    from safetensors.numpy import save_file

    architecture = _architecture(portable)
    table = names.parameters(portable.model, _classifier(portable.output, portable.labels, portable.outputs))
    tensors = dict(names.export_params(table, portable.model.num_layers, names.HUGGINGFACE, portable.params))
    if architecture == "BertModel":
        tensors = {name.removeprefix("bert."): array for name, array in tensors.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = _their_config(portable, architecture)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return _write_tokenizer(portable.vocabulary, portable.model, folder)


def _config(folder: Path) -> dict[str, Any]:
    config = read_config(folder / CONFIG)
    kind = config.get("model_type", "bert")
    if kind != "bert":
        raise UsageError(f"{folder} is a model of type {kind!r}; bertjax takes BERT alone")
    several = config.get("problem_type") == "regression" and len(_labels(config)) > 1
    refused = [
        *(["problem_type 'multi_label_classification'"] if config.get("problem_type") == _MULTI_LABEL else []),
        *(["a regression of several numbers"] if several else []),
        *([f"position_embedding_type {config['position_embedding_type']!r}"] if _has_relative(config) else []),
        *(["is_decoder"] if config.get("is_decoder") else []),
        *(["add_cross_attention"] if config.get("add_cross_attention") else []),
        *(["untied embeddings"] if config.get("tie_word_embeddings") is False else []),
        *([f"hidden_act {config['hidden_act']!r}"] if config.get("hidden_act", "gelu") not in _ACTIVATIONS else []),
    ]
    if refused:
        raise UsageError(f"{folder} has {', '.join(refused)}, which bertjax has not")
    return config


def _has_relative(config: dict[str, Any]) -> bool:
    return config.get("position_embedding_type", "absolute") != "absolute"


def _architecture_of(config: dict[str, Any]) -> str:
    return (config.get("architectures") or ["BertModel"])[0]


def _output(config: dict[str, Any]) -> str:
    given = _architecture_of(config)
    if given not in _PARTS:
        raise UsageError(f"the architecture {given!r} is none of {', '.join(_PARTS)}")
    return _PARTS[given][0]


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    labels = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    try:
        return tuple(str(labels[key]) for key in sorted(labels, key=int))
    except (TypeError, ValueError) as error:
        raise UsageError(f"id2label is {labels!r}; it must have a name for each number") from error


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


def _arrays(folder: Path, architecture: str) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Shapes of all arrays of a folder, and how to get one; nothing but what is asked for is read."""
    from safetensors import safe_open

    shapes, files = {}, {}
    for path in _weight_files(folder, architecture):
        with _reading(path):
            # What is given out of a mapped file would count as held until it is closed.
            file = safe_open(path, framework="numpy", backend="pread")
            for name in file.keys():  # noqa: SIM118 - no dictionary
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), (path, file)

    def get(name: str) -> np.ndarray:
        path, file = files[name]
        with _reading(path):
            return file.get_tensor(name)

    return shapes, get


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BertjaxError(f"cannot read {path}: {error}; copy it anew") from error


def _weight_files(folder: Path, architecture: str) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        try:
            wanted = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"cannot read {folder / _INDEX}: {error}") from error
        lacking = [name for name in wanted if not (folder / name).is_file()]
        if lacking:
            raise UsageError(f"{folder / _INDEX} names {', '.join(lacking)}, which {folder} lacks")
        return [folder / name for name in wanted]
    pickled = [name for name in _PICKLED if (folder / name).is_file()]
    if pickled:
        raise UsageError(
            f"{folder} has {pickled[0]} and no {_WEIGHTS}; a pickle may run any code, so bertjax opens none. Where you "
            f'trust it: python -c "from transformers import {architecture} as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\", and copy {_VOCABULARY} there"
        )
    raise UsageError(f"{folder} has no {_WEIGHTS} and no {_INDEX}")


def _vocabulary(folder: Path) -> Vocabulary | None:
    if not (folder / _VOCABULARY).is_file():
        return None
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        settings = json.loads((folder / _TOKENIZER).read_text(encoding="utf-8"))
    return load_vocabulary(folder / _VOCABULARY, settings.get("do_lower_case"))


def _architecture(portable: Portable) -> str:
    parts = portable.parts - {names.ENCODER}
    found = [name for name, (output, wanted) in _PARTS.items() if output == portable.output and wanted == parts]
    if not found:
        raise UsageError(f"no class of Hugging Face has an encoder with {', '.join(sorted(parts)) or 'nothing more'}")
    return found[0]


def _their_config(portable: Portable, architecture: str) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    config = {
        "architectures": [architecture],
        "model_type": "bert",
        **their_fields(portable.model),
        "layer_norm_eps": portable.model.layer_norm_eps,
        "hidden_act": activations[portable.model.activation],
        "pad_token_id": portable.vocabulary.pad_id if portable.vocabulary else 0,
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    if portable.output in (CLASSES, TAGS):
        labels = portable.labels or ("LABEL_0",)
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
        if portable.output == CLASSES:
            config["problem_type"] = "single_label_classification" if portable.labels else "regression"
    return config


def _write_tokenizer(vocabulary: Vocabulary | None, model: ModelConfig, folder: Path) -> list[str]:
    if vocabulary is None:
        return ["no vocabulary: the source has none"]
    if vocabulary.kind != WORDPIECE:
        (folder / vocabulary.path.name).write_bytes(vocabulary.path.read_bytes())
        return [f"{vocabulary.path.name} is a SentencePiece model, which no BERT tokenizer of Hugging Face reads"]
    from tokenizers import BertWordPieceTokenizer

    (folder / _VOCABULARY).write_bytes(vocabulary.path.read_bytes())
    tokenizer = BertWordPieceTokenizer(str(folder / _VOCABULARY), lowercase=vocabulary.lower_case)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": model.max_positions,
        **special,
    }
    (folder / _TOKENIZER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
    return []
