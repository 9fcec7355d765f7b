"""SQuAD 1.1 and 2.0: the span of a passage that answers a question (sections 4.2 and 4.3 of the paper)."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.fields import at_least, one_of
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.dev_split import share_of
from bertjax.data.finetuning.questions import Question, make_windows, read_questions
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.triviaqa import read_triviaqa
from bertjax.data.schema import EXAMPLE, SEQUENCE, ArraySpec
from bertjax.errors import UsageError
from bertjax.metrics import squad as metrics
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.output_layer import SPANS, OutputLayer
from bertjax.tasks.finetuning.records import RECORDS, FileRecords, Record
from bertjax.tasks.finetuning.settings import SPLITS, FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.spans import Answer, best_answers, record, with_probabilities
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.objectives.losses import apply, cross_entropy
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs, Task
from bertjax.utils.io import write_atomic

_ANSWERED, _UNANSWERED, _TRIVIA = _VERSIONS = ("1.1", "2.0", "triviaqa")
_LOSSES = ("start_loss", "end_loss")
_PLACES = ("start_positions", "end_positions")
_PREDICTIONS, _NBEST, _NULL_ODDS = "predictions.json", "nbest_predictions.json", "null_odds.json"


@dataclasses.dataclass(frozen=True)
class SquadData(FinetuningData):
    """What is read, and in which batches.

    Attributes:
      version: `1.1`; `2.0`, where a question may have no answer; or `triviaqa`, the documents of TriviaQA's Wikipedia
        part that have an answer in their first 400 tokens, which the paper trains on before SQuAD 1.1.
      train_file: empty is train-v1.1*.json in `path`, or its 2.0; of TriviaQA qa/wikipedia-train.json.
      eval_file: empty is dev-v1.1*.json, or that of the split that is evaluated.
      doc_stride: tokens from one window of a passage to the next.
      max_query_len: tokens of a question at most.
      n_best: answers kept of each question.
      max_answer_len: tokens of an answer at most.
      choose_null_threshold: of 2.0, take the threshold that is best on dev.
      null_threshold: of 2.0, no answer where its odds are above; where it is not chosen.
    """

    version: str = "1.1"
    train_file: str = ""
    eval_file: str = ""
    seq_len: int = 384
    doc_stride: int = 128
    max_query_len: int = 64
    n_best: int = 20
    max_answer_len: int = 30
    choose_null_threshold: bool = True
    null_threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "config.data", version=_VERSIONS)
        at_least(self, "config.data", doc_stride=1, max_query_len=1, n_best=1, max_answer_len=1)
        if self.max_query_len + 4 > self.seq_len:
            raise UsageError(
                f"config.data.max_query_len {self.max_query_len} leaves no room for a passage in config.data.seq_len "
                f"{self.seq_len}"
            )


@dataclasses.dataclass(frozen=True)
class Config(FinetuningConfig):
    """Settings of the task."""

    task: str = "squad"
    data: SquadData = SquadData()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse("squad has places in a passage, not classes", "label_smoothing", "data.class_weights")
        self.refuse("rows of squad are full", "data.examples_per_row")


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on the files they name; without any, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files that are not of SQuAD's form.
    """
    data = settings.data
    if not settings.has_data:
        if train:
            raise UsageError("give SQuAD's files: --config.data.path=DIR with train-v1.1.json and dev-v1.1.json")
        return synthetic_task(settings, objective)
    vocabulary = finetuning.vocabulary_of(settings)
    model = finetuning.model_of(settings, vocabulary)
    tokenizer = Tokenizer(vocabulary)
    readings: list[ReadStats] = []
    window = functools.partial(
        make_windows,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        doc_stride=data.doc_stride,
        max_query_len=data.max_query_len,
    )

    def read(name: str, training: bool) -> list[Question]:
        folder = Path(data.path).expanduser()
        readings.append(ReadStats(str(_file(folder, name, "data.train_file" if training else "data.eval_file"))))
        if data.version == _TRIVIA:
            return read_triviaqa(Path(readings[-1].file), folder, readings[-1])
        return read_questions(Path(readings[-1].file), readings[-1], training, answered=data.version == _ANSWERED)

    def named(split: str) -> str:
        return f"qa/wikipedia-{split}" if data.version == _TRIVIA else f"{split}-v{data.version}"

    split = splits.evaluated(data, train)
    trained, questions, windows = None, [], None
    if train or split == splits.SHARE:
        given, questions = _divided(data, read(data.train_file or named("train"), True), readings)
        trained = window(given, reading=readings[0]).examples if train else None
    if split in SPLITS:
        questions = read(data.eval_file or named(split), False)
    if split != splits.NONE:
        windows = window(questions, reading=readings[-1])
    answer = functools.partial(best_answers, data, questions, windows)
    return finetuning.make_task(
        settings,
        objective(model),
        vocabulary,
        trained,
        windows.examples if windows else None,
        readings,
        layer=OutputLayer(SPANS, output="squad"),
        score=lambda outputs: _score(data, questions, answer(outputs)),
        baseline=lambda: _baseline(data, questions),
        best_by="f1",
        answers=[(question.id, question.answers) for question in questions],
        write=lambda outputs, folder: _write(data, questions, answer(outputs), folder),
        records=[FileRecords(RECORDS, lambda outputs, scores: _records(data, questions, answer(outputs), scores))],
        evaluated_on=readings[-1].file,
        # In 2.0 no answer is one; a threshold that is to be chosen without any is refused where it is.
        is_labelled=windows is None or data.version == _UNANSWERED or any(question.answers for question in questions),
    )


def _divided(
    data: SquadData, questions: list[Question], readings: list[ReadStats]
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


def _file(folder: Path, name: str, field: str) -> Path:
    # Not a glob of the name: it may be whole paths, and what a pattern means in a file's name is itself.
    place = folder / name
    named = sorted(path for path in place.parent.glob("*.json*") if path.name.startswith(place.name))
    for candidate in (Path(name), place, *named):
        if candidate.is_file():
            return candidate
    raise UsageError(f"there is no {folder / name}*.json; name it with --config.{field}, or evaluate another split")


def objective(model: ModelConfig) -> Objective:
    """The mean of the start's and the end's cross-entropy over the tokens of a row."""
    schema = (*SEQUENCE, *(ArraySpec(place, (), below="length") for place in _PLACES), *EXAMPLE)
    return Objective(TokenModel(model, 2, head_dropout=False), _LOSSES, _LOSSES, _denominators, _compute, schema)


def _denominators(batch: Batch) -> dict[str, jax.Array]:
    # Twice the rows, so that the loss, which is the sum of both, is their mean.
    rows = 2.0 * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    return dict.fromkeys(_LOSSES, rows)


def _compute(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
    logits = apply(model, params, batch, dropout_key)  # [B, L, 2]
    # Padding is out, so that how far a row is padded changes nothing.
    logits = jnp.where(batch["input_mask"][..., None] > 0, logits, jnp.finfo(jnp.float32).min)
    weights = batch["weights"]
    sums = {}
    for index, (name, place) in enumerate(zip(_LOSSES, _PLACES, strict=True)):
        losses = cross_entropy(logits[..., index], batch[place])
        sums[name] = jnp.stack([jnp.sum(losses * weights), 2.0 * jnp.sum(weights)])
    return sums, {"example": batch["example"], "start": logits[..., 0], "end": logits[..., 1]}


def _score(data: SquadData, questions: list[Question], answers: list[Answer]) -> dict[str, float]:
    if data.version != _UNANSWERED and not any(question.answers for question in questions):
        return {}
    wanted = {question.id: question.answers for question in questions}
    predictions = {question.id: answer.text for question, answer in zip(questions, answers, strict=True)}
    if data.version != _UNANSWERED:
        return metrics.score_v1(wanted, predictions)
    threshold = _threshold(data, questions, answers)
    return {**metrics.score_v2(wanted, _thresholded(questions, answers, threshold)), "null_threshold": threshold}


def _baseline(data: SquadData, questions: list[Question]) -> dict[str, float]:
    """What looks at no question: the passage's first sentence for 1.1, no answer at all for 2.0."""
    wanted = {question.id: question.answers for question in questions}
    if data.version == _UNANSWERED:
        return metrics.score_v2(wanted, dict.fromkeys(wanted, ""))
    return metrics.score_v1(wanted, {question.id: question.context.partition(". ")[0] for question in questions})


def _threshold(data: SquadData, questions: list[Question], answers: list[Answer]) -> float:
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
    return _rounded_up(metrics.best_threshold(wanted, metrics.scores_v2(wanted, predictions)[1], predictions, odds)[0])


def _rounded_up(threshold: float) -> float:
    """The next number of seven digits, all that `results.json` has: the question whose odds it is stays below it."""
    if not threshold:
        return threshold
    unit = 10.0 ** (math.floor(math.log10(abs(threshold))) - 6)
    return float(f"{math.ceil(threshold / unit) * unit:.7g}")


def _thresholded(questions: list[Question], answers: list[Answer], threshold: float) -> dict[str, str]:
    return {
        question.id: "" if answer.null_odds > threshold else answer.text
        for question, answer in zip(questions, answers, strict=True)
    }


def _write(data: SquadData, questions: list[Question], answers: list[Answer], folder: Path) -> list[Path]:
    """The official prediction file, and beside it n-best and, for 2.0, null odds."""
    pairs = list(zip(questions, answers, strict=True))
    files: dict[str, Any] = {}
    if data.version == _UNANSWERED:
        files[_PREDICTIONS] = _thresholded(questions, answers, _threshold(data, questions, answers))
        files[_NULL_ODDS] = {question.id: answer.null_odds for question, answer in pairs}
    else:
        files[_PREDICTIONS] = {question.id: answer.text for question, answer in pairs}
    files[_NBEST] = {question.id: with_probabilities(answer, data.version == _UNANSWERED) for question, answer in pairs}
    return [
        write_atomic(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        for name, content in files.items()
    ]


def _records(data: SquadData, questions: list[Question], answers: list[Answer], scores: bool) -> Iterator[Record]:
    threshold = _threshold(data, questions, answers) if data.version == _UNANSWERED else None
    for question, answer in zip(questions, answers, strict=True):
        yield {"id": question.id, **record(answer, threshold, scores)}
