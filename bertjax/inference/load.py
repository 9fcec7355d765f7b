"""Loading of trained models onto a device mesh, with their vocabulary, output layer and inference settings."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding

from bertjax.config.load import load_saved_config
from bertjax.config.mesh import MeshConfig
from bertjax.convert import portable
from bertjax.convert.arrays import shape_differences
from bertjax.convert.convert import BERTJAX, detect_format, local_checkpoint, read_checkpoint
from bertjax.convert.family import CLASSIFIER, OUTPUT_KINDS
from bertjax.convert.portable import PortableCheckpoint
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import UsageError, quoted
from bertjax.model.encoder import ENCODER, Encoder
from bertjax.model.heads import LmHead
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.finetuning.output_layer import CLASSES, read_output_layer
from bertjax.tasks.squad import SquadData
from bertjax.tasks.text import TextData
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.results import read_results
from bertjax.training.sharding import MESH_AXES, jit_on_mesh, make_mesh, replicated, with_shardings
from bertjax.training.workdir import CONFIG, RESULTS, is_converted

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class InferenceDefaults:
    """Inference settings from the fine-tuning run. Converted checkpoints use the defaults."""

    seq_len: int = 0  # maximum tokens per row (default: 0, the model's maximum)
    texts: int = 0  # number of texts per row, 1 or 2 (default: 0, either)
    # `doc_stride`, `max_query_len`, `n_best`, `max_answer_len`: see `SquadData`.
    doc_stride: int = SquadData.doc_stride
    max_query_len: int = SquadData.max_query_len
    n_best: int = SquadData.n_best
    max_answer_len: int = SquadData.max_answer_len
    # Null odds above which a question is unanswerable (default: None, every question has an answer).
    null_threshold: float | None = None
    threshold: float = TextData.threshold  # minimum probability of a predicted label in multi-label classification


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel(PortableCheckpoint):
    """Checkpoint with its parameters on a device mesh. They may include heads that `model` does not use."""

    params: dict[str, Any]
    vocabulary: Vocabulary
    mesh: Mesh
    path: str  # path of the checkpoint, for error messages
    defaults: InferenceDefaults  # inference settings of the fine-tuning run

    @functools.cached_property
    def nested_params(self) -> dict[str, Any]:
        """Parameters as a nested dictionary, as Flax modules take them."""
        return unflatten_dict(self.params, sep="/")

    def row_len(self, seq_len: int | None) -> int:
        """Returns the maximum tokens per row: `seq_len` or, if it is None, the model's maximum."""
        max_len = self.config.max_row_tokens
        if seq_len is not None and not 8 <= seq_len <= max_len:
            raise UsageError(f"seq_len={seq_len} is out of range; use 8 to {max_len}")
        return max_len if seq_len is None else seq_len

    def metadata(self) -> dict[str, Any]:
        """Returns all settings that determine the hidden states of a text, as a JSON object."""
        digest = hashlib.sha256()
        for path, array in sorted(flatten_dict(self.nested_params[ENCODER], sep="/").items()):
            digest.update(f"{path} {array.dtype} {array.shape}".encode() + np.asarray(array).tobytes())
        return {
            "architecture": vars(self.config.architecture),
            "dtype": resolve_auto(self.config).dtype,
            "parameters_sha256": digest.hexdigest(),
            "vocabulary_sha256": self.vocabulary.sha256,
            "lower_case": self.vocabulary.lower_case,
        }

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)

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
            token_table = params[ENCODER]["embeddings"]["token"]
            logits: Any = head.apply({"params": params.get("masked_lm", {})}, masked, token_table)
            return jax.nn.softmax(logits)

        return self._jit(masked_lm_probs)

    def _encoder(self) -> Callable[..., jax.Array]:
        """Returns a function from parameters and the encoder's inputs to the hidden states of the last layer."""
        # Scan the layers, so that a single layer is compiled. Compilation takes most of the time to the first result.
        encoder = Encoder(dataclasses.replace(self.config, scan_layers="true"))
        return lambda params, *inputs: encoder.apply({"params": params[ENCODER]}, *inputs)[0]

    def _jit(self, function: Callable[[Any, dict[str, jax.Array]], Any]) -> Callable[[Batch], Any]:
        return jit_on_mesh(function, self.nested_params, self.mesh)


def load_model(
    path: str | Path, mesh: Mesh | None = None, lower_case: bool | None = None, dtype: str | None = None
) -> LoadedModel:
    """Loads a checkpoint of bertjax, Hugging Face or google-research/bert onto a device mesh.

    `bertjax.load` documents the arguments. For a workdir, loads the best checkpoint, or the newest if no checkpoint has
    a score.
    """
    if mesh is not None and mesh.axis_names != MESH_AXES:
        raise UsageError(f"wrong mesh axes: {mesh.axis_names}; use a mesh with the axes {MESH_AXES}")
    # `Mesh` creates the `Auto` axes that the models require, unlike `jax.make_mesh`.
    mesh = make_mesh(MeshConfig()) if mesh is None else Mesh(mesh.devices, MESH_AXES)
    local = local_checkpoint(path)
    if detect_format(local) == BERTJAX and lower_case is None:
        folder = find_checkpoint(local)
        checkpoint = portable.read_workdir(folder, any_kind=True)
        defaults = _read_inference_defaults(workdir_of(folder))
    else:
        checkpoint, defaults = read_checkpoint(local, lower_case), InferenceDefaults()
        for note in checkpoint.notes:
            logger.info(note)
    model = _from_portable(checkpoint, str(path), mesh, defaults)
    return model if dtype is None else dataclasses.replace(model, config=dataclasses.replace(model.config, dtype=dtype))


def _read_inference_defaults(workdir: epath.Path) -> InferenceDefaults:
    """Reads the inference settings from `config.json` and `results.json` in a workdir."""
    output_layer = read_output_layer(workdir)
    if output_layer is None or is_converted(workdir):
        return InferenceDefaults()
    data = load_saved_config(workdir / CONFIG).data
    settings = {field.name: data[field.name] for field in dataclasses.fields(InferenceDefaults) if field.name in data}
    null_threshold = None
    if data.get("version") == "2.0":
        # A run with a dev set selects the threshold on the dev set, and writes the threshold to `results.json`.
        results = read_results(workdir) if (workdir / RESULTS).exists() else {}
        null_threshold = float(results.get("null_threshold", data.null_threshold))
    return InferenceDefaults(**settings | {"texts": output_layer.texts, "null_threshold": null_threshold})


def with_params_and_output_layer(
    model: LoadedModel, params: Any, output_kind: str, labels: Sequence[str]
) -> LoadedModel:
    """Replaces parameters and output layer; see `Pretrained.replace`. An empty `output_kind` removes the layer."""
    arrays = {name: np.asarray(array, np.float32) for name, array in flatten_dict(params, sep="/").items()}
    if output_kind and output_kind not in OUTPUT_KINDS:
        raise UsageError(f"unknown output kind {output_kind!r}; use one of {', '.join(OUTPUT_KINDS)}")
    if output_kind and f"{CLASSIFIER}/bias" not in arrays:
        raise UsageError(f"params lacks {CLASSIFIER!r}, the output layer for output_kind={output_kind!r}; add it")
    # Reject models with `config.feature_head`: the new output layer would read the encoder's last hidden states instead
    # of the output of the feature head.
    portable.check_portable(model.model_description, model.path)
    names = tuple(map(str, labels))
    checkpoint = PortableCheckpoint(model.config, arrays, model.vocabulary, output_kind, names, embedder=model.embedder)
    is_named = not isinstance(labels, str) and len(names) == len({*names} - {""}) == checkpoint.num_outputs
    if names and not is_named:
        raise UsageError(f"labels={quoted(labels)}; pass {checkpoint.num_outputs} different names, one per output")
    if output_kind == CLASSES and len(names) == 1:
        raise UsageError(f"labels={quoted(labels)}, but one output means regression; omit labels")
    modules = {ENCODER} | checkpoint.modules
    if output_kind:
        modules |= {*checkpoint.family.classes[checkpoint.family.class_name(output_kind, set())].modules}
    expected = {each.path: each.stacked_shape for each in checkpoint.parameters if each.module in modules}
    if problem := shape_differences({name: array.shape for name, array in arrays.items()}, expected):
        raise UsageError(f"wrong params: {problem}; correct them, or set output_kind for a new {CLASSIFIER}")
    return _from_portable(checkpoint, model.path, model.mesh, InferenceDefaults())


def to_portable(model: LoadedModel) -> PortableCheckpoint:
    """Converts a loaded model to an in-memory checkpoint. Raises a UsageError if no format supports the model."""
    portable.check_portable(model.model_description, model.path)
    arrays = portable.without_embedding_layers(model.model_description, jax.device_get(model.params))
    return dataclasses.replace(model, params=arrays, description=None, notes=(), source="-")


def _from_portable(checkpoint: PortableCheckpoint, path: str, mesh: Mesh, defaults: InferenceDefaults) -> LoadedModel:
    if checkpoint.vocabulary is None:
        raise portable.missing_vocabulary(path)
    shardings: dict[str, Sharding] = {}
    # Tracing the model takes 0.3 s. It is needed only for the shardings of several devices, and to find unknown
    # parameters, which only checkpoints in bertjax's format may contain.
    if mesh.size > 1 or checkpoint.description is not None:
        shardings = _shardings(checkpoint.model, mesh)
        modules = {name.partition("/")[0] for name in shardings}
        for name in checkpoint.params.keys() - shardings.keys():
            if name.partition("/")[0] in modules:
                raise UsageError(f"unknown parameter {name}; use a checkpoint written by this version")
    default = replicated(mesh)
    arrays = {name: jax.device_put(array, shardings.get(name, default)) for name, array in checkpoint.params.items()}
    return LoadedModel(**vars(checkpoint) | {"params": arrays}, mesh=mesh, path=path, defaults=defaults)


def _shardings(model: nn.Module, mesh: Mesh) -> dict[str, Sharding]:
    # Scan the layers, so that a single layer is traced. The shardings do not depend on `scan_layers`.
    model = model.clone(config=dataclasses.replace(model.config, scan_layers="true"))
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    predictions = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    batch = dict.fromkeys(("input_ids", "input_mask", "segment_ids", *predictions), ids)
    boxed = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
    shapes: dict[str, Any] = flatten_dict(with_shardings(boxed, mesh), sep="/")
    return {path: shape.sharding for path, shape in shapes.items()}
