"""Checkpoints of any format as models that can be asked."""

import logging
from pathlib import Path

from jax.sharding import Mesh

from bertjax.convert.convert import BERTJAX, detect, read
from bertjax.errors import UsageError, quoted
from bertjax.inference.trained_model import TrainedModel, placed, read_trained
from bertjax.tasks.finetuning.output_layer import OutputLayer
from bertjax.training.sharding import MESH_AXES

logger = logging.getLogger(__name__)


def load_trained(path: str | Path, mesh: Mesh | None = None) -> TrainedModel:
    """The model of a checkpoint of ours, of Hugging Face or of google-research/bert.

    Args:
      path: a workdir or a step in it; a folder; a folder, or the beginning of its files' names.
      mesh: to put it on; None is all devices, each with all parameters.

    Raises:
      UsageError: there is none, or it has no vocabulary; or `mesh` is not one with the axes of `MESH_AXES`.
      BertjaxError: it is damaged.
    """
    mesh = mesh if mesh is None else _automatic(mesh)
    if detect(str(path)) == BERTJAX:
        return read_trained(path, mesh)
    portable = read(str(path))
    for note in portable.notes:
        logger.info(note)
    if portable.vocabulary is None:
        raise UsageError(f"{path} has no vocab.txt; put the one it was trained with beside it")
    layer = OutputLayer(portable.output, portable.labels) if portable.output else None
    return placed(portable.model, portable.params, portable.vocabulary, layer, str(path), mesh)


def _automatic(mesh: Mesh) -> Mesh:
    """The same mesh with axes over which XLA spreads what it computes; those of `jax.make_mesh` are explicit ones."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != MESH_AXES:
        axes = getattr(mesh, "axis_names", mesh)
        raise UsageError(f"mesh has the axes {quoted(axes)}; give a jax.sharding.Mesh with {quoted(MESH_AXES)}")
    return Mesh(mesh.devices, MESH_AXES)
