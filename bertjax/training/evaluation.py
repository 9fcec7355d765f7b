"""A checkpoint without its training: its parameters, vocabulary and held-out metrics."""

import json
from typing import Any

import flax.linen as nn
import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Vocabulary, load_vocabulary
from bertjax.errors import UsageError
from bertjax.tasks.pretraining import VOCABULARY
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import load_params
from bertjax.training.loop import evaluate
from bertjax.training.sharding import MeshConfig, make_mesh, parameter_shardings
from bertjax.training.writers import say


def abstract_params(task: Task, config: MeshConfig = MeshConfig()) -> Any:  # noqa: B008 - frozen
    """Shapes and shardings of a task's parameters on a mesh over this machine's devices."""
    boxed = jax.eval_shape(task.model.init, jax.random.key(0), task.abstract_batch(task.phases[0]))["params"]
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        parameter_shardings(boxed, make_mesh(config)),
    )


def evaluate_checkpoint(config: ConfigDict, task: Task, checkpoint: epath.Path) -> dict[str, float]:
    """Held-out metrics of a checkpoint.

    Raises:
      UsageError: the checkpoint does not fit the config's model.
    """
    mesh = MeshConfig(**config.mesh)
    params = load_params(checkpoint, abstract_params(task, mesh), say)
    return evaluate(task, make_mesh(mesh), params)


def workdir_vocabulary(workdir: epath.Path) -> Vocabulary:
    """The vocabulary that a run keeps beside its checkpoints.

    Raises:
      UsageError: there is none.
    """
    file = workdir / VOCABULARY
    if not file.exists():
        raise UsageError(f"{workdir} has no {VOCABULARY}; give the workdir of a pre-training run, or a step inside it")
    entry = json.loads(file.read_text())
    return load_vocabulary(workdir / entry["file"], entry["lower_case"])
