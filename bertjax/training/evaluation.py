"""Evaluation: metrics and outputs of a model on all evaluation batches of a task."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import UsageError
from bertjax.metrics.report import log_reports
from bertjax.model.models import model_description
from bertjax.tasks.task import Task
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.compatibility import check_output_layer, check_vocabulary
from bertjax.training.parameters import load_params
from bertjax.training.sharding import check_batch_sizes, data_shard, make_mesh, put_batch, replicated
from bertjax.training.step import abstract_params, make_eval_step, metric_means
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)


def evaluate(
    task: Task, mesh: Mesh, params: Any, heartbeat: Callable[[], None] = lambda: None, step: int | None = None
) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
    """Evaluates parameters on a task and on its `other_tasks`. Calls `heartbeat` after each batch.

    `step` is the number of updates of the parameters, which selects the objective (default: None, `task.objective`).
    Returns the metrics of all tasks, and the outputs of each evaluation batch of `task`.
    """
    means, outputs = evaluate_batches(task, mesh, params, heartbeat, step)
    values = dict(task.final_metrics(means, outputs))
    for prefix, other in task.other_tasks.items():
        other_values, _ = evaluate(other, mesh, params, heartbeat, step)
        values |= {f"{prefix}_{name}": value for name, value in other_values.items()}
    return values, outputs


def evaluate_batches(
    task: Task, mesh: Mesh, params: Any, heartbeat: Callable[[], None] = lambda: None, step: int | None = None
) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
    """Returns the mean of each metric, including the total loss, and the outputs of each evaluation batch in order."""
    eval_step = make_eval_step(task.objective if step is None else task.objective_at(step), mesh)
    names = [metric.name for metric in task.objective.metrics]
    sums = jax.jit(lambda: {name: jnp.zeros(2) for name in names}, out_shardings=replicated(mesh))()
    outputs = []
    batches = task.eval_batches(data_shard(mesh))  # This call may set `num_eval_batches`.
    with progress_bar("evaluation", task.num_eval_batches or None, " batches", after_seconds=2) as bar:
        for batch in batches:
            sums, output = eval_step(params, put_batch(batch, mesh), sums)
            outputs.append(output)
            # Fetch the previous outputs during this batch, because all outputs together may exceed device memory.
            outputs[-2:-1] = jax.device_get(outputs[-2:-1])
            bar.update()
            heartbeat()
    return metric_means(sums, task.objective.loss_weights), jax.device_get(outputs)


def evaluate_checkpoint(task: Task, checkpoint: epath.Path) -> dict[str, float]:
    """Returns the evaluation metrics of a checkpoint, and logs the metrics of each class."""
    if task.evaluation_problem:
        raise UsageError(task.evaluation_problem)
    mesh, params = load_for_task(task, checkpoint)
    values, outputs = evaluate(task, mesh, params)
    if task.labels:
        log_reports(task.class_reports(outputs))
    task.check_data_files(wait=True)
    return values


def load_for_task(task: Task, checkpoint: epath.Path) -> tuple[Mesh, Any]:
    """Builds the mesh of a task, and loads the parameters of a checkpoint that was trained for the task."""
    mesh = make_mesh(task.config.mesh)
    check_batch_sizes((task.eval_batch_size,), mesh)
    check_vocabulary(task, checkpoint)
    order = check_output_layer(task, checkpoint)
    saved, needed = read_metadata(checkpoint).model["kind"], model_description(task.objective.model)["kind"]
    if saved != needed and not task.accepts_any_encoder:
        raise UsageError(
            f"{checkpoint} contains a model of kind {saved!r}, but the task needs {needed!r}; use another checkpoint"
        )
    for note in task.notes:
        logger.info(note)
    return mesh, load_params(checkpoint, abstract_params(task.objective, mesh), task.output_params, order)
