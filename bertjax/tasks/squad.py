"""SQuAD 1.1 and 2.0: the span of a passage that answers a question (sections 4.2 and 4.3 of the paper)."""

import dataclasses
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
from bertjax.data.examples import in_input_order
from bertjax.data.questions import Question, Windows, make_windows, read_questions
from bertjax.data.tables import Reading
from bertjax.errors import UsageError
from bertjax.files import write_whole
from bertjax.metrics import squad as metrics
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks import finetuning, objectives
from bertjax.tasks.records import RECORDS, FileRecords, Record, short
from bertjax.tasks.task import Batch, Objective, Outputs, Sums, Task

_VERSIONS = ("1.1", "2.0")
_LOSSES = ("start_loss", "end_loss")
# More than any difference of logits, and still a number in JSON.
_ODDS_WITHOUT_SPAN = 1e9
_PREDICTIONS, _NBEST, _NULL_ODDS = "predictions.json", "nbest_predictions.json", "null_odds.json"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A span that may be the answer: its text, exactly as in the passage, and its score."""

    text: str
    score: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model says of one question.

    Attributes:
      nbest: spans, best first; may be empty.
      null_odds: score of no answer less the score of the best span.
      null_score: of no answer: start and end both at [CLS], in the window where that is least.
    """

    nbest: tuple[Candidate, ...]
    null_odds: float
    null_score: float

    @property
    def text(self) -> str:
        return self.nbest[0].text if self.nbest else ""


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
    if not 0 < data.train_share <= 1:
        raise UsageError(f"config.data.train_share is {data.train_share}; it must be above 0 and at most 1")
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
        return finetuning.synthetic_task(config, objective)
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

    def read(name: str, training: bool) -> tuple[list[Question], Windows]:
        reading = Reading(str(_file(Path(data.path).expanduser(), name or f"{data.eval_split}-v{data.version}")))
        readings.append(reading)
        questions = read_questions(Path(reading.file), reading, training, answered=data.version == "1.1")
        if training and data.train_share < 1:
            order = np.random.default_rng(0).permutation(len(questions))
            chosen = order[: max(1, int(data.train_share * len(questions)))]
            questions = [questions[index] for index in sorted(chosen)]
            reading.used = len(questions)
        return questions, window(questions, reading=reading)

    trained = read(data.train_file or f"train-v{data.version}", True)[1].examples if train else None
    questions, windows = read(data.eval_file, False)
    answer = functools.partial(best_answers, data, questions, windows)
    return finetuning.make_task(
        config,
        objective(model),
        vocabulary,
        trained,
        windows.examples,
        readings,
        output="squad",
        score=lambda outputs: _score(data, questions, answer(outputs)),
        baseline=lambda: _baseline(data, questions),
        best_by="f1",
        answers=[(question.id, question.answers) for question in questions],
        write=lambda outputs, folder: _write(data, questions, answer(outputs), folder),
        records=[FileRecords(RECORDS, lambda outputs, scores: _records(data, questions, answer(outputs), scores))],
    )


def _file(folder: Path, name: str) -> Path:
    for candidate in (Path(name), folder / name, *sorted(folder.glob(f"{name}*.json*"))):
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


def best_answers(
    data: Any, questions: list[Question], windows: Windows, outputs: list[dict[str, np.ndarray]]
) -> list[Answer]:
    """The best spans of each question over all its windows; `data` has `n_best` and `max_answer_len`."""
    logits = in_input_order(outputs, len(windows.examples))
    spans: list[list[tuple[float, int, int]]] = [[] for _ in questions]
    nulls = np.full(len(questions), np.inf)
    for index, owner in enumerate(windows.question):
        start, end = logits["start"][index], logits["end"][index]
        nulls[owner] = min(nulls[owner], float(start[0] + end[0]))
        spans[owner] += _window_spans(data, windows, index, start, end)
    answers = []
    for question, found, null in zip(questions, spans, nulls, strict=True):
        texts: dict[str, float] = {}
        for score, first, last in sorted(found, key=lambda span: -span[0]):
            texts.setdefault(question.context[first:last], score)
            if len(texts) == data.n_best:
                break
        nbest = tuple(Candidate(text, score) for text, score in texts.items())
        answers.append(Answer(nbest, float(null - nbest[0].score) if nbest else _ODDS_WITHOUT_SPAN, float(null)))
    return answers


def _window_spans(
    data: Any, windows: Windows, index: int, start: np.ndarray, end: np.ndarray
) -> list[tuple[float, int, int]]:
    """Score, first character and the one after the last of the best spans of a window."""
    characters, first = windows.spans[index], windows.first_token[index]
    start, end = (scores[first : first + len(characters)] for scores in (start, end))
    starts, ends = (np.argsort(-scores, kind="stable")[: data.n_best] for scores in (start, end))
    length = ends[None, :] - starts[:, None] + 1
    allowed = (length >= 1) & (length <= data.max_answer_len) & windows.is_best[index][starts][:, None]
    return [
        (float(start[starts[i]] + end[ends[j]]), int(characters[starts[i], 0]), int(characters[ends[j], 1]))
        for i, j in zip(*np.nonzero(allowed), strict=True)
    ]


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
    files[_NBEST] = {question.id: _with_probabilities(answer, data.version == "2.0") for question, answer in pairs}
    return [
        write_whole(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        for name, content in files.items()
    ]


def _with_probabilities(answer: Answer, with_null: bool) -> list[dict[str, Any]]:
    candidates = [*answer.nbest, *([Candidate("", answer.null_score)] if with_null else [])]
    scores = np.array([candidate.score for candidate in candidates])
    weights = np.exp(scores - scores.max()) if len(scores) else scores
    return [
        {"text": candidate.text, "probability": float(weight / weights.sum()), "score": candidate.score}
        for candidate, weight in sorted(zip(candidates, weights, strict=True), key=lambda pair: -pair[0].score)
    ]


def record(answer: Answer, null_threshold: float | None, with_scores: bool) -> Record:
    """An answer as an object of JSON; no answer is "".

    Args:
      null_threshold: of the odds above which there is no answer; None where there is always one.
      with_scores: the score is there beside the probability, which is among the n best.
    """
    has_null = null_threshold is not None
    text = "" if has_null and answer.null_odds > null_threshold else answer.text
    found = next((told for told in _with_probabilities(answer, has_null) if told["text"] == text), None)
    told: Record = {"prediction": text, "probability": short(found["probability"]) if found else 1.0}
    if has_null:
        told["null_odds"] = short(answer.null_odds)
    return {**told, "score": short(found["score"])} if found and with_scores else told


def _records(data: ConfigDict, questions: list[Question], answers: list[Answer], scores: bool) -> Iterator[Record]:
    threshold = _threshold(data, questions, answers) if data.version == "2.0" else None
    for question, answer in zip(questions, answers, strict=True):
        yield {"id": question.id, **record(answer, threshold, scores)}
