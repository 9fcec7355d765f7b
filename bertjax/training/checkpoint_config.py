"""Functions that fill unset fields of a run's config, and that read the configs of checkpoints."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.config.fields import from_config_dict
from bertjax.config.load import apply_overrides, load_config, load_saved_config
from bertjax.config.run import DATA_FILES, DATA_PATHS, RunConfig, set_paths
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.data.finetuning.dataset_rows import TFDS_PREFIX
from bertjax.errors import UsageError
from bertjax.model.config import AUTO, ROPE_THETAS, Architecture, ModelConfig, size_fields
from bertjax.tasks.build import parse_config
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, read_output_layer
from bertjax.training.checkpoint import find_checkpoint, resolve_checkpoint_path, workdir_of
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.training.parameters import lacks_lm_head
from bertjax.training.workdir import CONFIG, has_checkpoints
from bertjax.utils.hub import is_hub
from bertjax.utils.io import is_remote


def experiment_config(experiment: str, overrides: Sequence[str], init_from: epath.Path | None = None) -> RunConfig:
    """Loads `experiment` with `load_config` and returns its config, completed by `fill_unset_fields`."""
    return fill_unset_fields(parse_config(load_config(experiment, overrides)), init_from)


def fill_unset_fields(config: RunConfig, init_from: epath.Path | None = None, workdir: str | None = None) -> RunConfig:
    """Fills unset fields of a config and makes its paths absolute. `vocab_size` may stay unset until data is read.

    Unset architecture fields come from the checkpoint `init_from`. Without `init_from`, a config that sets a model size
    gets the defaults of `ModelConfig`. Other configs get the architecture of the run to resume in `workdir`, or the
    task's defaults, which may be unset. `head_steps=-1` becomes the value of the run to resume. In a new run, it
    becomes a third of the steps if the checkpoint lacks a language-model head, else 0. An empty `data.vocabulary`
    becomes the vocabulary of the checkpoint.

    Raises a UsageError if an architecture field differs from the checkpoint's.
    """
    data, optimizer, checkpoint, thetas = _with_absolute_paths(config.data), config.optimizer, init_from, {}
    if workdir is not None and has_checkpoints(folder := resolve_checkpoint_path(workdir)):
        saved = load_saved_config(folder / CONFIG, "restore it, or choose another --workdir")
        if optimizer.head_steps < 0:
            optimizer = dataclasses.replace(optimizer, head_steps=saved.optimizer.get("head_steps", 0))
        if checkpoint is None and config.model.hidden_size is None:
            checkpoint = find_checkpoint(folder)
            thetas = {name: saved.model[name] for name in ROPE_THETAS if name in saved.model}
    if checkpoint is None:
        is_sized = not {*size_fields("base")} & {*config.model.unset}
        defaults = ModelConfig() if is_sized else type(config)().model
        unset = {name: getattr(defaults, name) for name in config.model.unset if name != "vocab_size"}
        model = dataclasses.replace(config.model, **unset)
    else:
        architecture = dataclasses.replace(saved_architecture(checkpoint), **thetas)
        model = _with_architecture(config.model, architecture, checkpoint, config.has_data)
        if getattr(data, "vocabulary", None) == "":
            data = dataclasses.replace(data, vocabulary=str(workdir_of(checkpoint) / ENTRY))
    if optimizer.head_steps < 0:
        has_new_head = checkpoint is not None and model.has_lm_head_params and lacks_lm_head(checkpoint)
        optimizer = dataclasses.replace(optimizer, head_steps=config.steps // 3 if has_new_head else 0)
    fields: dict[str, Any] = {"model": model, "data": data, "optimizer": optimizer}
    config = dataclasses.replace(config, **fields)
    return config if checkpoint is None else config.with_checkpoint(workdir_of(checkpoint))


def _with_architecture(model: ModelConfig, saved: Architecture, checkpoint: epath.Path, has_data: bool) -> ModelConfig:
    changes = vars(saved).copy()
    if has_data and model.vocab_size is None:
        # The vocabulary size comes from the run's vocabulary, which `check_vocabulary` compares with the checkpoint's.
        del changes["vocab_size"]
    for name, value in changes.items():
        configured = getattr(model, name)
        # `pad_vocab_to_multiple_of` always comes from the checkpoint, because it determines the token table's shape.
        if configured not in (None, value) and name != "pad_vocab_to_multiple_of":
            message = f"config.model.{name}={configured} differs from {name}={value} of {checkpoint}"
            raise UsageError(f"{message}; omit `size=` and config.model.{name}, or set them to the checkpoint's values")
    return dataclasses.replace(model, **changes)


def checkpoint_config(checkpoint: epath.Path, overrides: Sequence[str], experiment: str = "") -> RunConfig:
    """Returns the config for using a checkpoint, for example to evaluate it.

    It is the config of `experiment` (default: "", the config of the checkpoint's run), with the
    `--config.FIELD=VALUE` overrides. The vocabulary and the labels are those in the workdir, unless the experiment or
    an override sets them.
    """
    config_dict = load_config(experiment, []) if experiment else load_saved_config(workdir_of(checkpoint) / CONFIG)
    if not experiment:
        # Use the workdir's copies, because the originals may have been removed.
        config_dict.data.update({name: "" for name in ("vocabulary", "labels") if name in config_dict.data})
    if "phases" in config_dict:  # Use the RoPE thetas of the checkpoint's phase.
        phases = [{k: v for k, v in phase.items() if k not in ROPE_THETAS} for phase in config_dict.phases]
        thetas = {name: getattr(saved_architecture(checkpoint), name) for name in ROPE_THETAS}
        with config_dict.ignore_type():
            config_dict.update({"phases": tuple(phases), "model": thetas})
    config = parse_config(apply_overrides(config_dict, overrides))
    return _with_labels_of(fill_unset_fields(config, checkpoint), checkpoint)


def checkpoint_model(checkpoint: epath.Path) -> ModelConfig:
    """Returns the model config of a checkpoint for inference.

    The architecture comes from the checkpoint, and other fields come from the workdir's config. The attention
    implementation is `auto`, because devices and row lengths may differ from training.
    """
    saved = load_saved_config(workdir_of(checkpoint) / CONFIG)
    model = from_config_dict(ModelConfig(), ConfigDict({**saved.model, "vocab_size": 1}), "config.model")
    architecture: dict[str, Any] = vars(saved_architecture(checkpoint))
    # On CPU, inference uses float32. Only training, including its evaluations, uses bfloat16.
    dtype = "float32" if model.dtype == AUTO and jax.default_backend() == "cpu" else model.dtype
    return dataclasses.replace(model, **architecture, attention=AUTO, dtype=dtype)


def _with_labels_of(config: RunConfig, checkpoint: epath.Path) -> RunConfig:
    """Sets an unset `data.labels` to the path of a checkpoint's `output_layer.json`, if it exists."""
    data, layer = config.data, read_output_layer(workdir_of(checkpoint))
    if layer is None or getattr(data, "labels", None) != "":
        return config
    train_file = getattr(data, "train_file", "")
    if layer.has_generic_labels and train_file and os.path.isfile(os.path.join(data.path, train_file)):
        # The task reads its labels from the training file, and `check_output_layer` matches them by position.
        return config
    return _with_data(config, labels=str(workdir_of(checkpoint) / OUTPUT_LAYER))


def choose_split(config: RunConfig, split: str, uses_labels: bool = False) -> RunConfig:
    """Returns the config with `data.eval_split` set to `split`.

    With `uses_labels`, sets `data.dev_file` to the test file instead, because tasks may ignore the labels of a test
    file. The files of embedding tasks stay unchanged, because these tasks use the labels of test files. They also do
    not require a test file, because `data.retrieval` may contain the test set.
    """
    data: Any = config.data
    if split not in SPLITS:
        raise UsageError(f"unknown --split: {split!r}; use one of {', '.join(SPLITS)}")
    if not hasattr(data, "eval_split"):
        raise UsageError(f"the task {config.task} does not make predictions; use a checkpoint of another task")
    if split == SPLITS[0] or not uses_labels or not hasattr(data, "test_file") or hasattr(data, "retrieval"):
        return _with_data(config, eval_split=split)
    if not data.test_file:
        raise UsageError("no test file; set it with --config.data.test_file=FILE")
    return _with_data(config, dev_file=data.test_file, eval_split=SPLITS[0], dev_share=0.0)


def _with_data(config: RunConfig, **fields: Any) -> RunConfig:
    data: dict[str, Any] = {"data": dataclasses.replace(config.data, **fields)}
    return dataclasses.replace(config, **data)


def _with_absolute_paths(data: Any) -> Any:
    """Returns the section `data` with absolute paths, so that a saved config does not depend on the current folder."""
    has_folder = bool(getattr(data, "path", ""))
    names = (*DATA_PATHS, *(() if has_folder else DATA_FILES))
    paths: dict[str, Any] = {name: _absolute_path(path) for name, path in set_paths(data, names).items()}
    if (sources := getattr(data, "sources", ())) and not has_folder:
        paths["sources"] = tuple({**source, "file": _absolute_path(source["file"])} for source in sources)
    return dataclasses.replace(data, **paths)


def _absolute_path(path: str) -> str:
    is_address = path.startswith(TFDS_PREFIX) or is_remote(path) or is_hub(path)
    return path if is_address else os.path.abspath(os.path.expanduser(path))
