"""Tokenization of questions into windows `[CLS] question [SEP] part of the passage [SEP]`.

Each window starts `doc_stride` passage tokens after the previous one, as in google-research/bert `run_squad.py`.
"""

import dataclasses

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples, max_context_window
from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.tables import ReadStats
from bertjax.utils.terminal import progress_bar

# Argument `length_bonus` of `max_context_window`, as in `_check_is_max_context` of `run_squad.py`.
_LENGTH_BONUS = 0.01


@dataclasses.dataclass(frozen=True)
class Window:
    """Part of a passage with a question."""

    question: int  # index of the question
    passage_start: int  # position of the first passage token in the window
    char_spans: np.ndarray  # start and end (exclusive) character offset of each passage token, int64 [tokens, 2]
    is_max_context: np.ndarray  # bool [tokens], whether this window has the most context around a token


def make_windows(
    questions: list[Question],
    tokenizer: Tokenizer,
    stats: ReadStats,
    *,
    seq_len: int,
    doc_stride: int,
    max_query_len: int,
) -> tuple[Examples, list[Window]]:
    """Splits passages into windows of at most `seq_len` tokens, each with its question. Truncates long questions.

    Returns one example per window, and the windows. The examples' arrays `start_positions` and `end_positions`, int32
    [windows], are the positions of the answer's first and last token, or 0 ([CLS]) in windows without the answer.
    """
    vocabulary = tokenizer.vocabulary
    passages: dict[str, tuple[list[int], np.ndarray]] = {}
    sequences, windows, positions = [], [], []
    with progress_bar("questions", len(questions), " questions", after_seconds=3) as bar:
        for index, question in enumerate(questions):
            bar.update()
            query = tokenizer.encode_with_special(question.text)
            if len(query) > max_query_len:
                reason = f"with the question truncated to {max_query_len} tokens"
                stats.count_irregular(reason, f"question {question.id}")
                query = query[:max_query_len]
            if question.context not in passages:
                passages[question.context] = tokenizer.encode_with_offsets(question.context)
            ids, spans = passages[question.context]
            answer = _answer_tokens(question, spans)
            head = len(query) + 1 + vocabulary.pair_separators  # tokens of [CLS] question [SEP]
            room = vocabulary.room(seq_len, num_texts=2) - len(query)
            stride = min(room, doc_stride)
            begins = range(0, max(1, len(ids) - room + stride), stride)
            ranges = [(begin, min(len(ids), begin + room)) for begin in begins]
            best_window = max_context_window(ranges, len(ids), _LENGTH_BONUS)
            for number, (begin, end) in enumerate(ranges):
                sequences.append(encode_pair(query, ids[begin:end], seq_len, vocabulary))
                windows.append(Window(index, head, spans[begin:end], best_window[begin:end] == number))
                if answer and begin <= answer[0] and answer[1] < end:
                    positions.append([token - begin + head for token in answer])
                else:
                    positions.append([0, 0])
    starts, ends = np.array(positions, np.int32).reshape(-1, 2).T
    return make_examples(sequences, {"start_positions": starts, "end_positions": ends}), windows


def _answer_tokens(question: Question, spans: np.ndarray) -> tuple[int, int] | None:
    """Returns the indices of the first and last passage token that overlap the first answer, or None if none do."""
    if not question.answers or not len(spans):
        return None
    start, end = question.answer_start, question.answer_start + len(question.answers[0])
    overlapping = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < end))
    return (int(overlapping[0]), int(overlapping[-1])) if overlapping.size else None
