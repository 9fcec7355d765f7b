"""Fine-tuning tasks without data: what describes and times a model, and what an evaluation has instead of training."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bertjax.config.run import DEFAULT_VOCAB_SIZE
from bertjax.data.schema import synthetic_batch
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.flops import attention_flops_per_token, flops_per_token
from bertjax.tasks.finetuning.settings import FinetuningConfig
from bertjax.tasks.task import Cadence, NumpyBatch, Objective, StepCost, Task


def synthetic_task(
    settings: FinetuningConfig, objective_of: Callable[[ModelConfig], Objective], choices: int = 1, labels: int = 0
) -> Task:
    """A task without data, to describe or time a model: every row is full.

    Args:
      choices: sequences of a row.
      labels: of which a row may have any number; 0 is one class.
    """
    if not settings.model["hidden_size"]:
        raise UsageError("the config has no model size; give one, such as --config FILE:size=base")
    model = settings.model_config(settings.model["vocab_size"] or DEFAULT_VOCAB_SIZE)
    objective = objective_of(model)
    objective = dataclasses.replace(objective, model=objective.model.clone(feature_head=settings.feature_head))
    rows, length = settings.data.batch_size, settings.data.seq_len

    def work(step: int) -> StepCost:
        positions = step * rows * choices * length
        flops = positions * flops_per_token(model, length, feature_head=settings.feature_head)
        return StepCost(
            step * rows, positions, flops, positions * attention_flops_per_token(model, length, settings.feature_head)
        )

    def batch(phase: int) -> NumpyBatch:
        sizes = {"length": length, "choices": choices, "labels": labels, "pieces": model.vocab_size}
        # Whether the labels are one class or many costs nothing.
        few = {"segments": model.type_vocab_size, "classes": 2, "two": 2}
        return synthetic_batch(objective.schema, rows, **sizes, **few)

    return Task(
        objective=objective,
        schedule=schedule_without_data(settings),
        batch_sizes=(rows,),
        train_batches=no_batches,
        eval_batches=partial(no_batches, 0),
        work=work,
        synthetic_batch=batch,
        show=lambda batch, row: str({name: values[row] for name, values in batch.items()}),
    )


def no_batches(start_step: int, share: DataShard) -> Any:
    """In the place of training batches, where there is no training data."""
    raise UsageError("this task was built for evaluation; it has no training data")


def no_evaluation(share: DataShard) -> Iterator[NumpyBatch]:
    """In the place of evaluation batches, where there are none."""
    return iter(())


def no_work(step: int) -> StepCost:
    """In the place of `Task.work`, where nothing is trained."""
    return StepCost(0, 0, 0.0)


def schedule_without_data(settings: FinetuningConfig) -> Cadence:
    """Of a task that is not trained."""
    return Cadence(max(1, settings.steps), warmup_steps=0, eval_every=1, checkpoint_every=1, eval_first=False)
