"""SQuAD questions and their tokenization into overlapping windows.

A window is `[CLS] question [SEP] part of the passage [SEP]`. A passage that does not fit into one window is split into
overlapping windows. Each window starts `doc_stride` tokens after the last, as in google-research/bert `run_squad.py`.
"""

import dataclasses
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, make_examples, max_context_window
from bertjax.data.finetuning.tables import ReadStats, replace_surrogates
from bertjax.errors import UsageError, quoted
from bertjax.utils.terminal import progress_bar

# Context bonus per token of a window, as in `_check_is_max_context` of `run_squad.py`.
_LENGTH_BONUS = 0.01


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a passage.

    Attributes:
      id: unique id from the dataset.
      text: the question.
      context: the passage.
      answers: reference answers; empty for unanswerable questions and unlabeled files.
      answer_start: character offset of the first answer in `context`, -1 if there are no answers.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    answer_start: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of all questions.

    Attributes:
      examples: one example per window. `start_positions` and `end_positions`, int32 [windows], are the first and last
        token of the answer. The positions are 0 ([CLS]) if the window does not contain the answer.
      question_index: index of each window's question, int64 [windows].
      passage_start: position of the first passage token in each window, int64 [windows].
      char_spans: for each window, start and end (exclusive) character of each passage token, int64 [tokens, 2].
      is_max_context: for each window, mask of passage tokens with more context than in other windows, bool [tokens].
    """

    examples: Examples
    question_index: np.ndarray
    passage_start: np.ndarray
    char_spans: list[np.ndarray]
    is_max_context: list[np.ndarray]


def read_questions(path: Path, stats: ReadStats, training: bool, all_answerable: bool = False) -> list[Question]:
    """Reads a SQuAD file, version 1.1 or 2.0.

    Args:
      path: a `.json` or `.json.xz` file.
      stats: question counts, updated in place.
      training: whether to skip questions whose answer is not at its offset in the context.
      all_answerable: whether every question needs an answer, as in SQuAD 1.1. Questions without an answer are skipped
        in training. In evaluation, they are used and counted in `stats.noted`.

    Raises:
      UsageError: the file is missing or malformed, has duplicate ids, or has no usable questions.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            content = json.loads(file.read().removeprefix(b"\xef\xbb\xbf"))
        questions = [
            _parse_question(entry, paragraph["context"], f"article {i}, paragraph {j}")
            for i, article in enumerate(content["data"], 1)
            for j, paragraph in enumerate(article["paragraphs"], 1)
            for entry in paragraph["qas"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, lzma.LZMAError, EOFError) as error:
        raise UsageError(
            f"{path} is not in SQuAD's format: {type(error).__name__}: {error}; use the JSON files of the dataset"
        ) from error
    stats.read += len(questions)
    ids = Counter(question.id for question in questions)
    duplicate = next((id_ for id_, count in ids.items() if count > 1), None)
    if duplicate is not None:
        raise UsageError(f"{path} has {ids[duplicate]} questions with the id {quoted(duplicate)}; make ids unique")
    usable = []
    for question in questions:
        place = f"question {question.id}"
        if not question.answers and all_answerable:
            if training:
                stats.skip("without an answer (version=2.0 trains on them)", place)
                continue
            stats.note("without an answer, scored 0 by version 1.1", place)
        if training and question.answers and not _has_answer_at_offset(question):
            stats.skip("whose answer is not in its context", place)
            continue
        if not question.text.strip():
            stats.note("with an empty question", place)
        usable.append(question)
    stats.used += len(usable)
    if not usable:
        reasons = f": {', '.join(stats.skipped)}" if stats.skipped else ""
        raise UsageError(f"{path} has no usable questions{reasons}; use a file whose answers occur in their contexts")
    return usable


def _parse_question(entry: dict[str, Any], context: Any, place: str) -> Question:
    if not isinstance(context, str) or not isinstance(entry["question"], str):
        raise TypeError(f"a question or context in {place} is not a string")
    answers = () if entry.get("is_impossible") else tuple(answer["text"] for answer in entry.get("answers", ()))
    start = int(entry["answers"][0]["answer_start"]) if answers else -1
    # Each surrogate is replaced by one character, so that character offsets stay valid.
    texts = (replace_surrogates(text) for text in (str(entry["id"]), entry["question"], context))
    return Question(*texts, tuple(replace_surrogates(answer) for answer in answers), start)


def _has_answer_at_offset(question: Question) -> bool:
    start, answer = question.answer_start, question.answers[0]
    return bool(answer.strip()) and start >= 0 and question.context[start : start + len(answer)] == answer


def make_windows(
    questions: list[Question],
    tokenizer: Tokenizer,
    stats: ReadStats,
    *,
    seq_len: int,
    doc_stride: int,
    max_query_len: int,
) -> Windows:
    """Tokenizes questions and passages and splits them into windows.

    Args:
      questions: questions to tokenize.
      tokenizer: the model's tokenizer.
      stats: question counts; questions truncated to `max_query_len` are counted in `stats.noted`.
      seq_len: maximum tokens per window.
      doc_stride: passage tokens between the starts of consecutive windows.
      max_query_len: maximum tokens of a question.
    """
    vocabulary = tokenizer.vocabulary
    passages: dict[str, tuple[list[int], np.ndarray]] = {}
    sequences, question_index, passage_start, char_spans, is_max_context = [], [], [], [], []
    start_positions, end_positions = [], []
    with progress_bar("questions", len(questions), " questions", after_seconds=3) as bar:
        for index, question in enumerate(questions):
            bar.update()
            query = tokenizer.encode(question.text)
            if len(query) > max_query_len:
                stats.note(f"with the question truncated to {max_query_len} tokens", f"question {question.id}")
                query = query[:max_query_len]
            if question.context not in passages:
                passages[question.context] = tokenizer.encode_with_offsets(question.context)
            ids, spans = passages[question.context]
            answer = _answer_tokens(question, spans)
            windows = _stride_windows(len(ids), seq_len - len(query) - 3, doc_stride)
            best_window = max_context_window(windows, len(ids), _LENGTH_BONUS)
            head = [vocabulary.cls_id, *query, vocabulary.sep_id]
            for window, (begin, end) in enumerate(windows):
                passage = [*ids[begin:end], vocabulary.sep_id]
                sequences.append(
                    {
                        "input_ids": [*head, *passage],
                        "segment_ids": [0] * len(head) + [1] * len(passage),
                    }
                )
                question_index.append(index)
                passage_start.append(len(head))
                char_spans.append(spans[begin:end])
                is_max_context.append(best_window[begin:end] == window)
                has_answer = answer and begin <= answer[0] and answer[1] < end
                start_positions.append(answer[0] - begin + len(head) if has_answer else 0)
                end_positions.append(answer[1] - begin + len(head) if has_answer else 0)
    positions = {
        "start_positions": np.array(start_positions, np.int32),
        "end_positions": np.array(end_positions, np.int32),
    }
    examples = make_examples(sequences, positions)
    return Windows(examples, np.array(question_index), np.array(passage_start), char_spans, is_max_context)


def _answer_tokens(question: Question, spans: np.ndarray) -> tuple[int, int] | None:
    """Returns the first and last passage token that overlap the first answer. Returns None if no token does."""
    if not question.answers or not len(spans):
        return None
    start, end = question.answer_start, question.answer_start + len(question.answers[0])
    overlapping = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < end))
    return (int(overlapping[0]), int(overlapping[-1])) if overlapping.size else None


def _stride_windows(tokens: int, max_tokens: int, stride: int) -> list[tuple[int, int]]:
    windows = []
    begin = 0
    while True:
        end = min(tokens, begin + max_tokens)
        windows.append((begin, end))
        if end == tokens:
            return windows
        begin += min(end - begin, stride)
