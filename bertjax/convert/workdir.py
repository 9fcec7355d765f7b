"""Conversion from bertjax checkpoints, and to bertjax workdirs with one checkpoint at step 0."""

import json
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.convert.portable import PortableCheckpoint
from bertjax.data.corpus.vocabulary import ENTRY, VOCABULARY_FILES, vocabulary_files, workdir_vocabulary
from bertjax.errors import UsageError
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.model.feature_head import FeatureHead
from bertjax.model.heads import EncoderModel, PretrainingModel, SequenceModel, TokenModel
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, OutputLayer, read_output_layer
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.parameters import load_params_on_host, save_params
from bertjax.training.workdir import CONFIG, ORIGIN

# Kinds of models that can be converted to foreign formats.
_KINDS = {model.KIND for model in (EncoderModel, PretrainingModel, SequenceModel, TokenModel)}
# Files and folders of a converted workdir. A folder with other files is never overwritten.
FILES = (ORIGIN, CONFIG, OUTPUT_LAYER, ENTRY, CHECKPOINTS, *VOCABULARY_FILES.values())


def read(path: Path | epath.Path) -> PortableCheckpoint:
    """Reads a checkpoint or, for a workdir, its best checkpoint (the newest if none has a score)."""
    checkpoint = find_checkpoint(path)
    workdir = workdir_of(checkpoint)
    kind, config = read_metadata(checkpoint).model, checkpoint_model(checkpoint)
    feature_head = FeatureHead(**(kind["feature_head"] or {}))
    if kind["kind"] not in _KINDS:
        raise UsageError(
            f"{checkpoint} has a model of kind {kind['kind']!r} with encoder={config.encoder} and attention_direction="
            f"{config.attention_direction}, which cannot be converted; use the workdir itself"
        )
    if feature_head.is_used:
        raise UsageError(
            f"{checkpoint} has feature_head.features={feature_head.features or '(none)'} and "
            f"feature_head.lstm_layers={feature_head.lstm_layers}, which cannot be converted; use the workdir itself"
        )
    layer = read_output_layer(workdir)
    return PortableCheckpoint(
        config,
        load_params_on_host(checkpoint),
        workdir_vocabulary(workdir),
        layer.kind if layer else "",
        layer.labels if layer else (),
    )


def write(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a workdir, for example for `--init_from`, and returns notes for the user."""
    if checkpoint.vocabulary is None:
        raise UsageError("the source has no vocab.txt; copy the model's vocabulary to its folder")
    kind = checkpoint.output_kind
    run_config = finetuning_config(OUTPUT_KINDS[kind].task) if kind else pretraining_config()
    for name, value in vars(checkpoint.config).items():
        run_config.model[name] = value
    (folder / CONFIG).write_text(json.dumps(run_config.to_dict(), indent=1) + "\n")
    files = vocabulary_files(checkpoint.vocabulary)
    if kind:
        files[OUTPUT_LAYER] = OutputLayer(kind, checkpoint.labels).as_json()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    save_params(epath.Path(folder), checkpoint.params, checkpoint.model_kind, checkpoint.config.architecture)
    return []


def write_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Records the source of a conversion in its workdir."""
    (folder / ORIGIN).write_text(json.dumps(origin) + "\n")
