"""A run of fourteen steps, whole or disturbed."""

import copy
import os
import signal
from pathlib import Path

import jax

from bertjax.config.load import load_config
from bertjax.tasks import pretraining
from bertjax.tasks.build import parse_config
from bertjax.tasks.task import Task
from bertjax.training.evaluation import abstract_params
from bertjax.training.parameters import load_params

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"
# Logged every 3 steps and saved every 4: most checkpoints fall between two log lines.
SCHEDULE = {
    "steps": 14,
    "log_every": 3,
    "eval_every": 7,
    "checkpoint_every": 4,
    "model.num_hidden_layers": 1,
    "data.seq_len": 16,
    "data.eval_rows": 0,
    "optimizer.learning_rate": 1e-2,
}


def make(corpus: Path, **changes):
    fields = SCHEDULE | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    settings = parse_config(load_config(f"{EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true", overrides))
    return settings, pretraining.Task(settings)


def with_attributes(task: Task, **attributes) -> Task:
    """Returns a copy of the task with other attributes or methods."""
    changed = copy.copy(task)
    vars(changed).update(attributes)
    return changed


def spoiled(task: Task, at: int, spoil) -> Task:
    """The task with the batch of step `at` (counted from 0) passed through `spoil`."""

    def batches(start, share):
        for step, batch in enumerate(task.train_batches(start, share), start):
            yield spoil(batch) if step == at else batch

    return with_attributes(task, train_batches=batches)


def stopped(task: Task, at: int, number: int = signal.SIGTERM) -> Task:
    """The task in a process that is asked to stop while step `at` is prepared."""

    def send(batch):
        os.kill(os.getpid(), number)
        return batch

    return spoiled(task, at, send)


def final_params(path: Path, config, task):
    return jax.device_get(load_params(path, abstract_params(task.objective)))
