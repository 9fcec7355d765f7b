"""What the configs of Hugging Face and of google-research/bert call the settings of a model: mostly the same."""

from pathlib import Path
from typing import Any

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ARCHITECTURE_FIELDS, Architecture, ModelConfig
from bertjax.utils.io import read_json_object

# Theirs to ours; the first five have no default.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "hidden_dropout_prob": "hidden_dropout_prob",
    "attention_probs_dropout_prob": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
}
# Each format has names of its own for these, or none that is needed.
_NAMED_APART = ("hidden_act", "layer_norm_eps", "pad_vocab_to_multiple_of")
_NEEDED = list(FIELDS)[:5]
_WHOLE = list(FIELDS)[:7]


def read_config(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      UsageError: it cannot be read, or is none.
    """
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file} ({error}), which tells the sizes of the checkpoint") from error


def model_of(config: dict[str, Any], file: Path, defaults: dict[str, Any], **ours: Any) -> ModelConfig:
    """The model that one of their configs tells.

    Args:
      config: as it was read from `file`.
      file: for messages.
      defaults: theirs, for what the config leaves out.
      **ours: settings the two name otherwise.

    Raises:
      UsageError: a size is missing or impossible.
    """
    lacking = [name for name in _NEEDED if name not in config]
    if lacking:
        raise UsageError(f"{file} does not tell {', '.join(lacking)}")
    whole = {**defaults, **config}
    for name in FIELDS:
        kind, kinds = ("a whole", (int,)) if name in _WHOLE else ("a", (int, float))
        if not isinstance(whole[name], kinds) or isinstance(whole[name], bool):
            raise UsageError(f"{file}: {name} is {whole[name]!r}; it must be {kind} number")
    try:
        return ModelConfig(**{own: whole[theirs] for theirs, own in FIELDS.items()}, **ours, dtype="float32")
    except (UsageError, TypeError) as error:
        raise UsageError(f"{file}: {error}") from error


def foreign_fields(model: ModelConfig, form: str) -> dict[str, Any]:
    """The settings of a model under the names that both have.

    Raises:
      UsageError: the architecture is one that `form` has no place for.
    """
    usual = Architecture()
    for name in ARCHITECTURE_FIELDS:
        value = getattr(model, name)
        if name not in (*FIELDS.values(), *_NAMED_APART) and value != getattr(usual, name):
            raise UsageError(f"the checkpoint has model.{name} {value}, which the format {form} has no place for")
    return {theirs: getattr(model, ours) for theirs, ours in FIELDS.items()}


def check_vocabulary(vocabulary: Vocabulary | None, model: ModelConfig, folder: Path) -> None:
    """Raises a UsageError if the vocabulary of a folder is not that of its model."""
    if vocabulary and vocabulary.size != model.vocab_size:
        name = vocabulary.path.name
        raise UsageError(
            f"{folder}: {name} has {vocabulary.size} pieces, the model {model.vocab_size}; where they do belong "
            f"together, fill {name} up with lines such as [unused1000]"
        )
