"""A pre-training run of fourteen steps, and variants of its task that stop the run or change a batch."""

import copy
import os
import signal
from pathlib import Path

from bertjax.tasks.pretraining.task import PretrainingTask
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.parameters import load_params_on_host

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"
# Logging every 3 steps and saving every 4 puts most checkpoints between two log lines.
SCHEDULE = {
    "steps": 14,
    "log_every": 3,
    "eval_every": 7,
    "checkpoint_every": 4,
    "model.num_hidden_layers": 1,
    # With two heads, each of two tensor shards has one.
    "model.num_attention_heads": 2,
    "data.seq_len": 16,
    "data.eval_rows": 0,
    # In bfloat16, the default on some processors, results of different meshes would differ more.
    "model.dtype": "float32",
    "optimizer.learning_rate": 1e-2,
}


def make(corpus: Path, **changes) -> PretrainingTask:
    """Returns the task of the run; `changes` sets config fields such as `data__batch_size`."""
    experiment, *overrides = config_arguments(corpus, **changes)
    return PretrainingTask(experiment_config(experiment, overrides))


def config_arguments(corpus: Path, **changes) -> list[str]:
    """Returns the experiment of the run and the flags that override its config."""
    fields = SCHEDULE | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return [f"{EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true", *overrides]


def with_attributes(task: Task, **attributes) -> Task:
    """Returns a copy of the task with changed attributes or methods."""
    changed = copy.copy(task)
    vars(changed).update(attributes)
    return changed


def with_changed_batch(task: Task, at: int, change) -> Task:
    """Returns a task that passes the batch of step `at` (counted from 0) through `change`."""

    def train_batches(start_step, shard):
        for step, batch in enumerate(task.train_batches(start_step, shard), start_step):
            yield change(batch) if step == at else batch

    return with_attributes(task, train_batches=train_batches)


def with_signal(task: Task, at: int, number: int = signal.SIGTERM) -> Task:
    """Returns a task that sends this process a signal before step `at` (counted from 0)."""

    def send_signal(batch):
        os.kill(os.getpid(), number)
        return batch

    return with_changed_batch(task, at, send_signal)


def load_final_params(path: Path):
    """Loads the parameters of the last checkpoint of a workdir."""
    return load_params_on_host(find_checkpoint(path))
