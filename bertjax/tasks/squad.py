"""SQuAD 1.1 and 2.0: the span of a passage that answers a question (sections 4.2 and 4.3 of the paper)."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.questions import Question, make_windows, read_questions
from bertjax.data.finetuning.splitting import share_of
from bertjax.data.finetuning.tables import Reading
from bertjax.errors import UsageError
from bertjax.files import write_whole
from bertjax.metrics import squad as metrics
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits, weighting
from bertjax.tasks.finetuning.records import RECORDS, FileRecords, Record
from bertjax.tasks.finetuning.spans import Answer, best_answers, record, with_probabilities
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.objectives import classes as objectives
from bertjax.tasks.task import Batch, Objective, Outputs, Sums, Task

_VERSIONS = ("1.1", "2.0")
_LOSSES = ("start_loss", "end_loss")
_PREDICTIONS, _NBEST, _NULL_ODDS = "predictions.json", "nbest_predictions.json", "null_odds.json"


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    finetuning.check(config)
    data = config.data
    if data.version not in _VERSIONS:
        raise UsageError(f"config.data.version is {data.version!r}; known: {', '.join(_VERSIONS)}")
    for name in ("doc_stride", "max_query_len", "n_best", "max_answer_len"):
        if data[name] < 1:
            raise UsageError(f"config.data.{name} is {data[name]}; it must be at least 1")
    weighting.refuse(config, "squad has places in a passage, not classes", "label_smoothing", "data.class_weights")
    if data.max_query_len + 4 > data.seq_len:
        raise UsageError(
            f"config.data.max_query_len {data.max_query_len} leaves no room for a passage in config.data.seq_len "
            f"{data.seq_len}"
        )


has_data = finetuning.has_data


def build(config: ConfigDict, train: bool = True) -> Task:
    """The task of a config, on the files it names; without any, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files that are not of SQuAD's form.
    """
    data = config.data
    if not has_data(config):
        if train:
            raise UsageError("give SQuAD's files: --config.data.path=DIR with train-v1.1.json and dev-v1.1.json")
        return synthetic_task(config, objective)
    vocabulary = finetuning.vocabulary_of(config)
    model = finetuning.model_of(config, vocabulary)
    tokenizer = Tokenizer(vocabulary)
    readings: list[Reading] = []
    window = functools.partial(
        make_windows,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        doc_stride=data.doc_stride,
        max_query_len=data.max_query_len,
    )

    def read(name: str, training: bool) -> list[Question]:
        readings.append(Reading(str(_file(Path(data.path).expanduser(), name))))
        return read_questions(Path(readings[-1].file), readings[-1], training, answered=data.version == "1.1")

    split = splits.evaluated(data, train)
    trained, questions, windows = None, [], None
    if train or split == splits.SHARE:
        given, questions = _divided(data, read(data.train_file or f"train-v{data.version}", True), readings)
        trained = window(given, reading=readings[0]).examples if train else None
    if split in splits.SPLITS:
        questions = read(data.eval_file or f"{split}-v{data.version}", False)
    if split != splits.NONE:
        windows = window(questions, reading=readings[-1])
    answer = functools.partial(best_answers, data, questions, windows)
    return finetuning.make_task(
        config,
        objective(model),
        vocabulary,
        trained,
        windows.examples if windows else None,
        readings,
        output="squad",
        score=lambda outputs: _score(data, questions, answer(outputs)),
        baseline=lambda: _baseline(data, questions),
        best_by="f1",
        answers=[(question.id, question.answers) for question in questions],
        write=lambda outputs, folder: _write(data, questions, answer(outputs), folder),
        records=[FileRecords(RECORDS, lambda outputs, scores: _records(data, questions, answer(outputs), scores))],
        evaluated_on=readings[-1].file,
        # In 2.0 no answer is one; a threshold that is to be chosen without any is refused where it is.
        is_labelled=windows is None or data.version == "2.0" or any(question.answers for question in questions),
    )


def _divided(
    data: ConfigDict, questions: list[Question], readings: list[Reading]
) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and those that are cut off for dev, with all others on the same passage."""
    held = np.zeros(len(questions), bool)
    if data.dev_share:
        held = splits.dev_rows(data, [question.context.encode() for question in questions], readings)
    rest = np.flatnonzero(~held)
    trained = [questions[index] for index in rest[share_of(len(rest), data.train_share)]]
    dev = [questions[index] for index in np.flatnonzero(held)]
    readings[-1].used = len(trained)
    if data.dev_share:
        readings.append(splits.cut_off(data, readings[-1], len(dev)))
    return trained, dev


def _file(folder: Path, name: str) -> Path:
    # Not a glob of the name: it may be whole paths, and what a pattern means in a file's name is itself.
    named = sorted(path for path in folder.glob("*.json*") if path.name.startswith(name))
    for candidate in (Path(name), folder / name, *named):
        if candidate.is_file():
            return candidate
    raise UsageError(f"there is no {folder / name}*.json; name it with --config.data.train_file or data.eval_file")


def objective(model: ModelConfig) -> Objective:
    """The mean of the start's and the end's cross-entropy over the tokens of a row."""
    return Objective(
        TokenModel(model, 2, head_dropout=False), _LOSSES, _LOSSES, _denominators, _compute, objectives.abstract_row
    )


def _denominators(batch: Batch) -> dict[str, jax.Array]:
    # Twice the rows, so that the loss, which is the sum of both, is their mean.
    rows = 2.0 * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    return dict.fromkeys(_LOSSES, rows)


def _compute(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    logits = objectives.apply(model, params, batch, dropout_key)  # [B, L, 2]
    # Padding is out, so that how far a row is padded changes nothing.
    logits = jnp.where(batch["input_mask"][..., None] > 0, logits, jnp.finfo(jnp.float32).min)
    weights = batch["weights"]
    sums = {}
    for index, name in enumerate(_LOSSES):
        scores = logits[..., index]
        place = batch["start_positions" if index == 0 else "end_positions"]
        losses = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, place[:, None], axis=-1)[:, 0]
        sums[name] = jnp.stack([jnp.sum(losses * weights), 2.0 * jnp.sum(weights)])
    return sums, {"example": batch["example"], "start": logits[..., 0], "end": logits[..., 1]}


def _score(data: ConfigDict, questions: list[Question], answers: list[Answer]) -> dict[str, float]:
    if data.version == "1.1" and not any(question.answers for question in questions):
        return {}
    wanted = {question.id: question.answers for question in questions}
    predictions = {question.id: answer.text for question, answer in zip(questions, answers, strict=True)}
    if data.version == "1.1":
        return metrics.score_v1(wanted, predictions)
    threshold = _threshold(data, questions, answers)
    return {**metrics.score_v2(wanted, _thresholded(questions, answers, threshold)), "null_threshold": threshold}


def _baseline(data: ConfigDict, questions: list[Question]) -> dict[str, float]:
    """What looks at no question: the passage's first sentence for 1.1, no answer at all for 2.0."""
    wanted = {question.id: question.answers for question in questions}
    if data.version == "2.0":
        return metrics.score_v2(wanted, dict.fromkeys(wanted, ""))
    return metrics.score_v1(wanted, {question.id: question.context.partition(". ")[0] for question in questions})


def _threshold(data: ConfigDict, questions: list[Question], answers: list[Answer]) -> float:
    """The one the config gives, else the best for F1 on these questions."""
    if not data.choose_null_threshold:
        return data.null_threshold
    wanted = {question.id: question.answers for question in questions}
    if not any(wanted.values()):
        raise UsageError(
            "these questions have no answers to choose a threshold by; give the one that dev gave, `null_threshold` in "
            "the workdir's results.json: --config.data.choose_null_threshold=false --config.data.null_threshold=..."
        )
    predictions = {question.id: answer.text for question, answer in zip(questions, answers, strict=True)}
    odds = {question.id: answer.null_odds for question, answer in zip(questions, answers, strict=True)}
    return metrics.best_threshold(wanted, metrics.scores_v2(wanted, predictions)[1], predictions, odds)[0]


def _thresholded(questions: list[Question], answers: list[Answer], threshold: float) -> dict[str, str]:
    return {
        question.id: "" if answer.null_odds > threshold else answer.text
        for question, answer in zip(questions, answers, strict=True)
    }


def _write(data: ConfigDict, questions: list[Question], answers: list[Answer], folder: Path) -> list[Path]:
    """The official prediction file, and beside it n-best and, for 2.0, null odds."""
    pairs = list(zip(questions, answers, strict=True))
    files: dict[str, Any] = {}
    if data.version == "2.0":
        files[_PREDICTIONS] = _thresholded(questions, answers, _threshold(data, questions, answers))
        files[_NULL_ODDS] = {question.id: answer.null_odds for question, answer in pairs}
    else:
        files[_PREDICTIONS] = {question.id: answer.text for question, answer in pairs}
    files[_NBEST] = {question.id: with_probabilities(answer, data.version == "2.0") for question, answer in pairs}
    return [
        write_whole(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        for name, content in files.items()
    ]


def _records(data: ConfigDict, questions: list[Question], answers: list[Answer], scores: bool) -> Iterator[Record]:
    threshold = _threshold(data, questions, answers) if data.version == "2.0" else None
    for question, answer in zip(questions, answers, strict=True):
        yield {"id": question.id, **record(answer, threshold, scores)}
