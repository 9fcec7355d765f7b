"""Loading of checkpoints of any format for inference."""

import logging
from pathlib import Path

from jax.sharding import Mesh

from bertjax.convert.convert import BERTJAX, detect_format, local_checkpoint, read_checkpoint
from bertjax.errors import UsageError, quoted
from bertjax.inference.loaded_model import LoadedModel, load_workdir, put_on_mesh
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
    kind = checkpoint.output_kind
    layer = OutputLayer(kind, checkpoint.labels) if kind else None
    return put_on_mesh(
        checkpoint.config,
        checkpoint.params,
        checkpoint.vocabulary,
        layer,
        model_kind=checkpoint.model_kind,
        path=str(path),
        mesh=mesh,
    )


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with `Auto` axes, which the models require. `jax.make_mesh` creates `Explicit` axes."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != MESH_AXES:
        axes = getattr(mesh, "axis_names", mesh)
        raise UsageError(f"wrong mesh axes: {quoted(axes)}; pass a jax.sharding.Mesh with axes {quoted(MESH_AXES)}")
    return Mesh(mesh.devices, MESH_AXES)
