"""A checkpoint without its training: its parameters, vocabulary and held-out metrics."""

import logging
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from bertjax.config.mesh import MeshConfig
from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError
from bertjax.tasks.task import Objective, Task
from bertjax.training.init_from import check_output_layer, check_vocabulary
from bertjax.training.parameters import load_params
from bertjax.training.sharding import make_mesh, parameter_shardings
from bertjax.training.train import check_batches, check_labelled, predict

logger = logging.getLogger(__name__)


def abstract_params(objective: Objective, config: MeshConfig = MeshConfig()) -> Any:  # noqa: B008 - frozen
    """Shapes and shardings of a model's parameters on a mesh over this machine's devices."""
    boxed = jax.eval_shape(objective.initial, jax.random.key(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        parameter_shardings(boxed, make_mesh(config)),
    )


def evaluate_checkpoint(settings: RunConfig, task: Task, checkpoint: epath.Path) -> dict[str, float]:
    """Held-out metrics of a checkpoint; what became of each class is printed.

    Raises:
      UsageError: the checkpoint does not fit the settings' model, or the examples have no labels.
      BertjaxError: the loss is not finite.
    """
    check_labelled(task)
    mesh, params = mesh_and_params(settings, task, checkpoint)
    means, outputs = predict(task, mesh, params)
    for suffix, report in (task.per_class(outputs) if task.per_class else {}).items():
        logger.info(f"by class{suffix.replace('_', ' ')}:\n{report.text()}")
    values = task.score(means, outputs)
    task.check_data(0)
    if not math.isfinite(values.get("loss", 0.0)):
        raise BertjaxError(f"the held-out loss of {checkpoint} is not finite; try an older checkpoint beside it")
    return values


def mesh_and_params(settings: RunConfig, task: Task, checkpoint: epath.Path) -> tuple[Mesh, Any]:
    """A checkpoint's parameters on the devices, for the task that it was trained for.

    Raises:
      UsageError: the checkpoint does not fit the settings' model, or is of another task.
    """
    mesh = make_mesh(settings.mesh)
    check_vocabulary(task, checkpoint)
    order = check_output_layer(task, checkpoint)
    for note in task.notes:
        logger.info(note)
    check_batches(task, mesh, 1)
    params = load_params(checkpoint, abstract_params(task.objective, settings.mesh))
    if order:
        logger.info(f"outputs are put in the order of the labels: {order}")
        params = {
            **params,
            **{name: jax.tree.map(lambda x: x[..., jnp.array(order)], params[name]) for name in task.fresh},
        }
    return mesh, params
