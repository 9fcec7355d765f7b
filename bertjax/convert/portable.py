"""Format-independent checkpoints in memory, and the config fields that all formats share."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

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
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import UsageError
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.model.config import ARCHITECTURE_FIELDS, Architecture, ModelConfig
from bertjax.model.heads import EncoderModel, PretrainingModel, model_kind
from bertjax.utils.io import read_json_object

_REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_INTEGER_FIELDS = (*_REQUIRED_FIELDS, "max_position_embeddings", "type_vocab_size")
# These fields have the same name in all formats, because `ModelConfig` uses the names of BertConfig.
SHARED_FIELDS = (*_INTEGER_FIELDS, "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
# Fields that `foreign_fields` does not check: formats express them differently, or the arrays do not depend on them.
_FORMAT_FIELDS = ("hidden_act", "layer_norm_eps", "pad_vocab_to_multiple_of")


@dataclasses.dataclass(frozen=True)
class PortableCheckpoint:
    """Format-independent checkpoint.

    Attributes:
      config: architecture and layout.
      params: float32 arrays by path, stacked over layers, for the models of `bertjax.model.heads`. Exports remove the
        arrays one by one to save memory.
      vocabulary: vocabulary, or None if the source has no vocabulary.
      output_kind: kind of the output layer (default: "", no output layer).
      labels: names of classes, labels or tags in the order of their ids (default: (), no labels).
      notes: messages of the import for the user.
    """

    config: ModelConfig
    params: dict[str, np.ndarray]
    vocabulary: Vocabulary | None
    output_kind: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Width of the output layer; 0 without an output layer."""
        return self.params[f"{CLASSIFIER}/bias"].shape[0] if self.output_kind else 0

    @property
    def modules(self) -> set[str]:
        """Names of top-level parameters."""
        return {path.partition("/")[0] for path in self.params}

    @property
    def model_kind(self) -> dict[str, Any]:
        """Description of the Flax module, see `bertjax.model.heads.model_kind`."""
        if self.output_kind:
            return model_kind(OUTPUT_KINDS[self.output_kind].build_model(self.config, self.num_outputs))
        is_complete = {POOLER, MASKED_LM, NEXT_SENTENCE} <= self.modules
        return model_kind(PretrainingModel(self.config) if is_complete else EncoderModel(self.config))

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters with their names in all formats."""
        return parameter_table(self.config, self.output_kind, self.num_outputs)


def parameter_table(config: ModelConfig, output_kind: str, num_outputs: int) -> list[Parameter]:
    """Lists the parameters of a BERT model. If `output_kind` is not "", they include an output layer."""
    if not output_kind:
        return bert_parameters(config)
    kind = OUTPUT_KINDS[output_kind]
    kernels = {HUGGINGFACE: kind.huggingface_kernel, TENSORFLOW: kind.tensorflow_kernel}
    return bert_parameters(config, num_outputs, {fmt: name for fmt, name in kernels.items() if name})


def read_config(file: Path) -> dict[str, Any]:
    """Reads the JSON config of a foreign checkpoint."""
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config of the checkpoint, {file}: {error}; copy it again") from error


def parse_foreign_config(
    foreign_config: dict[str, Any], file: Path, defaults: dict[str, Any], **format_fields: Any
) -> ModelConfig:
    """Builds the model config from a foreign config.

    Args:
      foreign_config: content of `file`.
      file: path of the config, for messages.
      defaults: default values of `SHARED_FIELDS` in the format.
      **format_fields: config fields that are not in `SHARED_FIELDS`.
    """
    if missing := [name for name in _REQUIRED_FIELDS if name not in foreign_config]:
        raise UsageError(f"{file} lacks {', '.join(missing)}; add the values that the checkpoint was trained with")
    fields = {name: {**defaults, **foreign_config}[name] for name in SHARED_FIELDS}
    for name, value in fields.items():
        types, article = ((int,), "an integer") if name in _INTEGER_FIELDS else ((int, float), "a number")
        if not isinstance(value, types) or isinstance(value, bool):
            raise UsageError(f"{file}: {name} is {value!r}; it must be {article}")
    try:
        return ModelConfig(**fields, **format_fields, dtype="float32")
    except (UsageError, TypeError) as error:
        raise UsageError(f"{file}: {error}") from error


def foreign_fields(config: ModelConfig, fmt: str) -> dict[str, Any]:
    """Returns the config fields that all formats share. Raises a UsageError for fields that `fmt` cannot express."""
    bert = Architecture()
    for name in ARCHITECTURE_FIELDS:
        value = getattr(config, name)
        if name not in (*SHARED_FIELDS, *_FORMAT_FIELDS) and value != getattr(bert, name):
            raise UsageError(f"the format {fmt} cannot express model.{name}={value}; use the bertjax checkpoint itself")
    return {name: getattr(config, name) for name in SHARED_FIELDS}


def check_vocabulary_size(vocabulary: Vocabulary | None, config: ModelConfig, folder: Path) -> None:
    """Raises a UsageError if the vocabulary and the model differ in size."""
    if vocabulary and vocabulary.size != config.vocab_size:
        name = vocabulary.path.name
        raise UsageError(
            f"{folder}: {name} has {vocabulary.size} tokens, but the model has {config.vocab_size}; if they belong "
            f"together, append lines such as [unused1000] to {name}"
        )
