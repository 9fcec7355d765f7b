"""What all fine-tuning tasks share: examples to a `Task` (sections 3.2 and A.3 of the paper)."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.corpus.vocabulary_files import open_vocabulary, vocabulary_files
from bertjax.data.finetuning.epoch_order import TrainPlan, train_batches
from bertjax.data.finetuning.examples import Batching, Examples, eval_batches
from bertjax.data.finetuning.formatting import format_row
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError
from bertjax.metrics.report import ClassReport
from bertjax.model.config import ModelConfig
from bertjax.model.feature_head import CACHED_FEATURES
from bertjax.model.flops import attention_flops_per_token, flops_per_token
from bertjax.tasks.finetuning import selection, synthetic
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, OutputLayer
from bertjax.tasks.finetuning.records import FileRecords
from bertjax.tasks.finetuning.settings import FinetuningConfig
from bertjax.tasks.task import Cadence, Objective, StepCost, Task

# Top-level parameters that, with those of what is below it, never come from a checkpoint: all else does.
NEW_LAYER = "classifier"
_SHOWN_CLASSES = 20


def vocabulary_of(settings: FinetuningConfig) -> Vocabulary:
    """The vocabulary that settings name.

    Raises:
      UsageError: they name none, or there is none.
    """
    if not settings.data.vocabulary or not settings.model["hidden_size"]:
        raise UsageError(
            "fine-tuning starts from a checkpoint: --init_from CKPT; or, from random parameters, give a size, such as "
            "--config FILE:size=mini, and --config.data.vocabulary=vocab.txt"
        )
    return open_vocabulary(settings.data.vocabulary)


def model_of(settings: FinetuningConfig, vocabulary: Vocabulary) -> ModelConfig:
    """The model of settings, which must take rows of its length.

    Raises:
      UsageError: it does not.
    """
    settings.check_rows(settings.data.seq_len, settings.data.examples_per_row > 1)
    return settings.model_config(vocabulary.size)


def make_task(
    settings: FinetuningConfig,
    objective: Objective,
    vocabulary: Vocabulary,
    train: Examples | None,
    evaluated: Examples | None,
    readings: list[ReadStats],
    *,
    layer: OutputLayer,
    score: Callable[[list[dict[str, np.ndarray]]], dict[str, float]],
    baseline: Callable[[], dict[str, float]],
    best_by: str,
    write: Callable[[list[dict[str, np.ndarray]], Path], list[Path]],
    records: Sequence[FileRecords] = (),
    evaluated_on: str = "",
    is_labelled: bool = True,
    per_class: Callable[[list[dict[str, np.ndarray]]], dict[str, ClassReport]] | None = None,
    more_metrics: Sequence[str] = (),
    answers: Any = None,
) -> Task:
    """A task on examples in memory.

    Args:
      train: None for evaluation alone.
      evaluated: labelled or not; every one of them once, in batches of `eval_batch_size`. None where there are none, so
        that a run is not evaluated and keeps its last checkpoint.
      readings: of the files they come from.
      layer: a checkpoint of one with another `output`, or other `labels`, cannot be evaluated.
      score: outputs of all evaluation batches to metrics; {} where there are no labels.
      baseline, best_by, write, records, per_class: see `Task`; `best_by` unless the config has `select_by`.
      evaluated_on: where the examples that are evaluated come from, for a person.
      is_labelled: whether any of them has a label.
      more_metrics: names of what `score` gives, and `baseline` does not.
      answers: what `score` compares with beside the examples, in a form that JSON has.

    Raises:
      UsageError: the rows have more segments than the model, or the config asks to select by what is not measured.
    """
    data, is_evaluated = settings.data, evaluated is not None
    objective = dataclasses.replace(objective, model=objective.model.clone(feature_head=settings.feature_head))
    layer = dataclasses.replace(layer, feature_head=settings.feature_head)
    if train is not None:
        given = {*objective.metrics, "loss", *more_metrics}
        best_by = _selected_by(settings, is_evaluated, best_by, lambda: given | baseline().keys())
    segments = 1 + max(
        int(part.tokens["segment_ids"].max(initial=0)) for part in (train, evaluated) if part is not None
    )
    if segments > settings.model["type_vocab_size"]:
        raise UsageError(
            f"the rows have {segments} segments, config.model.type_vocab_size is {settings.model['type_vocab_size']}"
        )
    batching = Batching(data.batch_size, data.bucket, data.seq_len, data.examples_per_row)
    evaluation = Batching(data.eval_batch_size, data.bucket, data.seq_len)
    batch_sizes: tuple[int, ...] = (data.eval_batch_size,)
    if train is None:
        schedule = synthetic.schedule_without_data(settings)
        batches, work = synthetic.no_batches, synthetic.no_work
        usual_batch, usual_step = partial(synthetic.no_batches, share=SINGLE_SHARD), lambda: 0
    else:
        plan = TrainPlan(train, batching, settings.seed)
        schedule = _schedule(settings, plan.steps_per_epoch)
        batches = partial(train_batches, train, batching, plan, schedule.steps)
        usual_batch, usual_step = partial(_usual_batch, train, batching, plan), plan.usual_step
        work = partial(_work, plan, objective.model, train.choices)
        # Others have a multiple of the rows that the fullest have.
        batch_sizes = (data.batch_size // data.examples_per_row, *batch_sizes)
        if not is_evaluated:
            schedule = dataclasses.replace(schedule, eval_every=0)
    nothing = "nothing: the checkpoint is the last one"
    task = Task(
        objective=objective,
        schedule=schedule,
        batch_sizes=batch_sizes,
        train_batches=batches,
        eval_batches=partial(eval_batches, evaluated, evaluation) if is_evaluated else synthetic.no_evaluation,
        eval_steps=-(-len(evaluated) // evaluation.batch_size) if is_evaluated else 0,
        work=work,
        synthetic_batch=usual_batch,
        usual_step=usual_step,
        show=partial(format_row, vocabulary=vocabulary),
        score=lambda means, outputs: {**means, **score(outputs)},
        baseline=baseline,
        best_by=best_by,
        write=write,
        records=tuple(records),
        unlabelled="" if is_labelled else evaluated_on,
        per_class=per_class if is_evaluated else None,
        fresh=(NEW_LAYER, *settings.feature_head.modules),
        files={**vocabulary_files(vocabulary), OUTPUT_LAYER: layer.as_json()},
        report={
            "evaluated_on": evaluated_on if is_evaluated else nothing,
            "files": [vars(reading) for reading in readings],
        },
        notes=(
            *(reading.summary() for reading in readings),
            *_class_counts(layer.labels, train),
            *([] if is_evaluated else [f"evaluated on {nothing}"]),
        ),
        data_hash=_data_hash(train, evaluated, answers),
    )
    if not settings.feature_head.features or train is None:
        return task

    def featured(states_of: Callable[[Examples], np.ndarray]) -> Task:
        def with_states(part: Examples) -> Examples:
            return dataclasses.replace(part, tokens={**part.tokens, CACHED_FEATURES: states_of(part)})

        changed = {"train_batches": partial(train_batches, with_states(train), batching, plan, schedule.steps)}
        if is_evaluated:
            changed["eval_batches"] = partial(eval_batches, with_states(evaluated), evaluation)
        return dataclasses.replace(task, **changed)

    return dataclasses.replace(task, featured=featured)


def _usual_batch(train: Examples, batching: Batching, plan: TrainPlan, phase: int) -> dict[str, np.ndarray]:
    step = plan.usual_step()
    return next(train_batches(train, batching, plan, step + 1, step, SINGLE_SHARD))


def _selected_by(settings: FinetuningConfig, is_evaluated: bool, own: str, metrics: Callable[[], Iterable[str]]) -> str:
    """The metric a run selects by; "" where it is not evaluated."""
    if not is_evaluated:
        for name in ("select_by", "patience"):
            if value := getattr(settings, name):
                raise UsageError(
                    f"config.{name} is {value!r}, and there is no dev set to measure anything on; give one, or cut one "
                    "off the training data with --config.data.dev_share=0.1"
                )
        return ""
    if settings.select_by:
        selection.check_metric(settings.select_by, metrics())
    return settings.select_by or own


def _data_hash(train: Examples | None, evaluated: Examples | None, answers: Any) -> str:
    parts = [part.fingerprint() for part in (train, evaluated) if part is not None]
    return hashlib.sha256(json.dumps([parts, answers]).encode()).hexdigest()


def _class_counts(labels: Sequence[str], train: Examples | None) -> list[str]:
    """The classes and how many training rows each has, in a line: that of a typing mistake shows."""
    if not labels or train is None or "labels" not in train.rows or train.choices > 1:
        return []
    rows = train.rows["labels"]
    counts = rows.sum(axis=0) if rows.ndim > 1 else np.bincount(rows, minlength=len(labels))
    shown = [f"{label!r} ({count:,})" for label, count in zip(labels, counts, strict=True)]
    more = f" and {len(shown) - _SHOWN_CLASSES} more" if len(shown) > _SHOWN_CLASSES else ""
    return [f"{len(shown)} classes: {', '.join(shown[:_SHOWN_CLASSES])}{more}"]


def _schedule(settings: FinetuningConfig, steps_per_epoch: int) -> Cadence:
    steps = settings.steps or settings.epochs * steps_per_epoch
    warmup = settings.optimizer.warmup_steps
    return Cadence(
        steps=steps,
        # `num_train_steps * warmup_proportion` of google-research/bert `run_classifier.py`.
        warmup_steps=steps // 10 if warmup < 0 else warmup,
        eval_every=settings.eval_every or steps_per_epoch,
        patience=settings.patience,
        checkpoint_every=settings.checkpoint_every or steps_per_epoch,
        eval_first=False,
    )


def _work(plan: TrainPlan, model: Any, choices: int, step: int) -> StepCost:
    rows, positions, flops, attention = 0, 0, 0.0, 0.0
    for (rows_a_batch, length), steps in plan.shapes(step).items():
        rows += steps * rows_a_batch
        here = steps * rows_a_batch * choices * length
        positions += here
        flops += here * flops_per_token(model.config, length, feature_head=model.feature_head)
        attention += here * attention_flops_per_token(model.config, length, model.feature_head)
    return StepCost(rows, positions, flops, attention)


def known(labels: np.ndarray) -> np.ndarray:
    """bool [N], which examples have a label: an id of at least 0, or a number; of several labels, all or none."""
    if labels.ndim > 1:
        return (labels >= 0).all(axis=1)
    return np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0


def constant_guess(labels: np.ndarray) -> np.ndarray:
    """The most frequent label, or the mean, of the examples that have one, for every example."""
    there = labels[known(labels)]
    guess = np.mean(there) if labels.dtype.kind == "f" else np.bincount(there).argmax()
    return np.full(len(labels), guess)
