"""Exact match and F1, as computed by the official SQuAD scripts `evaluate-v1.1.py` and `evaluate-v2.0.py`.

The versions differ in two cases. If prediction and answer are empty after normalization, F1 is 0 in 1.1 and 1 in 2.0.
A question without a prediction scores 0 in 1.1 and is excluded from the mean in 2.0.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(answer: str) -> str:
    """Converts a text to lower case, removes ASCII punctuation and articles, and collapses whitespace."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Returns 1 if both texts are equal after normalization, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1_v1(prediction: str, answer: str) -> float:
    """Returns the F1 score over words, or 0 if the texts share no word."""
    predicted_words, answer_words = normalize_answer(prediction).split(), normalize_answer(answer).split()
    shared = sum((Counter(predicted_words) & Counter(answer_words)).values())
    if not shared:
        return 0.0
    # Use the same order of operations as the official scripts, for bit-identical results.
    precision, recall = 1.0 * shared / len(predicted_words), 1.0 * shared / len(answer_words)
    return (2 * precision * recall) / (precision + recall)


def f1_v2(prediction: str, answer: str) -> float:
    """Returns the F1 score over words. F1 is 1 if both texts are empty, and 0 if only one is empty."""
    predicted_text, answer_text = normalize_answer(prediction), normalize_answer(answer)
    return f1_v1(prediction, answer) if predicted_text and answer_text else float(predicted_text == answer_text)


def score_v1(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """Returns `exact_match` and `f1` over all questions, in percent.

    The keys of `answers` and `predictions` are question ids.
    """
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question, references in answers.items():
        if question in predictions:
            totals["exact_match"] += _best(exact_match, predictions[question], references)
            totals["f1"] += _best(f1_v1, predictions[question], references)
    return {name: 100.0 * total / max(1, len(answers)) for name, total in totals.items()}


def _best(metric: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    return max((metric(prediction, answer) for answer in references), default=0.0)


def question_scores_v2(
    answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns exact match and F1, each from 0 to 1, of each question that has a prediction.

    Args:
      answers: reference answers by question id. Unanswerable questions have no reference answers.
      predictions: predicted texts by question id. The text "" means that a question is unanswerable.
    """
    exact, f1 = {}, {}
    for question, references in answers.items():
        if question in predictions:
            nonempty = [answer for answer in references if normalize_answer(answer)] or [""]
            exact[question] = _best(exact_match, predictions[question], nonempty)
            f1[question] = _best(f1_v2, predictions[question], nonempty)
    return exact, f1


def score_v2(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """Returns `exact_match` and `f1` over all questions that have a prediction, in percent.

    Scores with the prefix `has_answer_` cover answerable questions, those with `no_answer_` unanswerable questions.
    """
    exact, f1 = question_scores_v2(answers, predictions)
    groups = {
        "": list(exact),
        "has_answer_": [question for question in exact if answers[question]],
        "no_answer_": [question for question in exact if not answers[question]],
    }
    return {
        f"{group}{name}": 100.0 * sum(scores[question] for question in questions) / len(questions)
        for group, questions in groups.items()
        if questions
        for name, scores in (("exact_match", exact), ("f1", f1))
    }


def best_threshold(
    answers: Mapping[str, Sequence[str]],
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> float:
    """Returns the null threshold with the best score.

    A question whose null odds exceed the threshold is predicted as unanswerable. The official evaluate-v2.0.py
    returns the same threshold, unless it is best to predict every question as unanswerable. In that case
    this function returns a threshold below all null odds; evaluate-v2.0.py returns 0, which may be too high.

    Args:
      answers: reference answers by question id. Unanswerable questions have no reference answers.
      scores: exact match or F1 of the predictions by question id.
      predictions: best nonempty answers by question id.
      null_odds: score of "unanswerable" minus the score of the best answer, by question id.
    """
    current = best = float(sum(not references for references in answers.values()))
    smallest = min(null_odds.values(), default=0.0)
    threshold = smallest - 1.0 if smallest <= 0 else 0.0
    for question in sorted(null_odds, key=lambda question: null_odds[question]):
        if question not in scores:
            continue
        current += scores[question] if answers[question] else -float(bool(predictions[question]))
        if current > best:
            best, threshold = current, null_odds[question]
    return threshold
