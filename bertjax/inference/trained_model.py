"""A trained model on its devices, with all that is needed to ask it something; and how one of our own is read."""

import collections
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
from bertjax.inference.inference_defaults import Habits, habits_of
from bertjax.model.config import LSTM, Architecture, ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.feature_head import FeatureHead
from bertjax.model.heads import EncoderModel, LanguageModel, MaskedLmHead, PretrainingModel, SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import SPANS, TAGS, OutputLayer, read_output_layer
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.compiler_options import quick_compilation
from bertjax.training.parameters import load_all_params, nested
from bertjax.training.sharding import batch_shards, make_mesh, parameter_shardings, put_batch, replicated
from bertjax.training.step import in_mesh

_CLASSIFIER = "classifier"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model.

    Attributes:
      config: its architecture and layout.
      params: float32 arrays on the mesh, in the tree that `model` takes; also what it has besides.
      vocabulary: its pieces.
      layer: its output layer; None of one that is pre-trained alone.
      habits: what it was fine-tuned on.
      mesh: its devices.
      path: where it came from, for messages.
    """

    config: ModelConfig
    params: dict[str, Any]
    vocabulary: Vocabulary
    layer: OutputLayer | None
    habits: Habits
    mesh: Mesh
    path: str

    @property
    def architecture(self) -> Architecture:
        return self.config.architecture

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)

    @property
    def model(self) -> nn.Module:
        """The Flax module of the parameters: of pre-training, of the output layer, or of the encoder alone."""
        if self.layer is not None:
            outputs = self.params[_CLASSIFIER]["bias"].shape[0]
            if self.layer.kind in (TAGS, SPANS):
                # Dropout before the layer is a matter of training.
                return TokenModel(self.config, outputs, head_dropout=False, feature_head=self.layer.feature_head)
            return SequenceModel(self.config, outputs, self.layer.feature_head)
        if {f"{direction}_lm" for direction in self.config.reads} <= self.params.keys():
            return LanguageModel(self.config)
        whole = {"masked_lm", "next_sentence", "pooler"} <= self.params.keys()
        return PretrainingModel(self.config) if whole else EncoderModel(self.config)

    def check_parts(self, *parts: str) -> None:
        """Raises a UsageError if the checkpoint lacks top-level parameters."""
        if lacking := [part for part in parts if part not in self.params]:
            there = ", ".join(sorted(self.params))
            raise UsageError(f"{self.path} has no {', '.join(lacking)}, it has {there}; give one that has it")

    @functools.cached_property
    def outputs(self) -> Callable[[dict[str, np.ndarray]], Any]:
        """A function of a batch to what `model` gives for it, compiled once for each of its shapes."""
        model = self.model
        return self.compiled(lambda params, batch: model.apply({"params": params}, batch))

    @functools.cached_property
    def masked_lm(self) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
        """A function of a batch with `masked_lm_positions` [B, P] to the pieces' probabilities there, [B, P, V]."""
        config = self.config

        def probabilities(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            hidden, _ = Encoder(config).apply(
                {"params": params["encoder"]}, batch["input_ids"], batch["segment_ids"], batch["input_mask"]
            )  # [B, L, D]
            masked = jnp.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)
            table = params["encoder"]["embeddings"]["token"]
            return jax.nn.softmax(MaskedLmHead(config).apply({"params": params["masked_lm"]}, masked, table))

        # Who fills in a word waits for the first answer more than for the following ones.
        return self.compiled(probabilities, quick_compilation(self.mesh))

    def compiled(
        self, function: Callable[[Any, dict[str, jax.Array]], Any], options: dict[str, bool | int | str] | None = None
    ) -> Callable[[dict[str, np.ndarray]], Any]:
        """A function of parameters and a batch, compiled for the mesh, as one of batches on the host to arrays there.

        A batch has any number of rows: those that are needed to split it over the mesh are added, and left out again.

        Args:
          options: of the compiler.
        """
        traced = jax.jit(in_mesh(function, self.mesh), out_shardings=replicated(self.mesh), compiler_options=options)
        shards = batch_shards(self.mesh)

        def run(batch: dict[str, np.ndarray]) -> Any:
            rows = len(batch["input_ids"])
            missing = -rows % shards
            whole = {name: np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) for name, part in batch.items()}
            return jax.tree.map(lambda part: np.asarray(part)[:rows], traced(self.params, put_batch(whole, self.mesh)))

        return run


def read_trained(path: str | epath.Path, mesh: Mesh | None = None) -> TrainedModel:
    """The model of one of our own checkpoints.

    Args:
      path: a workdir, whose best, else newest checkpoint is taken, or a step in it.
      mesh: to put it on; None is all devices, each with all parameters.

    Raises:
      UsageError: there is none.
      BertjaxError: it is damaged.
    """
    checkpoint = find_checkpoint(path)
    workdir = workdir_of(checkpoint)
    mesh = mesh or make_mesh(MeshConfig())
    config = checkpoint_model(checkpoint)
    vocabulary, layer = workdir_vocabulary(workdir), read_output_layer(workdir)
    feature_head = layer.feature_head if layer else FeatureHead()
    num_outputs = read_metadata(checkpoint).model["num_outputs"] or 0
    params = load_all_params(checkpoint, shardings_of(config, num_outputs, feature_head, mesh))
    return TrainedModel(config, params, vocabulary, layer, habits_of(checkpoint), mesh, str(path))


def placed(
    config: ModelConfig,
    params: dict[str, np.ndarray],
    vocabulary: Vocabulary,
    layer: OutputLayer | None,
    path: str,
    mesh: Mesh | None = None,
) -> TrainedModel:
    """A model whose parameters, by path, are on the host; see `TrainedModel`."""
    mesh = mesh or make_mesh(MeshConfig())
    bias = params.get(f"{_CLASSIFIER}/bias")
    shardings = shardings_of(
        config, 0 if bias is None else len(bias), layer.feature_head if layer else FeatureHead(), mesh
    )
    on_devices = {name: jax.device_put(array, shardings[name]) for name, array in params.items()}
    return TrainedModel(config, nested(on_devices), vocabulary, layer, Habits(), mesh, path)


def shardings_of(config: ModelConfig, outputs: int, feature_head: FeatureHead, mesh: Mesh) -> Mapping[str, Sharding]:
    """Where the parameters of a model go, by path: all that it may have.

    Args:
      config: of the model.
      outputs: of its output layer; 0 is none.
      feature_head: what is between that and the encoder.
      mesh: its devices.
    """
    if mesh.size == 1:
        # Tracing a model to learn that there is one place would be half of the time to a first answer.
        return collections.defaultdict(lambda: replicated(mesh))
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    batch = dict.fromkeys(("input_ids", "input_mask", "segment_ids", "masked_lm_positions"), ids)
    found: dict[str, Sharding] = {}
    models: list[nn.Module] = [SequenceModel(config, outputs, feature_head)] if outputs else []
    # What sees one side of a position may have been trained as a language model, or to fill in masks.
    models += [LanguageModel(config)] if config.reads != ("both",) else []
    models += [PretrainingModel(config)] if config.encoder != LSTM else []
    for model in models:
        boxed = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
        found |= flatten_dict(parameter_shardings(boxed, mesh), sep="/")
    return found
