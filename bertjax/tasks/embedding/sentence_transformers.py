"""Files that sentence-transformers adds to a Hugging Face folder. Converted workdirs contain the same files.

`modules.json` lists the modules of a model, and their folders with a config and weights. Without this file,
sentence-transformers uses mean pooling. `read` supports the formats of versions 2 to 6, and `write` versions 5 and 6.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig
from bertjax.tasks.embedding.sentence_embedder import (
    ACTIVATIONS,
    LAYERS,
    POOLING_FIELDS,
    SENTENCE,
    TOKENS,
    Layer,
    Pooling,
    SentenceEmbedder,
    activation_name,
)
from bertjax.utils.io import AnyPath, read_json
from bertjax.utils.json_files import read_object, write_json

MODULES = "modules.json"
_PROMPTS, _TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
# Config file names of the module `Transformer`, in the order in which sentence-transformers tries them.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Dtypes, keyed by safetensors name. The NumPy reader of safetensors does not support all of them.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_OLD_POOLING = "1_Pooling/config.json"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
# Names and patterns of the files and folders that exports write.
FILES = (MODULES, _PROMPTS, _TRANSFORMER_CONFIGS[0], "*_Pooling", "*_Dense", "*_Normalize", "*_LayerNorm")
# Files to download.
READ_FILES = (MODULES, _PROMPTS, *_TRANSFORMER_CONFIGS, _OLD_POOLING)
# Files that an upload replaces or removes.
STALE_FILES = (MODULES, _PROMPTS, *_TRANSFORMER_CONFIGS, "[0-9]*_*/*")
_TYPES = "sentence_transformers."
# Fields of the Transformer's config, with the only value that bertjax supports.
_FIXED_FIELDS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": TOKENS,
}
# Fields of the Transformer's config that contain arguments of transformers' `from_pretrained`. The arguments in
# `_IGNORED_ARGUMENTS` do not change the vectors.
_ARGUMENTS = ("model_kwargs", "model_args", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args")
_IGNORED_ARGUMENTS = (
    *("attn_implementation", "trust_remote_code", "use_safetensors", "low_cpu_mem_usage", "add_pooling_layer"),
)


def transformer_folder(folder: Path) -> Path:
    """Returns the folder of the module `Transformer`: `folder` itself, or a subfolder that `modules.json` names."""
    path = next(iter(module_paths(folder, "Transformer").values()), "")
    return folder / path if path and (folder / path / _CONFIG).is_file() else folder


def module_paths(folder: AnyPath, class_name: str = "") -> dict[str, str]:
    """Returns each module's folder relative to `folder`, keyed by module name ({}: no valid `modules.json`).

    `class_name` selects the modules of a class (default: "", all modules).
    """
    try:
        entries = [entry for entry in read_json(folder / MODULES) if str(entry["type"]).endswith(class_name)]
        paths = {str(entry["name"]): str(entry["path"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    is_inside = all(not PurePosixPath(path).is_absolute() and ".." not in path for path in paths.values())
    return paths if is_inside else {}


def read_cross_encoder(folder: Path, config: Mapping[str, Any], num_labels: int) -> tuple[str, list[str]]:
    """Returns the activation class of a `CrossEncoder` ("": the default), and all functions that it applies.

    The functions are phrases such as "torch.nn.Sigmoid to logits". `config` is the model's `config.json`.
    """
    nested, own = config.get("sentence_transformers"), read_object(folder / _PROMPTS, optional=True)
    sources = (own, nested if isinstance(nested, dict) else {})
    values = [source.get("activation_fn") for source in sources] + [config.get("sbert_ce_default_activation_function")]
    activation = next((str(value) for value in values if value), "")
    applied = activation or ("torch.nn.Sigmoid" if num_labels == 1 else "")
    prompt = (own.get("prompts") or {}).get(own.get("default_prompt_name"))
    functions = [] if not applied or applied.endswith(".Identity") else [f"{applied} to logits"]
    functions += [f"the prompt {prompt!r} to texts"] * bool(prompt)
    # Read the module's config only if modules.json exists, as CrossEncoder does.
    _, transformer = _transformer_config(transformer_folder(folder)) if (folder / MODULES).exists() else (folder, {})
    return activation, functions + ["lower-casing to texts"] * bool(transformer.get("do_lower_case"))


def read(folder: AnyPath, config: ModelConfig, is_workdir: bool = False) -> SentenceEmbedder | None:
    """Reads the sentence-transformers modules in a folder. Returns None if there are none.

    If a file is not supported, the field `refusal` of the result contains the reason.

    Args:
      folder: Hugging Face folder or, with `is_workdir`, a bertjax workdir.
      config: config of the model.
      is_workdir: whether `folder` is a workdir. Without `modules.json`, a workdir has the pooling in `1_Pooling`, and
        other folders have mean pooling, as in sentence-transformers.
    """
    from safetensors import SafetensorError

    if not any((folder / name).exists() for name in READ_FILES):
        return None
    try:
        return _read(folder, config.hidden_size, config.max_row_tokens, is_workdir)
    except UsageError as error:
        return SentenceEmbedder(refusal=str(error))
    except (AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError) as error:
        # A file is damaged, or contains a value that sentence-transformers does not write.
        return SentenceEmbedder(refusal=f"cannot use the modules of {folder}: {type(error).__name__}: {error}")


def mean_embedder(hidden_size: int, max_seq_len: int) -> SentenceEmbedder:
    """Returns the modules that sentence-transformers uses for a folder without `modules.json`: mean pooling."""
    mean = {"word_embedding_dimension": hidden_size, POOLING_FIELDS["mean"]: True}
    return SentenceEmbedder((Pooling(mean, ("mean",)),), hidden_size, max_seq_len)


def _read(folder: AnyPath, hidden_size: int, max_positions: int, is_workdir: bool) -> SentenceEmbedder:
    if not (folder / MODULES).exists():
        embedder = mean_embedder(hidden_size, _max_seq_len((), folder, max_positions))
        if not is_workdir:
            return embedder
        pooling = _read_pooling(folder / _OLD_POOLING)
        return dataclasses.replace(embedder, modules=(pooling,), width=len(pooling.modes) * hidden_size)
    (first, transformer), *others = _module_folders(folder)
    if first != "Transformer":
        raise UsageError(f"{folder / MODULES} starts with the module {first}; bertjax supports only Transformer")
    file, config = _transformer_config(transformer)
    config |= {name: _without_ignored(config[name]) for name in _ARGUMENTS if config.get(name)}
    arguments = config.pop("processor_kwargs", None) or config.pop("tokenizer_args", None) or {}
    limits = (arguments.pop("model_max_length", None), config.get("max_seq_length"))
    _check_fields({**config, "processor_kwargs": arguments}, file, ("max_seq_length", "do_lower_case", "unpad_inputs"))
    modules, widths = [], {TOKENS: hidden_size}
    for name, module_folder in others:
        modules += _read_module(name, module_folder, widths)
    if SENTENCE not in widths:
        raise UsageError(f"{folder / MODULES} lists no pooling module; add one, such as Pooling")
    prompts = read_object(folder / _PROMPTS, optional=True)
    if (model_type := prompts.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise UsageError(f"{folder / _PROMPTS} has the model_type {model_type!r}; bertjax supports SentenceTransformer")
    texts = {"query": "", "document": "", **{name: text or "" for name, text in (prompts.get("prompts") or {}).items()}}
    if wrong := [text for text in texts.values() if not isinstance(text, str)]:
        raise UsageError(f"{folder / _PROMPTS} has the prompt {wrong[0]!r}; a prompt must be a string")
    default, truncate_dim = prompts.get("default_prompt_name") or "", prompts.get("truncate_dim")
    if default and default not in texts:
        raise UsageError(f"{folder / _PROMPTS} has the default_prompt_name {default!r}, but no prompt with this name")
    return SentenceEmbedder(
        tuple(modules),
        min(widths[SENTENCE], truncate_dim or widths[SENTENCE]),
        _max_seq_len(limits, transformer, max_positions),
        bool(config.get("do_lower_case")),
        texts,
        default,
        truncate_dim,
        prompts.get("similarity_fn_name") or "",
    )


def _without_ignored(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _IGNORED_ARGUMENTS}


def _transformer_config(folder: AnyPath) -> tuple[AnyPath, dict[str, Any]]:
    """Returns the path and content of the first config file of `Transformer` that is not empty."""
    configs = {folder / name: read_object(folder / name, optional=True) for name in _TRANSFORMER_CONFIGS}
    return next(((file, config) for file, config in configs.items() if config), (folder, {}))


def _module_folders(folder: AnyPath) -> list[tuple[str, AnyPath]]:
    """Returns (class, folder) of each module in `modules.json`."""
    file = folder / MODULES
    content = read_json(file)
    if isinstance(content, dict):
        raise UsageError(content["refusal"])
    types = [str(entry["type"]) for entry in content]
    if unknown := [name for name in types if not name.startswith(_TYPES)]:
        raise UsageError(f"{file} lists modules with custom code, which bertjax does not run: {listed(unknown)}")
    paths = module_paths(folder).values()
    if not types or len(paths) != len(types):
        raise UsageError(f"{file} must list modules with different names, in folders inside of {folder}")
    return [(name.rpartition(".")[2], folder / path) for name, path in zip(types, paths, strict=True)]


def _read_module(name: str, folder: AnyPath, widths: dict[str, int]) -> list[Pooling | Layer]:
    """Reads a module after the Transformer. Returns [] for Dropout, which does nothing at inference.

    `widths` maps the names of features, such as `sentence_embedding`, to their widths. Updates the width of the feature
    that the module outputs.
    """
    file = folder / _CONFIG
    config = read_object(file, optional=True)
    if name == "Dropout":
        return []
    if name == Pooling.name:
        pooling = _read_pooling(file)
        widths[SENTENCE] = len(pooling.modes) * widths[TOKENS]
        return [pooling]
    if name not in LAYERS:
        raise UsageError(f"{folder} is a module {name}, which bertjax does not support")
    names = ("module_input_name", "module_output_name")
    source, target = (config.get(field) or config.get(names[0]) or SENTENCE for field in names)
    if source not in widths or target != source:
        raise UsageError(f"{file} maps {source} to {target}, which bertjax does not support here")
    width, shapes = widths[source], {}
    # Ignore the fields of Normalize, as sentence-transformers does.
    if name == "LayerNorm":
        _check_fields(config, file, ("dimension",))
        shapes = {"norm.weight": (width,), "norm.bias": (width,)}
    elif name == "Dense":
        known = ("in_features", "out_features", "bias", "activation_function", "use_residual", *names)
        _check_fields(config, file, known)
        if activation_name(config) not in ACTIVATIONS:
            activation = config["activation_function"]
            raise UsageError(f"{file} has activation_function={activation!r}; use one of {', '.join(ACTIVATIONS)}")
        widths[source] = config["out_features"]
        shapes["linear.weight"] = (widths[source], width)
        if config.get("bias", True):
            shapes["linear.bias"] = (widths[source],)
        if config.get("use_residual") and widths[source] != width:
            shapes["residual.weight"] = shapes["linear.weight"]
    return [Layer(name, config, _read_arrays(folder, shapes) if shapes else {}, source)]


def _read_pooling(file: AnyPath) -> Pooling:
    """Reads the config of a `Pooling` module, in the format before or since version 5.4."""
    config = read_object(file)
    sizes = ("embedding_dimension", "word_embedding_dimension")
    _check_fields(config, file, (*sizes, "pooling_mode", "include_prompt", *POOLING_FIELDS.values()))
    modes = [mode for mode, field in POOLING_FIELDS.items() if config.get(field)] or ["mean"]
    modes = config.get("pooling_mode", modes)
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    if not config or not modes or not {*modes} <= POOLING_FIELDS.keys():
        raise UsageError(f"{file} has an unknown pooling_mode: {listed(modes)}")
    return Pooling(config, modes)


def _read_arrays(folder: AnyPath, shapes: Mapping[str, tuple]) -> dict[str, np.ndarray]:
    """Reads the weights of a module as float32. `shapes` contains the shape of each array."""
    from safetensors import deserialize

    file = folder / _WEIGHTS
    if not file.exists():
        raise UsageError(
            f"{folder} has no {_WEIGHTS}; bertjax does not open pickles, which can run code. If you trust the model, "
            "save it again with sentence_transformers: SentenceTransformer(DIR).save_pretrained(NEW_DIR)"
        )
    arrays = {
        name: np.frombuffer(array["data"], _DTYPES[array["dtype"]]).reshape(array["shape"]).astype(np.float32)
        for name, array in deserialize(file.read_bytes())
    }
    if (found := {name: array.shape for name, array in arrays.items()}) != dict(shapes):
        raise UsageError(f"{file} has arrays {found}, but the modules need {dict(shapes)}")
    return arrays


def _max_seq_len(limits: tuple[Any, ...], folder: AnyPath, max_positions: int) -> int:
    """Returns the maximum tokens per text: the first of `limits` that is set, else the limit of the tokenizer.

    Raises a UsageError if the tokenizer pads on the left.
    """
    config, tokenizer = (read_object(folder / name, optional=True) for name in (_TOKENIZER, "tokenizer.json"))
    side = config.get("padding_side") or (tokenizer.get("padding") or {}).get("direction") or "right"
    if str(side).lower() != "right":
        raise UsageError(f"the tokenizer of {folder} pads on the {side}, so a vector depends on the other texts")
    default = config.get("model_max_length", config.get("max_len")) or max_positions
    limit = next((limit for limit in limits if limit is not None), default)
    return int(min(limit, max_positions))


def _check_fields(config: Mapping[str, Any], file: AnyPath, known: tuple[str, ...]) -> None:
    """Raises a UsageError for an unknown field that is set, because it may change the vectors."""
    for name, value in config.items():
        if value and name not in known and value != _FIXED_FIELDS.get(name):
            raise UsageError(f"{file} has {name}={value!r}, which bertjax does not support")


def write(embedder: SentenceEmbedder, folder: Path) -> None:
    """Writes the files that `read` and sentence-transformers read.

    For an unsupported embedder, writes a `modules.json` with its `refusal`, which only bertjax can read.
    """
    from safetensors.numpy import save

    if embedder.refusal:
        write_json(folder / MODULES, {"refusal": embedder.refusal})
        return
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_TYPES}models.Transformer"}]
    for index, module in enumerate(embedder.modules, start=1):
        path = folder / f"{index}_{module.name}"
        path.mkdir()
        write_json(path / _CONFIG, module.config)
        if isinstance(module, Layer) and module.arrays:
            arrays = {name: np.ascontiguousarray(array) for name, array in module.arrays.items()}
            (path / _WEIGHTS).write_bytes(save(arrays, {"format": "pt"}))
        modules.append({"idx": index, "name": str(index), "path": path.name, "type": f"{_TYPES}models.{module.name}"})
    write_json(folder / MODULES, modules)
    limits = {"max_seq_length": embedder.max_seq_len, "do_lower_case": embedder.lower_case}
    write_json(folder / _TRANSFORMER_CONFIGS[0], limits)
    prompts: dict[str, Any] = {
        "prompts": dict(embedder.prompts),
        "default_prompt_name": embedder.default_prompt or None,
        "similarity_fn_name": embedder.similarity or None,
        **({"truncate_dim": embedder.truncate_dim} if embedder.truncate_dim else {}),
    }
    write_json(folder / _PROMPTS, prompts)
