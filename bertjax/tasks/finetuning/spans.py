"""Answers to questions: the n best spans and the null (no-answer) score, from the logits of passage windows."""

import dataclasses

import numpy as np

from bertjax.data.finetuning.batches import in_input_order
from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.windows import Window
from bertjax.tasks.records import Record, round_digits, softmax

# Fields of a record that are written only with `--logits`.
LOGIT_FIELDS = ("score",)
# `null_odds` of a question without candidate spans: larger than any score difference and, unlike inf, valid JSON.
_ODDS_WITHOUT_SPAN = 1e9


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Candidate answer with its score and character offsets (end exclusive). The null answer, "", has no offsets."""

    text: str
    score: float
    start: int | None = None
    end: int | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Prediction for one question."""

    nbest: tuple[Candidate, ...]  # spans with the highest scores, best first. May be empty.
    null_score: float  # lowest score of the null answer (start and end at [CLS]) among the windows

    @property
    def null_odds(self) -> float:
        """Null score minus the score of the best span."""
        return self.null_score - self.nbest[0].score if self.nbest else _ODDS_WITHOUT_SPAN

    def best(self, null_threshold: float | None) -> Candidate:
        """Returns the best span, or the null answer if the null odds exceed the threshold or there are no spans.

        Without a threshold (None), any span is better than the null answer.
        """
        is_null = not self.nbest or (null_threshold is not None and self.null_odds > null_threshold)
        return Candidate("", self.null_score) if is_null else self.nbest[0]


def best_answers(
    questions: list[Question],
    windows: list[Window],
    outputs: list[dict[str, np.ndarray]],
    n_best: int,
    max_answer_len: int,
) -> dict[str, Answer]:
    """Computes answers, keyed by question id, from the `start` and `end` logits of all evaluation batches."""
    logits = in_input_order(outputs, len(windows))
    spans: list[list[tuple[float, int, int]]] = [[] for _ in questions]
    null_scores = np.full(len(questions), np.inf)
    for window, start, end in zip(windows, logits["start"], logits["end"], strict=True):
        null_scores[window.question] = min(null_scores[window.question], float(start[0] + end[0]))
        spans[window.question] += _window_spans(window, start, end, n_best, max_answer_len)
    answers = {}
    for question, candidates, null_score in zip(questions, spans, null_scores, strict=True):
        best_of_text: dict[str, Candidate] = {}
        for score, first, last in sorted(candidates, key=lambda span: -span[0]):
            text = question.context[first:last]
            best_of_text.setdefault(text, Candidate(text, score, first, last))
            if len(best_of_text) == n_best:
                break
        answers[question.id] = Answer(tuple(best_of_text.values()), float(null_score))
    return answers


def _window_spans(
    window: Window, start: np.ndarray, end: np.ndarray, n_best: int, max_answer_len: int
) -> list[tuple[float, int, int]]:
    """Returns (score, start, end) of each candidate span of a window, with start and end as character offsets.

    A candidate has 1 to `max_answer_len` tokens. Its first token has one of the `n_best` highest start logits, and its
    last token one of the `n_best` highest end logits. If several windows contain the first token, the span is a
    candidate only in the window with the most context around this token.
    """
    characters, first = window.char_spans, window.passage_start
    start, end = (scores[first : first + len(characters)] for scores in (start, end))
    starts, ends = (np.argsort(-scores, kind="stable")[:n_best] for scores in (start, end))
    length = ends[None, :] - starts[:, None] + 1
    allowed = (length >= 1) & (length <= max_answer_len) & window.is_max_context[starts][:, None]
    return [
        (float(start[starts[i]] + end[ends[j]]), int(characters[starts[i], 0]), int(characters[ends[j], 1]))
        for i, j in zip(*np.nonzero(allowed), strict=True)
    ]


def nbest_with_probabilities(answer: Answer, include_null: bool) -> dict[Candidate, float]:
    """Returns the probability of each of the n best answers, best first. `include_null` adds the null answer."""
    candidates = [*answer.nbest, *([Candidate("", answer.null_score)] if include_null else [])]
    candidates.sort(key=lambda candidate: -candidate.score)
    probabilities = softmax(np.array([candidate.score for candidate in candidates])) if candidates else ()
    return dict(zip(candidates, map(float, probabilities), strict=True))


def answer_record(answer: Answer, null_threshold: float | None) -> Record:
    """Returns the prediction record of an answer: its text, and the character offsets of start and end (exclusive).

    The null answer has the text "" and the offsets None.
    """
    span, has_null = answer.best(null_threshold), null_threshold is not None
    probabilities = nbest_with_probabilities(answer, has_null)
    probability = round_digits(probabilities.get(span, 1.0))
    record: Record = {"prediction": span.text, "start": span.start, "end": span.end, "probability": probability}
    if has_null:
        record["null_odds"] = round_digits(answer.null_odds)
    return {**record, "score": round_digits(span.score)} if probabilities else record
