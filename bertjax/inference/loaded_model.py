"""Trained models on a device mesh, with their vocabulary, output layer and inference settings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, Sharding

from bertjax.config.mesh import MeshConfig
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary, workdir_vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.heads import EncoderModel, MaskedLmHead, build_model
from bertjax.tasks.finetuning.output_layer import OutputLayer, read_output_layer
from bertjax.tasks.squad import SquadData
from bertjax.tasks.text import TextData
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_config, checkpoint_model
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.compiler_options import quick_compilation
from bertjax.training.parameters import load_all_params, nested
from bertjax.training.results import read_results
from bertjax.training.sharding import batch_shards, make_mesh, parameter_shardings, put_batch, replicated
from bertjax.training.step import in_mesh
from bertjax.training.workdir import RESULTS, is_converted


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


def read_inference_defaults(checkpoint: epath.Path) -> InferenceDefaults:
    """Reads the inference settings from `config.json` and `results.json` in the checkpoint's workdir."""
    workdir = workdir_of(checkpoint)
    output_layer = read_output_layer(workdir)
    if output_layer is None or is_converted(workdir):
        return InferenceDefaults()
    data = checkpoint_config(checkpoint, []).data
    names = [field.name for field in dataclasses.fields(InferenceDefaults)]
    settings = {name: data[name] for name in names if name in data}
    null_threshold = None
    if data.get("version") == "2.0":
        # Runs with a dev set choose the threshold on the dev set.
        results = read_results(workdir) if (workdir / RESULTS).exists() else {}
        null_threshold = float(results.get("null_threshold", data.null_threshold))
    return InferenceDefaults(**{**settings, "texts": output_layer.texts, "null_threshold": null_threshold})


Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A trained model on a device mesh.

    Attributes:
      config: architecture and layout.
      params: float32 parameters of `model` on the mesh, and possibly of heads that `model` does not use.
      vocabulary: WordPiece or SentencePiece vocabulary.
      output_layer: kind and labels of the output layer, or None for a pre-trained model.
      model_kind: description of the Flax module, see `bertjax.model.heads.model_kind`.
      defaults: inference settings of the fine-tuning run.
      mesh: device mesh.
      path: path of the checkpoint, for messages.
      pooling: `cls` or `mean` for a folder of sentence-transformers (default: "", hidden states of all tokens).
    """

    config: ModelConfig
    params: dict[str, Any]
    vocabulary: Vocabulary
    output_layer: OutputLayer | None
    model_kind: Mapping[str, Any]
    defaults: InferenceDefaults
    mesh: Mesh
    path: str
    pooling: str = ""

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)

    @functools.cached_property
    def model(self) -> nn.Module:
        """Flax module of the checkpoint, or an `EncoderModel` if the checkpoint's head is unknown."""
        return _build_known_model(self.model_kind, self.config)

    def check_modules(self, *modules: str) -> None:
        """Raises a UsageError if the checkpoint lacks any of these top-level parameters."""
        if missing := [module for module in modules if module not in self.params]:
            raise UsageError(
                f"{self.path} lacks the parameters {', '.join(missing)} and contains only "
                f"{', '.join(sorted(self.params))}; use a checkpoint that contains {', '.join(missing)}"
            )

    @functools.cached_property
    def apply(self) -> Callable[[Batch], Any]:
        """Jitted function from a host batch to the outputs of `model` on the host."""
        model = self.model
        return self.jit(lambda params, batch: model.apply({"params": params}, batch))

    @functools.cached_property
    def masked_lm_probs(self) -> Callable[[Batch], np.ndarray]:
        """Jitted function from a host batch with `masked_lm_positions` [B, P] to token probabilities [B, P, V]."""
        config = self.config

        def masked_lm_probs(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            hidden, _ = Encoder(config).apply(
                {"params": params["encoder"]}, batch["input_ids"], batch["segment_ids"], batch["input_mask"]
            )  # [B, L, D]
            masked = jnp.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)
            token_table = params["encoder"]["embeddings"]["token"]
            logits = MaskedLmHead(config).apply({"params": params["masked_lm"]}, masked, token_table)
            return jax.nn.softmax(logits)

        # Compile quickly, because compilation takes most of the time to the first result.
        return self.jit(masked_lm_probs, quick_compilation(self.mesh))

    def jit(
        self,
        function: Callable[[Any, dict[str, jax.Array]], Any],
        compiler_options: dict[str, bool | int | str] | None = None,
    ) -> Callable[[Batch], Any]:
        """Jits a function of parameters and a batch on the mesh.

        Args:
          function: function from parameters and a batch to arrays whose first axis is the batch.
          compiler_options: XLA options (default: None, JAX's defaults).

        Returns:
          A function from a host batch with any number of rows to host arrays. Rows are padded to a multiple of the
          number of data shards.
        """
        jitted = jax.jit(
            in_mesh(function, self.mesh), out_shardings=replicated(self.mesh), compiler_options=compiler_options
        )
        num_shards = batch_shards(self.mesh)

        def call(batch: Batch) -> Any:
            num_rows = len(batch["input_ids"])
            padding = -num_rows % num_shards
            padded = {
                name: np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()
            }
            outputs = jitted(self.params, put_batch(padded, self.mesh))
            return jax.tree.map(lambda array: np.asarray(array)[:num_rows], outputs)

        return call


def load_workdir(path: str | epath.Path, mesh: Mesh | None = None) -> LoadedModel:
    """Loads a bertjax checkpoint.

    Args:
      path: checkpoint or workdir. For a workdir, loads the best checkpoint (the newest if none has a score).
      mesh: device mesh (default: all devices, with replicated parameters).
    """
    checkpoint = find_checkpoint(path)
    workdir = workdir_of(checkpoint)
    mesh = mesh or make_mesh(MeshConfig())
    config = checkpoint_model(checkpoint)
    output_layer = read_output_layer(workdir)
    model_kind = read_metadata(checkpoint).model
    shardings = _Shardings(_build_known_model(model_kind, config), mesh)
    return LoadedModel(
        config,
        load_all_params(checkpoint, shardings),
        workdir_vocabulary(workdir),
        output_layer,
        model_kind,
        read_inference_defaults(checkpoint),
        mesh,
        str(path),
    )


def put_on_mesh(
    config: ModelConfig,
    params: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    output_layer: OutputLayer | None,
    *,
    model_kind: Mapping[str, Any],
    path: str,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Puts a model's parameters on a device mesh.

    `params` maps paths to float32 arrays on the host. For the other arguments see `LoadedModel`.
    """
    mesh = mesh or make_mesh(MeshConfig())
    # A single device needs no shardings, so skip tracing the model, which takes 0.3 s.
    if mesh.size == 1:
        shardings = dict.fromkeys(params, replicated(mesh))
    else:
        shardings = _Shardings(_build_known_model(model_kind, config), mesh)
    arrays = {name: jax.device_put(array, shardings[name]) for name, array in params.items()}
    return LoadedModel(config, nested(arrays), vocabulary, output_layer, model_kind, InferenceDefaults(), mesh, path)


def _build_known_model(model_kind: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    try:
        return build_model(model_kind, config)
    except UsageError:
        return EncoderModel(config)


class _Shardings(dict[str, Sharding]):
    """Parameter shardings by path. Parameters that are not part of the model are replicated."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        # Scan the layers, so that a single layer is traced. The shardings do not depend on `scan_layers`.
        model = model.clone(config=dataclasses.replace(model.config, scan_layers="true"))
        ids = jax.ShapeDtypeStruct((1, 8), np.int32)
        batch = dict.fromkeys(("input_ids", "input_mask", "segment_ids", "masked_lm_positions"), ids)
        boxed = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
        super().__init__(flatten_dict(parameter_shardings(boxed, mesh), sep="/"))
        self._modules, self._replicated = {*boxed}, replicated(mesh)

    def __missing__(self, path: str) -> Sharding:
        if path.split("/")[0] in self._modules:
            raise KeyError(path)
        return self._replicated
