"""What all fine-tuning tasks share: examples to a `Task` (sections 3.2 and A.3 of the paper)."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Vocabulary
from bertjax.data.examples import Batching, Examples, TrainPlan, eval_batches, train_batches
from bertjax.data.share import WHOLE, Share
from bertjax.data.tables import Reading
from bertjax.errors import UsageError
from bertjax.fields import check_common, check_length, model_config
from bertjax.model.config import ModelConfig
from bertjax.planning.flops import flops_per_token
from bertjax.tasks.output_layer import OUTPUT_LAYER, output_layer
from bertjax.tasks.records import FileRecords
from bertjax.tasks.task import NumpyBatch, Objective, Schedule, Task, Work
from bertjax.tasks.vocabulary_files import open_vocabulary, vocabulary_files

# Top-level parameters that never come from a checkpoint: all else does.
NEW_LAYER = ("classifier",)
SPLITS = ("dev", "test")
_DEFAULT_VOCAB_SIZE = 30522
_SHOWN_CLASSES = 20
_ZERO_ALLOWED = ("steps", "eval_every", "checkpoint_every")


def check(config: ConfigDict) -> None:
    """Refuses values no fine-tuning run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    check_common(config, _ZERO_ALLOWED)
    if config.steps == 0 and config.epochs < 1:
        raise UsageError(f"config.epochs is {config.epochs}; it must be at least 1, or config.steps given")
    for name in ("batch_size", "eval_batch_size"):
        if config.data[name] < 1:
            raise UsageError(f"config.data.{name} is {config.data[name]}; it must be at least 1")
    Batching(config.data.batch_size, config.data.bucket, config.data.seq_len)
    if config.data.batch_size % config.accumulate:
        raise UsageError(
            f"a batch of {config.data.batch_size} rows does not split in config.accumulate={config.accumulate}"
        )
    if config.data.eval_split not in SPLITS:
        raise UsageError(f"config.data.eval_split is {config.data.eval_split!r}; known: {', '.join(SPLITS)}")
    if config.model.hidden_size:
        check_length(config, config.data.seq_len)


def has_data(config: ConfigDict) -> bool:
    """Whether a config names its data; without any, a task has synthetic batches only."""
    return bool(config.data.path)


def vocabulary_of(config: ConfigDict) -> Vocabulary:
    """The vocabulary a config names.

    Raises:
      UsageError: it names none, or there is none.
    """
    if not config.data.vocabulary or not config.model.hidden_size:
        raise UsageError(
            "fine-tuning starts from a checkpoint: --init_from CKPT; or, from random parameters, give a size, such as "
            "--config FILE:size=mini, and --config.data.vocabulary=vocab.txt"
        )
    return open_vocabulary(config.data.vocabulary)


def model_of(config: ConfigDict, vocabulary: Vocabulary) -> ModelConfig:
    """The model of a config, which must take rows of its length.

    Raises:
      UsageError: it does not.
    """
    check_length(config, config.data.seq_len)
    return model_config(config, vocabulary.size)


def make_task(
    config: ConfigDict,
    objective: Objective,
    vocabulary: Vocabulary,
    train: Examples | None,
    evaluated: Examples,
    readings: list[Reading],
    *,
    output: str,
    labels: Sequence[str] = (),
    score: Callable[[list[dict[str, np.ndarray]]], dict[str, float]],
    baseline: Callable[[], dict[str, float]],
    best_by: str,
    write: Callable[[list[dict[str, np.ndarray]], Path], list[Path]],
    records: Sequence[FileRecords] = (),
    answers: Any = None,
) -> Task:
    """A task on examples in memory.

    Args:
      train: None for evaluation alone.
      evaluated: labelled or not; every one of them once, in batches of `eval_batch_size`.
      readings: of the files they come from.
      output: what the output layer tells; a checkpoint of another `output`, or other `labels`, cannot be evaluated.
      labels: of its classes, in the order of their ids.
      score: outputs of all evaluation batches to metrics; {} where there are no labels.
      baseline, best_by, write, records: see `Task`.
      answers: what `score` compares with beside the examples, in a form that JSON has.
    """
    data = config.data
    segments = 1 + max(
        int(part.tokens["segment_ids"].max(initial=0)) for part in (train, evaluated) if part is not None
    )
    if segments > config.model.num_segments:
        raise UsageError(f"the rows have {segments} segments, config.model.num_segments is {config.model.num_segments}")
    batching = Batching(data.batch_size, data.bucket, data.seq_len)
    evaluation = Batching(data.eval_batch_size, data.bucket, data.seq_len)
    batch_sizes: tuple[int, ...] = (data.eval_batch_size,)
    if train is None:
        schedule = _schedule_without_data(config)
        batches, work = _no_batches, _no_work
    else:
        plan = TrainPlan(train, batching, config.seed)
        schedule = _schedule(config, plan.steps_per_epoch)
        batches = partial(train_batches, train, batching, plan, schedule.steps)
        work = partial(_work, plan, objective.model.config, batching.batch_size, train.choices)
        batch_sizes = (data.batch_size, *batch_sizes)
    return Task(
        objective=objective,
        schedule=schedule,
        batch_sizes=batch_sizes,
        train_batches=batches,
        eval_batches=partial(eval_batches, evaluated, evaluation),
        eval_steps=-(-len(evaluated) // evaluation.batch_size),
        work=work,
        synthetic_batch=lambda: next(batches(0, WHOLE)),
        score=lambda means, outputs: {**means, **score(outputs)},
        baseline=baseline,
        best_by=best_by,
        write=write,
        records=tuple(records),
        fresh=NEW_LAYER,
        files={**vocabulary_files(vocabulary), OUTPUT_LAYER: output_layer(output, labels)},
        report={"files": [vars(reading) for reading in readings]},
        notes=(*(reading.summary() for reading in readings), *_class_counts(labels, train)),
        data_hash=_data_hash(train, evaluated, answers),
    )


def _data_hash(train: Examples | None, evaluated: Examples, answers: Any) -> str:
    parts = [part.fingerprint() for part in (train, evaluated) if part is not None]
    return hashlib.sha256(json.dumps([parts, answers]).encode()).hexdigest()


def _class_counts(labels: Sequence[str], train: Examples | None) -> list[str]:
    """The classes and how many training rows each has, in a line: that of a typing mistake shows."""
    if not labels or train is None or "labels" not in train.rows or train.choices > 1:
        return []
    counts = np.bincount(train.rows["labels"], minlength=len(labels))
    shown = [f"{label!r} ({count:,})" for label, count in zip(labels, counts, strict=True)]
    more = f" and {len(shown) - _SHOWN_CLASSES} more" if len(shown) > _SHOWN_CLASSES else ""
    return [f"{len(shown)} classes: {', '.join(shown[:_SHOWN_CLASSES])}{more}"]


def synthetic_task(config: ConfigDict, objective_of: Callable[[ModelConfig], Objective], choices: int = 1) -> Task:
    """A task without data, to describe or time a model: every row is full."""
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
            "labels": zeros,
            "start_positions": zeros,
            "end_positions": zeros,
            "token_labels": np.zeros_like(ids),
            "example": zeros,
            "weights": np.ones(rows, np.float32),
        }

    return Task(
        objective=objective,
        schedule=_schedule_without_data(config),
        batch_sizes=(rows,),
        train_batches=_no_batches,
        eval_batches=partial(_no_batches, 0),
        work=work,
        synthetic_batch=batch,
    )


def _no_batches(start_step: int, share: Share) -> Any:
    raise UsageError("this task was built for evaluation; it has no training data")


def _no_work(step: int) -> Work:
    return Work(0, 0, 0.0)


def _schedule_without_data(config: ConfigDict) -> Schedule:
    return Schedule(max(1, config.steps), warmup_steps=0, eval_every=1, checkpoint_every=1, eval_first=False)


def _schedule(config: ConfigDict, steps_per_epoch: int) -> Schedule:
    steps = config.steps or config.epochs * steps_per_epoch
    warmup = config.optimizer.warmup_steps
    return Schedule(
        steps=steps,
        # `num_train_steps * warmup_proportion` of google-research/bert `run_classifier.py`.
        warmup_steps=steps // 10 if warmup < 0 else warmup,
        eval_every=config.eval_every or steps_per_epoch,
        checkpoint_every=config.checkpoint_every or steps_per_epoch,
        eval_first=False,
    )


def _work(plan: TrainPlan, model: ModelConfig, batch_size: int, choices: int, step: int) -> Work:
    tokens, flops = 0, 0.0
    for length, steps in plan.row_lengths(step).items():
        here = steps * batch_size * choices * length
        tokens += here
        flops += here * flops_per_token(model, length)
    return Work(step * batch_size, tokens, flops)


def are_known(labels: np.ndarray) -> bool:
    """Whether all examples have their label: an id of at least 0, or a number."""
    return bool(np.isfinite(labels).all() if labels.dtype.kind == "f" else (labels >= 0).all())


def constant_guess(labels: np.ndarray) -> np.ndarray:
    """The most frequent label, or the mean, for every example."""
    guess = np.mean(labels) if labels.dtype.kind == "f" else np.bincount(np.maximum(labels, 0)).argmax()
    return np.full(len(labels), guess)
