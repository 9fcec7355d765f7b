"""Fine-tuning tasks without data: what describes and times a model, and what an evaluation has instead of training."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.share import Share
from bertjax.errors import UsageError
from bertjax.fields import model_config
from bertjax.model.config import ModelConfig
from bertjax.model.flops import flops_per_token
from bertjax.tasks.task import NumpyBatch, Objective, Schedule, Task, Work

_DEFAULT_VOCAB_SIZE = 30522


def synthetic_task(
    config: ConfigDict, objective_of: Callable[[ModelConfig], Objective], choices: int = 1, labels: int = 0
) -> Task:
    """A task without data, to describe or time a model: every row is full.

    Args:
      choices: sequences of a row.
      labels: of which a row may have any number; 0 is one class.
    """
    if not config.model.hidden_size:
        raise UsageError("the config has no model size; give one, such as --config FILE:size=base")
    model = model_config(config, config.model.vocab_size or _DEFAULT_VOCAB_SIZE)
    objective = objective_of(model)
    rows, length = config.data.batch_size, config.data.seq_len

    def work(step: int) -> Work:
        tokens = step * rows * choices * length
        return Work(step * rows, tokens, tokens * flops_per_token(model, length))

    def batch() -> NumpyBatch:
        shape = (rows, choices, length) if choices > 1 else (rows, length)
        ids = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
        zeros = np.zeros(rows, np.int32)
        return {
            "input_ids": ids,
            "input_mask": np.ones_like(ids),
            "segment_ids": np.zeros_like(ids),
            "labels": np.zeros((rows, labels), np.int32) if labels else zeros,
            "start_positions": zeros,
            "end_positions": zeros,
            "token_labels": np.zeros_like(ids),
            "example": zeros,
            "weights": np.ones(rows, np.float32),
        }

    return Task(
        objective=objective,
        schedule=schedule_without_data(config),
        batch_sizes=(rows,),
        train_batches=no_batches,
        eval_batches=partial(no_batches, 0),
        work=work,
        synthetic_batch=batch,
    )


def no_batches(start_step: int, share: Share) -> Any:
    """In the place of training batches, where there is no training data."""
    raise UsageError("this task was built for evaluation; it has no training data")


def no_evaluation(share: Share) -> Iterator[NumpyBatch]:
    """In the place of evaluation batches, where there are none."""
    return iter(())


def no_work(step: int) -> Work:
    """In the place of `Task.work`, where nothing is trained."""
    return Work(0, 0, 0.0)


def schedule_without_data(config: ConfigDict) -> Schedule:
    """Of a task that is not trained."""
    return Schedule(max(1, config.steps), warmup_steps=0, eval_every=1, checkpoint_every=1, eval_first=False)
