"""Loading of checkpoints of any format for inference."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from bertjax.convert import huggingface
from bertjax.convert.convert import BERTJAX, detect_format, local_checkpoint, read_checkpoint
from bertjax.convert.names import CLASSIFIER
from bertjax.convert.portable import PortableCheckpoint
from bertjax.errors import UsageError, listed, quoted
from bertjax.inference.loaded_model import LoadedModel, load_workdir, put_on_mesh
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.tasks.finetuning.output_layer import OutputLayer
from bertjax.training.sharding import MESH_AXES

logger = logging.getLogger(__name__)


def load_model(path: str | Path, mesh: Mesh | None = None) -> LoadedModel:
    """Loads a checkpoint of bertjax, Hugging Face or google-research/bert onto a device mesh.

    Args:
      path: workdir, checkpoint in a workdir, Hugging Face folder, TensorFlow checkpoint or its folder, or
        `hf:ORG/NAME[@REVISION]`.
      mesh: device mesh with the axes `MESH_AXES` (default: all devices, with replicated parameters).

    Raises:
      UsageError: `path` contains no checkpoint or no vocabulary, or the mesh has wrong axes.
      BertjaxError: the checkpoint is damaged.
    """
    if mesh is not None:
        mesh = _with_auto_axes(mesh)
    local = local_checkpoint(path)
    if detect_format(local) == BERTJAX:
        return load_workdir(local, mesh)
    checkpoint = read_checkpoint(local)
    for note in checkpoint.notes:
        logger.info(note)
    if checkpoint.vocabulary is None:
        raise UsageError(f"{path} lacks vocab.txt; copy the model's vocabulary to this folder")
    kind, pooling = checkpoint.output_kind, huggingface.read_pooling(Path(local).expanduser())
    layer = OutputLayer(kind, checkpoint.labels) if kind else None
    loaded = put_on_mesh(
        checkpoint.config,
        checkpoint.params,
        checkpoint.vocabulary,
        layer,
        model_kind=checkpoint.model_kind,
        path=str(path),
        mesh=mesh,
    )
    return dataclasses.replace(loaded, pooling=pooling)


def replace_params(model: LoadedModel, params: Any, output_kind: str, labels: Sequence[str]) -> LoadedModel:
    """Returns a model with other parameters, on the same mesh.

    Args:
      model: model that supplies config and vocabulary.
      params: arrays by module, nested.
      output_kind: kind of output layer ("": none).
      labels: names of the outputs.

    Raises:
      UsageError: the parameters do not fit the config and the kind of output layer.
    """
    arrays = {name: np.asarray(array, np.float32) for name, array in flatten_dict(params, sep="/").items()}
    if output_kind and output_kind not in OUTPUT_KINDS:
        raise UsageError(f"unknown output kind {output_kind!r}; use one of {', '.join(OUTPUT_KINDS)}")
    if output_kind and f"{CLASSIFIER}/bias" not in arrays:
        raise UsageError(f"params lacks {CLASSIFIER!r}, which a model for {output_kind} needs")
    checkpoint = PortableCheckpoint(model.config, arrays, model.vocabulary, output_kind, tuple(labels))
    if labels and len(labels) != checkpoint.num_outputs:
        raise UsageError(f"labels has {len(labels)} names, but the output layer has {checkpoint.num_outputs} outputs")
    layers = (model.config.num_hidden_layers,)
    expected = {each.path: (layers if each.is_layered else ()) + each.shape for each in checkpoint.parameters}
    if unknown := sorted(arrays.keys() - expected.keys()):
        raise UsageError(f"params contains unknown parameters: {listed(unknown)}; remove them")
    for name, array in arrays.items():
        if array.shape != expected[name]:
            raise UsageError(f"params has shape {array.shape} for {name}, but the model has {expected[name]}")
    modules = {name.split("/")[0] for name in arrays}
    if missing := sorted(name for name in expected.keys() - arrays.keys() if name.split("/")[0] in modules):
        raise UsageError(f"params lacks {listed(missing)}; add them")
    layer = OutputLayer(output_kind, tuple(labels)) if output_kind else None
    return put_on_mesh(
        model.config,
        arrays,
        model.vocabulary,
        layer,
        model_kind=checkpoint.model_kind,
        path=model.path,
        mesh=model.mesh,
    )


def portable(model: LoadedModel) -> PortableCheckpoint:
    """Returns a loaded model as a checkpoint in memory. Raises a UsageError for kinds that no format can express."""
    layer = model.output_layer
    arrays = {name: np.asarray(array) for name, array in flatten_dict(jax.device_get(model.params), sep="/").items()}
    checkpoint = PortableCheckpoint(
        model.config, arrays, model.vocabulary, layer.kind if layer else "", layer.labels if layer else ()
    )
    if checkpoint.model_kind["kind"] != model.model_kind["kind"]:
        raise UsageError(f"a model of kind {model.model_kind['kind']!r} cannot be saved; copy its workdir instead")
    return checkpoint


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with `Auto` axes, which the models require. `jax.make_mesh` creates `Explicit` axes."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != MESH_AXES:
        axes = getattr(mesh, "axis_names", mesh)
        raise UsageError(f"wrong mesh axes: {quoted(axes)}; pass a jax.sharding.Mesh with axes {quoted(MESH_AXES)}")
    return Mesh(mesh.devices, MESH_AXES)
