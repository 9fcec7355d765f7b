"""Conversion from and to folders in the format of Hugging Face's `save_pretrained`: config, safetensors, tokenizer."""

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from safetensors.numpy import save_file

from bertjax.convert.arrays import export_params, import_params
from bertjax.convert.families import FAMILIES
from bertjax.convert.family import ACTIVATIONS, ENCODER, MASKED_LM, OUTPUT_KINDS, POOLER, Family
from bertjax.convert.huggingface_tokenizer import TOKENIZER_FILES, read_tokenizer, write_tokenizer
from bertjax.convert.huggingface_weights import CONFIG, INDEX, WEIGHTS, open_weights
from bertjax.convert.portable import PortableCheckpoint, check_portable, fit_vocabulary
from bertjax.data.corpus.vocabulary import named_special_ids
from bertjax.errors import UsageError, listed
from bertjax.model.config import ARCHITECTURE_FIELDS, ModelConfig
from bertjax.model.models import model_description
from bertjax.tasks.embedding import sentence_transformers
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL
from bertjax.utils.io import read_json_object
from bertjax.utils.json_files import naming, read_object, write_json

_ADAPTER, _SETFIT_HEAD = "adapter_config.json", "model_head.pkl"
# Files of an exported checkpoint. A folder that contains other files is never overwritten.
FILES = (CONFIG, WEIGHTS, *sentence_transformers.FILES, *TOKENIZER_FILES)
# Files to download for a model on the Hub, besides those of sentence-transformers.
READ_FILES = (CONFIG, WEIGHTS, INDEX, _ADAPTER, "model-*-of-*.safetensors", *TOKENIZER_FILES)
# Arrays of an encoder that are not parameters.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids", "embeddings.task_type_ids")
_CLASS_START = re.compile("^.*?(?=For|Model$)")  # prefix of a family's class names, such as XLMRoberta
# Values of `problem_type`.
_MULTILABEL, _CLASSES, _REGRESSION = "multi_label_classification", "single_label_classification", "regression"


def is_checkpoint_folder(path: Path) -> bool:
    """Returns whether a folder has the config of a Hugging Face model, of an adapter or of sentence-transformers.

    Returns True for a damaged `config.json`, so that `read` can report it.
    """
    file = sentence_transformers.transformer_folder(path) / CONFIG
    if not file.is_file():
        return any((path / name).is_file() for name in (sentence_transformers.MODULES, _ADAPTER))
    try:
        return not {"model_type", "architectures"}.isdisjoint(read_json_object(file))
    except (OSError, ValueError):
        return True


def read(folder: Path, lower_case: bool | None = None) -> PortableCheckpoint:
    """Reads config, weights, vocabulary and sentence-transformers modules from a folder in Hugging Face's format."""
    root, folder = folder, sentence_transformers.transformer_folder(folder)
    if (folder / _ADAPTER).is_file():
        raise UsageError(
            f"{folder} has an adapter ({_ADAPTER}), which bertjax does not apply; merge it into the model, with peft: "
            "AutoPeftModel.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)"
        )
    file = folder / CONFIG
    if sentence_transformers.module_paths(root) and not file.is_file():
        raise UsageError(
            f"{root / sentence_transformers.MODULES} lists no Transformer with a {CONFIG}; bertjax reads only models "
            "whose first module is a Transformer"
        )
    hf_config = read_object(file)
    with naming(file, "correct its values, or copy it again"):
        family, config, output_kind, labels = _read_config(hf_config, file)
    vocabulary, pair_segments, notes = read_tokenizer(folder, lower_case)
    config = dataclasses.replace(config, pair_segments=pair_segments)
    embedder = sentence_transformers.read(root, config)
    if embedder and embedder.refusal and not output_kind:
        notes.append(f"no default pooling: {embedder.refusal}")
    if (root / _SETFIT_HEAD).exists():
        notes.append(f"ignored SetFit's classifier {_SETFIT_HEAD}, which is a pickle: only its embedder is read")
    if embedder and embedder.similarity not in ("", "cosine"):
        notes.append(f"ignored similarity_fn_name={embedder.similarity}: evaluate and mine compare vectors by cosine")
    if "model_type" not in hf_config:
        notes.append(f"{file} has no model_type; assuming {family.model_type}")
    if "auto_map" in hf_config and not family.has_own_code:
        notes.append(f"ignored auto_map of {file}, because custom code is never run")
    dropout = config.hidden_dropout_prob
    notes += [
        f"ignored {name}={rate}: training uses the dropout rate {dropout} instead"
        for name, rate in hf_config.items()
        if name.endswith("_dropout") and name not in family.fields.values() and rate not in (None, dropout)
    ]
    vocabulary, config, padding_notes = fit_vocabulary(vocabulary, config, folder)
    notes += padding_notes
    shapes, read_array = open_weights(folder)
    stored_names = _stored_names(shapes, family)
    if duplicates := [name for name in shapes if name not in stored_names.values()]:
        raise UsageError(
            f"{folder} contains arrays twice, under an old and a new name: {listed(duplicates)}; remove the old arrays"
        )
    for copy, original in [pair for pair in family.tied.items() if pair[0] in stored_names]:
        # If both biases are stored, use the decoder's, as transformers does. A decoder that differs from the token
        # embeddings is untied. safetensors' `save_model` stores tied arrays only once, under either name.
        first, second = stored_names[copy], stored_names.get(original)
        if copy.endswith(".bias") or (config.tie_word_embeddings and not second):
            stored_names[original] = stored_names.pop(copy)
        elif second and not np.array_equal(read_array(first), read_array(second)):
            config = dataclasses.replace(config, tie_word_embeddings=False)
    num_outputs = (OUTPUT_KINDS[output_kind].num_outputs or len(labels)) if output_kind else 0
    parameters = family.parameters(config, output_kind, num_outputs, vocabulary.num_rows if vocabulary else 0)
    own_names = {name for parameter in parameters for name in parameter.names}
    tokenizer_config = folder / "tokenizer_config.json"
    limit = read_object(tokenizer_config, optional=True).get("model_max_length") or np.inf
    with naming(tokenizer_config, "correct its values, or copy it again"):
        if limit < config.max_row_tokens and (output_kind or not embedder):
            notes.append(f"ignored model_max_length={limit}: texts are truncated to {config.max_row_tokens} tokens")
    dtypes: set[str] = set()
    activation = ""

    def read_by_canonical_name(name: str) -> np.ndarray:
        array = read_array(stored_names[name])
        dtypes.add(array.dtype.name)
        field, added = family.added_rows.get(name, ("", ""))
        if hf_config.get(field):
            if added not in stored_names:
                raise UsageError(
                    f"{folder} lacks the array {added}, but {file} has {field}=true; copy all weights again"
                )
            array = array.astype(np.float32) + read_array(stored_names[added])[:1].astype(np.float32)
            notes.append(f"added the first row of {added} to {name}")
        return array

    # Ignore tied copies, buffers and poolers, except parameters of this model, such as an untied decoder.
    poolers = [name for path, name, *_ in family.arrays if path.startswith(POOLER)]
    unused = {f"{name}.{leaf}" for name in poolers for leaf in ("weight", "bias")}
    buffers = {family.prefix + name for name in _BUFFERS}
    added_arrays = {added for _, added in family.added_rows.values()}
    ignored = {*family.tied, *added_arrays, *buffers, *unused} - own_names
    params = import_params(
        parameters,
        {name: shapes[stored] for name, stored in stored_names.items() if name not in ignored},
        read_by_canonical_name,
        str(folder),
    )
    if dtypes - {"float32"}:
        notes.append(f"converted weights from {', '.join(sorted(dtypes))} to float32")
    if output_kind == CLASSES:
        activation, functions = sentence_transformers.read_cross_encoder(root, hf_config, len(labels))
        if functions:
            notes.append(f"predict does not apply {' and '.join(functions)}, unlike CrossEncoder")
        if len(labels) == 1:
            # As in transformers, a single output means regression.
            labels = ()
    return PortableCheckpoint(
        config,
        params,
        vocabulary,
        output_kind,
        labels,
        tuple(notes),
        embedder,
        source=str(folder),
        activation=activation,
    )


def _read_config(hf_config: dict[str, Any], file: Path) -> tuple[Family, ModelConfig, str, tuple[str, ...]]:
    """Returns the family, the model config, the kind of output layer ("": none) and the labels of a `config.json`."""
    model_type = hf_config.get("model_type") or "bert"
    if model_type not in FAMILIES:
        raise UsageError(f"{file} has model_type={model_type!r}; bertjax reads {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    supported = dict.fromkeys(family.refused, (None, False)) | {name: (each,) for name, each in family.fixed.items()}
    for name, values in supported.items():
        if name in hf_config and hf_config[name] not in values:
            raise UsageError(f"{file} has {name}={hf_config[name]!r}, which bertjax does not support")
    architectures = hf_config.get("architectures") or [family.base_class]
    architecture = architectures if isinstance(architectures, str) else architectures[0]
    if any(architecture in other.classes for other in FAMILIES.values()):
        # Use the class of this family with the same head, such as `XLMRobertaForMaskedLM` for `RobertaForMaskedLM`.
        head = _CLASS_START.sub("", architecture)
        architecture = next((name for name in family.classes if name.endswith(head)), architecture)
    if architecture not in family.classes:
        raise UsageError(f"{file} has the architecture {architecture!r}; use one of {', '.join(family.classes)}")
    problem, kinds = hf_config.get("problem_type"), family.classes[architecture].output_kinds
    output_kind = MULTILABEL if problem == _MULTILABEL and MULTILABEL in kinds else kinds[0]
    labels: tuple[str, ...] = ()
    if output_kind and not OUTPUT_KINDS[output_kind].num_outputs:
        default = {str(index): f"LABEL_{index}" for index in range(hf_config.get("num_labels") or 2)}
        id2label: dict[str, Any] = hf_config.get("id2label") or default
        names = [id2label.get(str(index)) for index in range(len(id2label))]
        labels = tuple(str(name) for name in names if isinstance(name, str | int))
        if len({*labels}) < len(names):
            raise UsageError(f"{file}: id2label is {id2label!r}; it must map the ids 0, 1, ... to unique names")
    if problem == _REGRESSION and len(labels) > 1:
        raise UsageError(f"{file} defines a regression with several outputs, which bertjax does not support")
    return family, family.model_config(hf_config, file), output_kind, labels


def export_problem(model: nn.Module, output_kind: str = "") -> str:
    """Returns why Hugging Face's format does not support a model with this output layer ("": it does)."""
    checkpoint = PortableCheckpoint(model.config, {}, None, output_kind)
    try:
        check_portable(model_description(model), "the run")
        _make_config(checkpoint, checkpoint.family.class_name(output_kind, set()))
    except UsageError as error:
        return str(error)
    return ""


def _make_config(checkpoint: PortableCheckpoint, class_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`. Raises a UsageError if the format does not support the model."""
    family, config = checkpoint.family, checkpoint.config
    names = {own: name for name, own in reversed(ACTIVATIONS.items())}
    ids = named_special_ids(checkpoint.vocabulary) if checkpoint.vocabulary else {"pad": 0}
    values = {name: getattr(config, name) for name in family.fields}
    values |= {name: names.get(value, value) for name, value in values.items() if name.endswith("_act")}
    hf_config = {
        "architectures": [class_name],
        "model_type": family.model_type,
        **{family.fields[name]: value for name, value in values.items()},
        **{field: ids[name] for field, name in family.token_ids.items() if name in ids},
        **family.fixed,
        **family.write_fields(config),
        "dtype": "float32",
    }
    restored = family.model_config(hf_config, Path(CONFIG))
    if not config.num_key_value_heads and restored.num_key_value_heads == config.num_attention_heads:
        restored = dataclasses.replace(restored, num_key_value_heads=0)  # 0: one per attention head
    # Skip `pair_segments`, which is stored in the tokenizer's files.
    for name in {*ARCHITECTURE_FIELDS} - {"pad_vocab_to_multiple_of", "pair_segments"}:
        if (value := getattr(config, name)) != getattr(restored, name):
            raise UsageError(
                f"Hugging Face's format does not support model.{name}={value}; use the bertjax checkpoint itself"
            )
    hf_config["vocab_size"] = checkpoint.num_rows
    kind = checkpoint.output_kind
    if kind and not OUTPUT_KINDS[kind].num_outputs:
        labels = checkpoint.labels or ("LABEL_0",)
        hf_config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        hf_config["label2id"] = {label: index for index, label in enumerate(labels)}
    if kind in (CLASSES, MULTILABEL):
        problem = _CLASSES if checkpoint.labels else _REGRESSION
        hf_config["problem_type"] = problem if kind == CLASSES else _MULTILABEL
    return hf_config


def write(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a Hugging Face folder and returns notes for the user.

    Removes the arrays from `checkpoint.params` to save memory.
    """
    family = checkpoint.family
    class_name = family.class_name(checkpoint.output_kind, checkpoint.modules)
    hf_config = _make_config(checkpoint, class_name)
    used, modules = {*family.classes[class_name].modules}, checkpoint.modules - {ENCODER}
    unused, missing = sorted(modules - used), sorted(used - modules)
    notes = [f"{class_name} ignores {', '.join(unused)}, which the folder contains"] if unused else []
    notes += [f"{class_name} will initialize {', '.join(missing)} randomly"] if missing else []
    arrays = export_params(checkpoint.parameters, checkpoint.params)
    if MASKED_LM in modules and not checkpoint.config.tie_word_embeddings:
        # Add the decoder's bias under its own name, so that transformers does not tie it.
        arrays |= {copy: arrays[own].copy() for copy, own in family.tied.items() if copy not in arrays}
    if class_name == family.base_class:
        arrays = {name.removeprefix(family.prefix): array for name, array in arrays.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    # Let other users read the file; safetensors makes it readable only for its owner.
    (folder / WEIGHTS).chmod(0o644)
    if family.has_own_code:
        notes += _copy_code(Path(checkpoint.source), hf_config, folder)
    if checkpoint.activation:
        hf_config["sentence_transformers"] = {"activation_fn": checkpoint.activation}
    write_json(folder / CONFIG, hf_config)
    if checkpoint.embedder and checkpoint.embedder.refusal:
        notes.append(f"left out the sentence-transformers modules: {checkpoint.embedder.refusal}")
    elif checkpoint.embedder:
        sentence_transformers.write(checkpoint.embedder, folder)
    return [*notes, *write_tokenizer(checkpoint.vocabulary, checkpoint.config, folder)]


def write_embedder(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a Hugging Face folder with sentence-transformers modules (default: mean pooling); see `write`."""
    config, embedder = checkpoint.config, checkpoint.embedder
    notes = [] if embedder else ["no sentence-transformers modules; wrote mean pooling"]
    embedder = embedder or sentence_transformers.mean_embedder(config.hidden_size, config.max_row_tokens)
    if reason := embedder.refusal or ("the checkpoint has an output layer" if checkpoint.output_kind else ""):
        raise UsageError(f"{reason}; use the format huggingface")
    return notes + write(dataclasses.replace(checkpoint, embedder=embedder), folder)


def _copy_code(source: Path, hf_config: dict[str, Any], folder: Path) -> list[str]:
    """Copies a model's custom code and `auto_map`. Returns a note for the user if the code is missing, else []."""
    auto_map = read_object(source / CONFIG, optional=True).get("auto_map") or {}
    modules = {f"{name.partition('.')[0]}.py" for name in auto_map.values() if "--" not in name}
    if not auto_map or not all((source / name).is_file() for name in modules):
        return ["AutoModel needs the original model's code: copy its *.py files and `auto_map` of its config.json"]
    hf_config["auto_map"] = auto_map
    for file in source.glob("*.py"):  # Copy all, because the modules may import others.
        (folder / file.name).write_bytes(file.read_bytes())
    return []


def _stored_names(shapes: Collection[str], family: Family) -> dict[str, str]:
    """Returns a dict from current array names to the names in the file, which may be old or lack the prefix."""
    prefix = family.prefix
    has_prefix = any(name.startswith(prefix) for name in shapes)
    names = [name.removeprefix(prefix) for _, name, *_ in family.arrays if name.startswith(prefix)]
    parts = {name.split(".")[0] for name in names}
    stored_names = {}
    for stored in shapes:
        # Old checkpoints have other suffixes.
        name = stored.replace(".LayerNorm.gamma", ".LayerNorm.weight").replace(".LayerNorm.beta", ".LayerNorm.bias")
        lacks_prefix = not has_prefix and name.split(".")[0] in parts
        stored_names[f"{prefix}{name}" if lacks_prefix else name] = stored
    return stored_names
