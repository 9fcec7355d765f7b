"""From the logits of windows to answers of questions: the n best spans, and how sure a model is of none."""

import dataclasses
from typing import Any

import numpy as np

from bertjax.data.finetuning.examples import in_input_order
from bertjax.data.finetuning.questions import Question, Windows
from bertjax.tasks.finetuning.records import Record, short

# More than any difference of logits, and still a number in JSON.
_ODDS_WITHOUT_SPAN = 1e9


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


def with_probabilities(answer: Answer, with_null: bool) -> list[dict[str, Any]]:
    """The n best texts, perhaps with no answer among them as "", best first."""
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
    found = next((told for told in with_probabilities(answer, has_null) if told["text"] == text), None)
    told: Record = {"prediction": text, "probability": short(found["probability"]) if found else 1.0}
    if has_null:
        told["null_odds"] = short(answer.null_odds)
    return {**told, "score": short(found["score"])} if found and with_scores else told
