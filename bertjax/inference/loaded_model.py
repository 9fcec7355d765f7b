"""Trained models on a device mesh, with their vocabulary, output layer and inference settings."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import make_encoder
from bertjax.model.heads import LmHead
from bertjax.model.models import EncoderModel, build_model
from bertjax.model.partitioning import resolve_layout
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.tasks.finetuning.output_layer import OutputLayer
from bertjax.tasks.squad import SquadData
from bertjax.tasks.text import TextData
from bertjax.training.step import jit_on_mesh

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class InferenceDefaults:
    """Inference settings from the fine-tuning run. Converted checkpoints use the defaults.

    Attributes:
      seq_len: maximum tokens per row (default: 0, the model's maximum).
      texts: number of texts per row, 1 or 2 (default: 0, either).
      doc_stride, max_query_len, n_best, max_answer_len: see `SquadData`.
      threshold: minimum probability of a predicted label in multi-label classification.
      null_threshold: null odds above which a question is unanswerable (default: None, every question has an answer).
    """

    seq_len: int = 0
    texts: int = 0
    doc_stride: int = SquadData.doc_stride
    max_query_len: int = SquadData.max_query_len
    n_best: int = SquadData.n_best
    max_answer_len: int = SquadData.max_answer_len
    null_threshold: float | None = None
    threshold: float = TextData.threshold


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A trained model on a device mesh.

    Attributes:
      config: architecture and layout.
      params: all parameters of the checkpoint on the mesh, float32, including heads that `model` does not use.
      vocabulary: vocabulary of the checkpoint: WordPiece, SentencePiece or a `tokenizer.json`.
      output_layer: kind and labels of the output layer, or None for a pre-trained model.
      model_description: description of the Flax module, see `bertjax.model.heads.model_description`.
      defaults: inference settings of the fine-tuning run.
      mesh: device mesh.
      path: path of the checkpoint, for error messages.
      embedder: modules of a sentence-transformers model (default: None, the model has no such modules).
      untrained: `untrained_modules` of the run's objective (default: ()).
    """

    config: ModelConfig
    params: dict[str, Any]
    vocabulary: Vocabulary
    output_layer: OutputLayer | None
    model_description: Mapping[str, Any]
    defaults: InferenceDefaults
    mesh: Mesh
    path: str
    embedder: SentenceEmbedder | None = None
    untrained: tuple[str, ...] = ()

    def row_len(self, seq_len: int | None) -> int:
        """Returns the maximum tokens per row: `seq_len` or, if it is None, the model's maximum."""
        max_len = self.config.max_row_tokens
        if seq_len is not None and not 8 <= seq_len <= max_len:
            raise UsageError(f"seq_len={seq_len} is out of range; use 8 to {max_len}")
        return max_len if seq_len is None else seq_len

    def metadata(self) -> dict[str, Any]:
        """Returns a JSON object of all settings that determine the hidden states of a text."""
        digest = hashlib.sha256()
        for path, array in sorted(flatten_dict(self.params["encoder"], sep="/").items()):
            digest.update(f"{path} {array.dtype} {array.shape}".encode() + np.asarray(array).tobytes())
        return {
            "architecture": vars(self.config.architecture),
            "dtype": resolve_layout(self.config).dtype,
            "parameters_sha256": digest.hexdigest(),
            "vocabulary_sha256": self.vocabulary.sha256,
            "lower_case": self.vocabulary.lower_case,
        }

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)

    @functools.cached_property
    def model(self) -> nn.Module:
        """Flax module of the checkpoint, or an `EncoderModel` if the checkpoint's head is unknown."""
        return build_known_model(self.model_description, self.config)

    @functools.cached_property
    def apply(self) -> Callable[[Batch], Any]:
        """Function that runs the jitted `model` on a NumPy batch and returns its outputs as NumPy arrays."""
        model = self.model
        return self._jit(lambda params, batch: model.apply({"params": params}, batch))

    @functools.cached_property
    def packed_hidden_states(self) -> Callable[[Batch], np.ndarray]:
        """Jitted function from a host batch of packed rows to the last layer's hidden states, float32 [B, L, D]."""
        names = ("input_ids", "segment_ids", "sequence_ids", "position_ids")
        encode = self._encoder()
        return self._jit(lambda params, batch: encode(params, *(batch[name] for name in names)).astype(np.float32))

    @functools.cached_property
    def masked_lm_probs(self) -> Callable[[Batch], np.ndarray]:
        """Jitted function from a host batch with `masked_lm_positions` [B, P] to token probabilities [B, P, V]."""
        encode, head = self._encoder(), LmHead(self.config)

        def masked_lm_probs(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            hidden = encode(params, batch["input_ids"], batch["segment_ids"], batch["input_mask"])  # [B, L, D]
            masked = jnp.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)
            token_table = params["encoder"]["embeddings"]["token"]
            logits: Any = head.apply({"params": params.get("masked_lm", {})}, masked, token_table)
            return jax.nn.softmax(logits)

        return self._jit(masked_lm_probs)

    def _encoder(self) -> Callable[..., jax.Array]:
        """Returns a function from parameters and the encoder's inputs to the hidden states of the last layer."""
        # Scan the layers, so that a single layer is compiled. Compilation takes most of the time to the first result.
        encoder = make_encoder(dataclasses.replace(self.config, scan_layers="true"))
        return lambda params, *inputs: encoder.apply({"params": params["encoder"]}, *inputs)[0]

    def _jit(self, function: Callable[[Any, dict[str, jax.Array]], Any]) -> Callable[[Batch], Any]:
        return jit_on_mesh(function, self.params, self.mesh)


def build_known_model(model_description: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Builds the Flax module of a checkpoint. Returns an `EncoderModel` if the kind of model is unknown."""
    try:
        return build_model(model_description, config)
    except UsageError:
        return EncoderModel(config)
