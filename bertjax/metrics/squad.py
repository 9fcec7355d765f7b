"""Exact match and F1 as the official SQuAD scripts define them, `evaluate-v1.1.py` and `evaluate-v2.0.py`.

The two differ where an answer is empty, or nothing but articles and punctuation: 1.1 gives F1 0, even if both sides
are; 2.0 gives 1 if both are. A question without a prediction scores 0 in 1.1, and is left out of the mean in 2.0.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lower case, ASCII punctuation and articles taken out, white space single."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are the same once normalised."""
    return float(normalized(prediction) == normalized(answer))


def f1_v1(prediction: str, answer: str) -> float:
    """F1 over words; 0 where they share none."""
    predicted, wanted = normalized(prediction).split(), normalized(answer).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    # Not 2 * shared / (both lengths): equal to the scripts' result to the last bit.
    precision, recall = 1.0 * shared / len(predicted), 1.0 * shared / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def f1_v2(prediction: str, answer: str) -> float:
    """F1 over words; where one side has none, 1 if neither has."""
    predicted, wanted = normalized(prediction), normalized(answer)
    return f1_v1(prediction, answer) if predicted and wanted else float(predicted == wanted)


def score_v1(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent, over all questions.

    Args:
      answers: question id to the answers people gave.
      predictions: question id to text.
    """
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question, wanted in answers.items():
        if question in predictions:
            totals["exact_match"] += _best(exact_match, predictions[question], wanted)
            totals["f1"] += _best(f1_v1, predictions[question], wanted)
    return {name: 100.0 * total / max(1, len(answers)) for name, total in totals.items()}


def _best(measure: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    return max((measure(prediction, answer) for answer in answers), default=0.0)


def scores_v2(
    answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1 of each question that has a prediction.

    Args:
      answers: question id to the answers people gave; none for a question that has no answer.
      predictions: question id to text, "" for no answer.
    """
    exact, f1 = {}, {}
    for question, given in answers.items():
        if question in predictions:
            wanted = [answer for answer in given if normalized(answer)] or [""]
            exact[question] = _best(exact_match, predictions[question], wanted)
            f1[question] = _best(f1_v2, predictions[question], wanted)
    return exact, f1


def score_v2(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent, over all questions and over those with and without an answer."""
    exact, f1 = scores_v2(answers, predictions)
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
) -> tuple[float, float]:
    """The threshold above which a question is given no answer, and the score in percent it reaches.

    As in the official evaluate-v2.0.py, but where no answer to any question is best: that takes 0 for it, which is
    enough for probabilities alone.

    Args:
      answers: question id to the answers people gave; none for a question that has no answer.
      scores: exact match or F1 of the predictions, by question.
      predictions: the best text that is an answer, by question.
      null_odds: by how much no answer is preferred to that text, by question.
    """
    current = best = float(sum(not given for given in answers.values()))
    smallest = min(null_odds.values(), default=0.0)
    threshold = smallest - 1.0 if smallest <= 0 else 0.0
    for question in sorted(null_odds, key=lambda question: null_odds[question]):
        if question not in scores:
            continue
        current += scores[question] if answers[question] else -float(bool(predictions[question]))
        if current > best:
            best, threshold = current, null_odds[question]
    return threshold, 100.0 * best / max(1, len(scores))
