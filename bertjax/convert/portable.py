"""Checkpoints in memory, the config fields that all formats share, and bertjax workdirs with one checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bertjax.convert import sentence_transformers
from bertjax.convert.names import (
    CLASSIFIER,
    HUGGINGFACE,
    MASKED_LM,
    NEXT_SENTENCE,
    POOLER,
    TENSORFLOW,
    Parameter,
    bert_parameters,
)
from bertjax.data.corpus.vocabulary import (
    ENTRY,
    MAX_WORD_CHARS,
    VOCABULARY_FILES,
    WORDPIECE,
    Vocabulary,
    load_vocabulary,
    vocabulary_files,
    workdir_vocabulary,
)
from bertjax.errors import UsageError
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.inference.sentence_embedder import SentenceEmbedder
from bertjax.model.config import ARCHITECTURE_FIELDS, Architecture, ModelConfig
from bertjax.model.feature_head import FeatureHead
from bertjax.model.heads import EncoderModel, PretrainingModel, SequenceModel, TokenModel, model_description
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, OutputLayer, read_output_layer
from bertjax.tasks.objectives.config import OBJECTIVES
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.parameters import load_params_on_host, save_params
from bertjax.training.workdir import CONFIG, ORIGIN
from bertjax.utils.io import AnyPath, read_json_object

# Files and folders of a converted workdir. A folder with other names is never overwritten.
WORKDIR_FILES = (
    ORIGIN,
    CONFIG,
    OUTPUT_LAYER,
    ENTRY,
    CHECKPOINTS,
    *sentence_transformers.FILES,
    *VOCABULARY_FILES.values(),
)
# Kinds of models that can be converted to other formats.
_KINDS = {model.KIND for model in (EncoderModel, PretrainingModel, SequenceModel, TokenModel)}
_REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_INTEGER_FIELDS = (*_REQUIRED_FIELDS, "max_position_embeddings", "type_vocab_size")
# These fields have the same name in all formats, because `ModelConfig` uses the names of BertConfig.
SHARED_FIELDS = (*_INTEGER_FIELDS, "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
# Fields that `shared_fields` does not check, because the formats express them differently, or because the exported
# arrays do not depend on them.
_FORMAT_FIELDS = ("hidden_act", "layer_norm_eps", "pad_vocab_to_multiple_of")
DEFAULT_EPSILON = 1e-12


@dataclasses.dataclass(frozen=True)
class PortableCheckpoint:
    """Checkpoint in memory, independent of its format.

    Attributes:
      config: model config.
      params: float32 arrays by parameter path, stacked over layers, as in the models of `bertjax.model.heads`. Exports
        to other formats remove the arrays one by one to save memory.
      vocabulary: vocabulary, or None if the source has no vocabulary.
      output_kind: kind of the output layer (default: "", no output layer).
      labels: names of classes, labels or tags in the order of their ids (default: (), no labels).
      notes: messages about the import, for the user.
      embedder: modules of a sentence-transformers model (default: None, another model).
      untrained: names of modules that the run did not train. Other formats than bertjax's leave them out.
    """

    config: ModelConfig
    params: dict[str, np.ndarray]
    vocabulary: Vocabulary | None
    output_kind: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    embedder: SentenceEmbedder | None = None
    untrained: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Width of the output layer; 0 if the model has no output layer."""
        return self.params[f"{CLASSIFIER}/bias"].shape[0] if self.output_kind else 0

    @property
    def modules(self) -> set[str]:
        """Names of the top-level modules, such as `encoder`."""
        return {path.partition("/")[0] for path in self.params}

    @property
    def model_description(self) -> dict[str, Any]:
        """JSON description of the Flax module, as `bertjax.model.heads.model_description` returns it."""
        if self.output_kind:
            return model_description(OUTPUT_KINDS[self.output_kind].build_model(self.config, self.num_outputs))
        is_complete = {POOLER, MASKED_LM, NEXT_SENTENCE} <= self.modules
        return model_description(PretrainingModel(self.config) if is_complete else EncoderModel(self.config))

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters with their names in all formats."""
        return parameter_table(self.config, self.output_kind, self.num_outputs, self.num_rows)

    @property
    def num_rows(self) -> int:
        """Number of token embeddings in other formats."""
        return (self.vocabulary.num_rows if self.vocabulary else 0) or self.config.vocab_size


def parameter_table(config: ModelConfig, output_kind: str, num_outputs: int, num_rows: int = 0) -> list[Parameter]:
    """Lists the parameters of a BERT model, including its output layer unless `output_kind` is empty.

    `num_rows` is the number of token embeddings in other formats (default: 0, `config.vocab_size`).
    """
    if not output_kind:
        return bert_parameters(config, num_rows=num_rows)
    kind = OUTPUT_KINDS[output_kind]
    kernels = {HUGGINGFACE: kind.huggingface_kernel, TENSORFLOW: kind.tensorflow_kernel}
    names = {fmt: name for fmt, name in kernels.items() if name}
    return bert_parameters(config, num_outputs, names, num_rows)


def read_config(file: AnyPath) -> dict[str, Any]:
    """Reads a JSON config of a checkpoint of any format."""
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config {file} of the checkpoint: {error}; copy the file again") from error


def parse_bert_config(
    bert_config: dict[str, Any], file: Path, type_vocab_size: int, **format_fields: Any
) -> ModelConfig:
    """Builds the model config from `bert_config`, a dictionary with the field names of BertConfig.

    `file` is the file that contains `bert_config`, for error messages. `type_vocab_size` is the default of this
    field in the checkpoint's format. `format_fields` are values of fields of `ModelConfig` that are not in
    `SHARED_FIELDS`.
    """
    if missing := [name for name in _REQUIRED_FIELDS if name not in bert_config]:
        raise UsageError(f"{file} lacks {', '.join(missing)}; add the values that the checkpoint was trained with")
    # The defaults of BertConfig equal those of `ModelConfig`, except `type_vocab_size`.
    defaults: dict[str, Any] = {**vars(ModelConfig()), "type_vocab_size": type_vocab_size}
    fields = {name: {**defaults, **bert_config}[name] for name in SHARED_FIELDS}
    for name, value in fields.items():
        types, article = ((int,), "an integer") if name in _INTEGER_FIELDS else ((int, float), "a number")
        if not isinstance(value, types) or isinstance(value, bool):
            raise UsageError(f"{file}: {name} is {value!r}; it must be {article}")
    try:
        return ModelConfig(**fields, **format_fields, dtype="float32")
    except (UsageError, TypeError) as error:
        raise UsageError(f"{file}: {error}") from error


def shared_fields(checkpoint: PortableCheckpoint, fmt: str) -> dict[str, Any]:
    """Returns the config fields that all formats share. Raises a UsageError for fields that `fmt` cannot express."""
    config, bert = checkpoint.config, Architecture()
    for name in ARCHITECTURE_FIELDS:
        value = getattr(config, name)
        if name not in (*SHARED_FIELDS, *_FORMAT_FIELDS) and value != getattr(bert, name):
            raise UsageError(f"the format {fmt} cannot express model.{name}={value}; use the bertjax checkpoint itself")
    return {name: getattr(config, name) for name in SHARED_FIELDS} | {"vocab_size": checkpoint.num_rows}


def fit_vocabulary(
    vocabulary: Vocabulary | None, config: ModelConfig, folder: Path
) -> tuple[Vocabulary | None, ModelConfig, list[str]]:
    """Adapts vocabulary and config to a model that has more token embeddings than its vocabulary has tokens.

    The additional embeddings become padding, like those that `pad_vocab_to_multiple_of` adds. They are never predicted.

    Returns:
      The vocabulary and the config of the model, and notes for the user.

    Raises:
      UsageError: the vocabulary has more tokens than the model.
    """
    num_rows = config.vocab_size
    if (
        vocabulary
        and vocabulary.kind == WORDPIECE
        and vocabulary.size > num_rows
        and not any(vocabulary.pieces[num_rows:])
    ):
        # Blank lines at the end of the file are no tokens.
        lines = b"\n".join(vocabulary.content.split(b"\n")[:num_rows]) + b"\n"
        vocabulary = load_vocabulary(vocabulary.path, vocabulary.lower_case, lines, vocabulary.max_word_chars)
    if vocabulary is None or vocabulary.size == num_rows:
        return vocabulary, config, []
    if vocabulary.size > num_rows:
        raise UsageError(
            f"{folder}: {vocabulary.path.name} has {vocabulary.size} tokens, but the model's vocab_size is {num_rows}; "
            "use the vocabulary that the model was trained with"
        )
    multiple = config.pad_vocab_to_multiple_of
    config = dataclasses.replace(
        config, vocab_size=vocabulary.size, pad_vocab_to_multiple_of=-(-num_rows // multiple) * multiple
    )
    note = (
        f"the model has {num_rows:,} token embeddings for {vocabulary.size:,} tokens; the other "
        f"{num_rows - vocabulary.size:,} are padding and never used"
    )
    return dataclasses.replace(vocabulary, num_rows=num_rows), config, [note]


def read_vocabulary_file(
    folder: Path, lower_case: bool | None, max_word_chars: int = MAX_WORD_CHARS
) -> Vocabulary | None:
    """Reads `vocab.txt` or, if it is missing, the SentencePiece model of a folder. Returns None if both are missing."""
    files = [file for file in (folder / VOCABULARY_FILES[WORDPIECE], *sorted(folder.glob("*.model"))) if file.is_file()]
    return load_vocabulary(files[0], lower_case, max_word_chars=max_word_chars) if files else None


def read_workdir(path: AnyPath) -> PortableCheckpoint:
    """Reads a checkpoint or, for a workdir, its best checkpoint (the newest if no checkpoint has a score)."""
    checkpoint = find_checkpoint(path)
    workdir = workdir_of(checkpoint)
    config = checkpoint_model(checkpoint)
    check_portable(read_metadata(checkpoint).model, checkpoint)
    layer = read_output_layer(workdir)
    return PortableCheckpoint(
        config,
        load_params_on_host(checkpoint),
        workdir_vocabulary(workdir),
        layer.kind if layer else "",
        layer.labels if layer else (),
        embedder=read_workdir_embedder(workdir, config),
        untrained=untrained_modules(workdir),
    )


def check_portable(description: Mapping[str, Any], path: str | AnyPath) -> None:
    """Raises a UsageError if a `PortableCheckpoint` cannot express a model.

    `description` is the JSON description of the model, and `path` is its checkpoint, for the error message.
    """
    if description["kind"] not in _KINDS:
        raise UsageError(
            f"{path} has a model of kind {description['kind']!r}, which other formats cannot express; use the bertjax "
            "checkpoint itself"
        )
    check_no_feature_head(description, path)


def check_no_feature_head(description: Mapping[str, Any], path: str | AnyPath) -> None:
    """Raises a UsageError if a model has a feature head. The arguments are those of `check_portable`."""
    feature_head = FeatureHead(**(description["feature_head"] or {}))
    if feature_head.is_used:
        raise UsageError(
            f"{path} has feature_head.features={feature_head.features or '(none)'} and "
            f"feature_head.lstm_layers={feature_head.lstm_layers}, which other formats cannot express; use the bertjax "
            "checkpoint itself"
        )


def untrained_modules(workdir: AnyPath) -> tuple[str, ...]:
    """Returns the names of modules that the objective of a pre-training run has, but does not train."""
    objective = OBJECTIVES.get(read_config(workdir / CONFIG).get("data", {}).get("objective"))
    return objective.untrained_modules if objective else ()


def read_workdir_embedder(workdir: AnyPath, config: ModelConfig) -> SentenceEmbedder | None:
    """Reads the modules of sentence-transformers in a workdir, or returns None if it has none."""
    sizes = config.hidden_size, config.max_position_embeddings
    return sentence_transformers.read(workdir, *sizes, is_workdir=True)


def write_workdir(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a workdir that contains the checkpoint, for example for `--init_from`. Returns [] (no notes)."""
    if checkpoint.vocabulary is None:
        raise UsageError("the source has no vocabulary; copy vocab.txt or the SentencePiece model to its folder")
    kind = checkpoint.output_kind
    run_config = finetuning_config(OUTPUT_KINDS[kind].task) if kind else pretraining_config()
    for name, value in vars(checkpoint.config).items():
        run_config.model[name] = value
    if NEXT_SENTENCE in checkpoint.untrained:
        run_config.data.objective = "none"  # Later conversions leave the next-sentence head out, too.
    (folder / CONFIG).write_text(json.dumps(run_config.to_dict(), indent=1) + "\n")
    files = vocabulary_files(checkpoint.vocabulary)
    if kind:
        files[OUTPUT_LAYER] = OutputLayer(kind, checkpoint.labels).as_json()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if checkpoint.embedder:
        sentence_transformers.write(checkpoint.embedder, folder, checkpoint.config.hidden_size)
    save_params(epath.Path(folder), checkpoint.params, checkpoint.model_description, checkpoint.config.architecture)
    return []
