"""In-memory checkpoints, independent of file formats, and functions that read them from workdirs and write them."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from bertjax.config.load import load_saved_config
from bertjax.convert.arrays import Parameter
from bertjax.convert.families import FAMILIES
from bertjax.convert.family import CLASSIFIER, MASKED_LM, NEXT_SENTENCE, OUTPUT_KINDS, POOLER, Family
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
from bertjax.model.config import ModelConfig
from bertjax.model.feature_head import FeatureHead
from bertjax.model.models import (
    MODELS,
    EncoderModel,
    PretrainingModel,
    build_model,
    model_description,
)
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.build import parse_config
from bertjax.tasks.embedding import sentence_transformers
from bertjax.tasks.embedding.config import EmbedConfig, dense_params
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, OutputLayer, read_output_layer
from bertjax.tasks.pretraining.config import OBJECTIVES
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.parameters import load_params_on_host, save_params
from bertjax.training.workdir import CONFIG, CONVERTED, ORIGIN, read_origin
from bertjax.utils.io import AnyPath
from bertjax.utils.json_files import read_object, write_json

# Files and folders of a converted workdir. A folder that contains anything else is never overwritten.
WORKDIR_FILES = (
    ORIGIN,
    CONFIG,
    OUTPUT_LAYER,
    ENTRY,
    CHECKPOINTS,
    *sentence_transformers.FILES,
    *VOCABULARY_FILES.values(),
)


@dataclasses.dataclass(frozen=True, eq=False)
class PortableCheckpoint:
    """Checkpoint in memory, independent of its format."""

    config: ModelConfig
    # Float32 arrays, keyed by parameter path, with stacked layers. Exports to other formats remove the arrays one by
    # one to save memory.
    params: dict[str, np.ndarray]
    vocabulary: Vocabulary | None  # vocabulary, or None if the source has no vocabulary
    output_kind: str = ""  # kind of the output layer (default: "", no output layer)
    labels: tuple[str, ...] = ()  # names of classes, labels or tags in the order of their ids (default: (), no labels)
    notes: tuple[str, ...] = ()  # messages about the import, for the user
    # Modules of a sentence-transformers model (default: None, no such modules).
    embedder: SentenceEmbedder | None = None
    unexported: tuple[str, ...] = ()  # `unexported_modules` of the run's objective, which exports leave out
    activation: str = ""  # activation class of a CrossEncoder (default: "", the default of sentence-transformers)
    source: str = "-"  # folder of the original checkpoint in Hugging Face's format (default: `-`, unknown)
    # Description of the Flax module (default: None, derived from the parameters and the output layer).
    description: dict[str, Any] | None = None

    @property
    def num_outputs(self) -> int:
        """Width of the output layer (0: no output layer)."""
        return self.params[f"{CLASSIFIER}/bias"].shape[0] if self.output_kind else 0

    @property
    def modules(self) -> set[str]:
        """Names of the top-level modules, such as `encoder`."""
        always = {MASKED_LM} if not self.output_kind and not self.config.has_lm_head_params else set()
        return {path.partition("/")[0] for path in self.params} | always

    @property
    def model_description(self) -> dict[str, Any]:
        """JSON description of the Flax module, as `bertjax.model.models.model_description` returns it."""
        if self.description is not None:
            return self.description
        if self.output_kind:
            return model_description(OUTPUT_KINDS[self.output_kind].build_model(self.config, self.num_outputs))
        heads = {POOLER, MASKED_LM, NEXT_SENTENCE} if self.config.type_vocab_size > 1 else {MASKED_LM}
        is_complete = heads <= self.modules
        return model_description(PretrainingModel(self.config) if is_complete else EncoderModel(self.config))

    @property
    def model(self) -> nn.Module:
        """Flax module of the checkpoint, or an `EncoderModel` if the checkpoint's head is unknown."""
        try:
            return build_model(self.model_description, self.config)
        except UsageError:
            return EncoderModel(self.config)

    @property
    def size(self) -> str:
        config = self.config
        return f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.vocab_size:,} tokens"

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters with their names in other formats."""
        return self.family.parameters(self.config, self.output_kind, self.num_outputs, self.num_rows)

    @property
    def family(self) -> Family:
        """Model family in transformers."""
        if self.config.model_type not in FAMILIES:
            raise UsageError(
                f"Hugging Face's format does not support model.model_type={self.config.model_type}; use one of "
                f"{', '.join(FAMILIES)}"
            )
        return FAMILIES[self.config.model_type]

    @property
    def num_rows(self) -> int:
        """Number of token embeddings in other formats."""
        return (self.vocabulary.num_rows if self.vocabulary else 0) or self.config.vocab_size


def fit_vocabulary(
    vocabulary: Vocabulary | None, config: ModelConfig, folder: Path
) -> tuple[Vocabulary | None, ModelConfig, list[str]]:
    """Adapts vocabulary and config to a model that has more token embeddings than its vocabulary has tokens.

    The additional embeddings become padding, like those that `pad_vocab_to_multiple_of` adds. They are never predicted.
    Raises a UsageError if the vocabulary has more tokens than the model.

    Returns:
      The vocabulary and the config of the model, and notes for the user.
    """
    num_rows = config.vocab_size
    is_longer = vocabulary and vocabulary.kind == WORDPIECE and vocabulary.size > num_rows
    if vocabulary and is_longer and not any(vocabulary.pieces[num_rows:]):
        # Drop blank lines at the end of the file, because they are not tokens.
        lines = b"\n".join(vocabulary.content.split(b"\n")[:num_rows]) + b"\n"
        vocabulary = load_vocabulary(vocabulary.path, vocabulary.lower_case, lines, vocabulary.max_word_chars)
    if vocabulary is None or vocabulary.size == num_rows:
        return vocabulary, config, []
    if vocabulary.size > num_rows:
        raise UsageError(
            f"{folder}: the tokenizer has {vocabulary.size} tokens, but the model's vocab_size is {num_rows}; "
            "use the vocabulary that the model was trained with"
        )
    multiple = -(-num_rows // config.pad_vocab_to_multiple_of) * config.pad_vocab_to_multiple_of
    config = dataclasses.replace(config, vocab_size=vocabulary.size, pad_vocab_to_multiple_of=multiple)
    note = (
        f"the model has {num_rows:,} token embeddings for {vocabulary.size:,} tokens; the other "
        f"{num_rows - vocabulary.size:,} are padding and never used"
    )
    return dataclasses.replace(vocabulary, num_rows=num_rows), config, [note]


def read_vocabulary_file(
    folder: Path, lower_case: bool | None, max_word_chars: int = MAX_WORD_CHARS
) -> Vocabulary | None:
    """Reads a folder's `vocab.txt` or, if it is missing, its SentencePiece model. Returns None if both are missing."""
    files = [file for file in (folder / VOCABULARY_FILES[WORDPIECE], *sorted(folder.glob("*.model"))) if file.is_file()]
    return load_vocabulary(files[0], lower_case, max_word_chars=max_word_chars) if files else None


def missing_vocabulary(path: str | os.PathLike) -> UsageError:
    """Returns the error for a checkpoint folder without a tokenizer, with advice on how to complete it."""
    return UsageError(
        f"{path} has no tokenizer (vocab.txt, tokenizer.json or a SentencePiece model); copy the tokenizer files of "
        "the pre-trained model that it was fine-tuned from, or of another model with the same vocabulary"
    )


def read_workdir(path: str | os.PathLike, any_kind: bool = False) -> PortableCheckpoint:
    """Reads a checkpoint or, for a workdir, its best checkpoint (the newest if no checkpoint has a score).

    With `any_kind`, the result has a `description` and all parameters of the model. Otherwise, raises a UsageError if
    other formats do not support the model.
    """
    checkpoint = find_checkpoint(path)
    workdir, description = workdir_of(checkpoint), read_metadata(checkpoint).model
    if not any_kind:
        check_portable(description, checkpoint)
    config, params, layer = checkpoint_model(checkpoint), load_params_on_host(checkpoint), read_output_layer(workdir)
    run_config = read_object(workdir / CONFIG)
    objective = OBJECTIVES.get(run_config.get("data", {}).get("objective"))
    if run_config.get("task") == EmbedConfig.task:
        run = parse_config(load_saved_config(workdir / CONFIG))
        assert isinstance(run, EmbedConfig)
        dense = {name: params.get(f"dense/{name}") for name in ("kernel", "bias")}
        embedder = run.embedder(config.hidden_size, dense)
    else:
        embedder = sentence_transformers.read(workdir, config, is_workdir=True)
    return PortableCheckpoint(
        config,
        params if any_kind else without_embedding_layers(description, params),
        workdir_vocabulary(workdir),
        layer.kind if layer else "",
        layer.labels if layer else (),
        embedder=embedder,
        activation=layer.activation if layer else "",
        unexported=objective.unexported_modules if objective else (),
        source=(read_origin(workdir) or read_origin(workdir / CONVERTED)).get("source", "-"),
        description=description if any_kind else None,
    )


def without_embedding_layers(description: Mapping[str, Any], params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Removes the dense layer and, from an embedder, the classifier of the softmax loss."""
    dropped = {"dense"} | ({CLASSIFIER} if description["kind"] == "embedding" else set())
    return {name: array for name, array in params.items() if name.partition("/")[0] not in dropped}


def check_portable(description: Mapping[str, Any], path: str | AnyPath) -> None:
    """Raises a UsageError if a `PortableCheckpoint` cannot represent the model of the checkpoint at `path`."""
    kind, head = description["kind"], FeatureHead(**(description["feature_head"] or {}))
    problem = "" if kind in MODELS and kind != "language_model" else f"a model of kind {kind!r}"
    if head.is_used:
        problem = f"feature_head.features={head.features or '(none)'} and feature_head.lstm_layers={head.lstm_layers}"
    if problem:
        raise UsageError(f"{path} has {problem}, which other formats do not support; use the bertjax checkpoint itself")


def write_workdir(checkpoint: PortableCheckpoint, folder: Path) -> list[str]:
    """Writes a workdir that contains the checkpoint, for example for `--init_from`. Returns [] (no notes)."""
    if checkpoint.vocabulary is None:
        raise missing_vocabulary(checkpoint.source)
    kind = checkpoint.output_kind
    layer = OutputLayer(kind, checkpoint.labels, activation=checkpoint.activation) if kind else None
    run_config = finetuning_config(OUTPUT_KINDS[layer.kind].task) if layer else pretraining_config()
    for name, value in vars(checkpoint.config).items():
        run_config.model[name] = value
    if NEXT_SENTENCE in checkpoint.unexported:
        run_config.data.objective = "none"  # so that later conversions leave out the next-sentence head
    write_json(folder / CONFIG, run_config.to_dict())
    files = vocabulary_files(checkpoint.vocabulary) | ({OUTPUT_LAYER: layer.as_json()} if layer else {})
    for name, content in files.items():
        (folder / name).write_bytes(content)
    params = checkpoint.params
    if checkpoint.embedder:
        sentence_transformers.write(checkpoint.embedder, folder)
        params = {**params, **dense_params(checkpoint.embedder)}  # for further training
    save_params(epath.Path(folder), params, checkpoint.model_description, checkpoint.config.architecture)
    return []
