"""Questions on passages, cut into overlapping windows, and the characters each token covers (SQuAD's form).

A window is `[CLS] question [SEP] part of the passage [SEP]`. A passage longer than a window is read in several, each
starting `doc_stride` tokens after the one before (google-research/bert `run_squad.py`).
"""

import dataclasses
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.offsets import encode_with_offsets
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.context import most_context
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.finetuning.tables import ReadStats, whole_characters
from bertjax.errors import UsageError, quoted
from bertjax.utils.terminal import progress_bar

# Context that a token gets for each token of its window (`_check_is_max_context` of `run_squad.py`).
_LENGTH_BONUS = 0.01


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      id: of the data set.
      text: the question.
      context: the passage that may hold its answer.
      answers: texts people gave; none where the question has no answer, or the file tells none.
      answer_start: first character of the first answer in the context, -1 where there is none.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    answer_start: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of all questions.

    Attributes:
      examples: one window each, with `start_positions` and `end_positions`, int32 tokens of the row, 0 and 0 ([CLS])
        where the window does not hold the answer.
      question: int64 [windows], which question a window belongs to.
      first_token: int64 [windows], row position of the passage's first token in the window.
      spans: for each window, int64 [tokens, 2], first character and the one after the last, of its passage tokens.
      is_best: for each window, bool [tokens]: no other window has more context around the token.
    """

    examples: Examples
    question: np.ndarray
    first_token: np.ndarray
    spans: list[np.ndarray]
    is_best: list[np.ndarray]


def read_questions(path: Path, reading: ReadStats, training: bool, answered: bool = False) -> list[Question]:
    """The questions of a SQuAD file, 1.1 or 2.0.

    Args:
      path: `.json`, or `.json.xz`.
      reading: counts questions; for training, those whose answer is not in its context are skipped.
      training: an answer's place is needed.
      answered: every question has an answer, as in SQuAD 1.1; one without is skipped for training, else noted.

    Raises:
      UsageError: the file is missing, is not of SQuAD's form, or has an id twice.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            content = json.loads(file.read().removeprefix(b"\xef\xbb\xbf"))
        questions = [
            _question(qa, paragraph["context"], f"article {i}, paragraph {j}")
            for i, article in enumerate(content["data"], 1)
            for j, paragraph in enumerate(article["paragraphs"], 1)
            for qa in paragraph["qas"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{path} is not of SQuAD's form ({type(error).__name__}: {error})") from error
    reading.read += len(questions)
    ids = Counter(question.id for question in questions)
    twice = next((name for name, count in ids.items() if count > 1), None)
    if twice is not None:
        raise UsageError(
            f"{path} has {ids[twice]} questions with the id {quoted(twice)}; predictions are told apart by it"
        )
    kept = []
    for question in questions:
        if not question.answers and answered:
            place = f"question {question.id}"
            if training:
                reading.skip("without an answer (give version=2.0 to learn from them)", place)
                continue
            reading.note("without an answer, which 1.1 scores 0", place)
        if training and question.answers and not _is_there(question):
            reading.skip("whose answer is not in its context", f"question {question.id}")
            continue
        if not question.text.strip():
            reading.note("with an empty question", f"question {question.id}")
        kept.append(question)
    reading.used += len(kept)
    if not kept:
        why = f": {', '.join(reading.skipped)}" if reading.skipped else ""
        raise UsageError(f"{path} has no questions that can be used{why}")
    return kept


def _question(qa: dict[str, Any], context: Any, place: str) -> Question:
    if not isinstance(context, str) or not isinstance(qa["question"], str):
        raise TypeError(f"in {place} a question or its context is no text")
    answers = () if qa.get("is_impossible") else tuple(answer["text"] for answer in qa.get("answers", ()))
    start = int(qa["answers"][0]["answer_start"]) if answers else -1
    # Each half of a broken character is one replacement, so that places stay what they are.
    texts = (whole_characters(text) for text in (str(qa["id"]), qa["question"], context))
    return Question(*texts, tuple(whole_characters(answer) for answer in answers), start)


def _is_there(question: Question) -> bool:
    start, answer = question.answer_start, question.answers[0]
    return bool(answer.strip()) and start >= 0 and question.context[start : start + len(answer)] == answer


def make_windows(
    questions: list[Question],
    tokenizer: Tokenizer,
    reading: ReadStats,
    *,
    seq_len: int,
    doc_stride: int,
    max_query_len: int,
) -> Windows:
    """Tokenises questions and passages, and cuts the windows.

    Args:
      reading: gains notes of questions that are cut to `max_query_len` tokens.
    """
    vocabulary = tokenizer.vocabulary
    passages: dict[str, tuple[list[int], np.ndarray]] = {}
    rows, owner, first, spans, is_best = [], [], [], [], []
    starts, ends = [], []
    with progress_bar("questions", len(questions), " questions", after_seconds=3) as bar:
        for index, question in enumerate(questions):
            bar.update()
            query = tokenizer.encode(question.text)
            if len(query) > max_query_len:
                reading.note(f"cut to {max_query_len} tokens of the question", f"question {question.id}")
                query = query[:max_query_len]
            if question.context not in passages:
                passages[question.context] = encode_with_offsets(tokenizer, question.context)
            ids, characters = passages[question.context]
            answer = _answer_tokens(question, characters)
            parts = _parts(len(ids), seq_len - len(query) - 3, doc_stride)
            best = most_context(parts, len(ids), _LENGTH_BONUS)
            head = [vocabulary.cls_id, *query, vocabulary.sep_id]
            for part, (begin, end) in enumerate(parts):
                passage = [*ids[begin:end], vocabulary.sep_id]
                rows.append(
                    {
                        "input_ids": [*head, *passage],
                        "segment_ids": [0] * len(head) + [1] * len(passage),
                    }
                )
                owner.append(index)
                first.append(len(head))
                spans.append(characters[begin:end])
                is_best.append(best[begin:end] == part)
                inside = answer and begin <= answer[0] and answer[1] < end
                starts.append(answer[0] - begin + len(head) if inside else 0)
                ends.append(answer[1] - begin + len(head) if inside else 0)
    positions = {"start_positions": np.array(starts, np.int32), "end_positions": np.array(ends, np.int32)}
    return Windows(make_examples(rows, positions), np.array(owner), np.array(first), spans, is_best)


def _answer_tokens(question: Question, characters: np.ndarray) -> tuple[int, int] | None:
    """First and last passage token of the first answer: all that share a character with it."""
    if not question.answers or not len(characters):
        return None
    start, end = question.answer_start, question.answer_start + len(question.answers[0])
    touched = np.flatnonzero((characters[:, 1] > start) & (characters[:, 0] < end))
    return (int(touched[0]), int(touched[-1])) if touched.size else None


def _parts(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    parts = []
    begin = 0
    while True:
        end = min(tokens, begin + room)
        parts.append((begin, end))
        if end == tokens:
            return parts
        begin += min(end - begin, stride)
