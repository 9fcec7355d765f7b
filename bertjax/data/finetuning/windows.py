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
class Windows:
    """Windows of all questions.

    Attributes:
      examples: one example per window. `start_positions` and `end_positions`, int32 [windows], are the first and last
        token of the answer. The positions are 0 ([CLS]) if the window does not contain the answer.
      question_index: index of each window's question, int64 [windows].
      passage_start: position of the first passage token in each window, int64 [windows].
      char_spans: for each window, start and end (exclusive) character offset of each passage token, int64 [tokens, 2].
      is_max_context: for each window, mask of the passage tokens that have the most context in this window, bool
        [tokens].
    """

    examples: Examples
    question_index: np.ndarray
    passage_start: np.ndarray
    char_spans: list[np.ndarray]
    is_max_context: list[np.ndarray]


def make_windows(
    questions: list[Question],
    tokenizer: Tokenizer,
    stats: ReadStats,
    *,
    seq_len: int,
    doc_stride: int,
    max_query_len: int,
) -> Windows:
    """Splits questions and passages into windows of at most `seq_len` tokens. Truncates long questions."""
    vocabulary = tokenizer.vocabulary
    passages: dict[str, tuple[list[int], np.ndarray]] = {}
    sequences, question_index, passage_start, char_spans, is_max_context = [], [], [], [], []
    start_positions, end_positions = [], []
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
            windows = _stride_windows(len(ids), seq_len - len(query) - 3, doc_stride)
            best_window = max_context_window(windows, len(ids), _LENGTH_BONUS)
            head = len(query) + 2  # tokens of [CLS] question [SEP]
            for window, (begin, end) in enumerate(windows):
                sequences.append(encode_pair(query, ids[begin:end], seq_len, vocabulary))
                question_index.append(index)
                passage_start.append(head)
                char_spans.append(spans[begin:end])
                is_max_context.append(best_window[begin:end] == window)
                first = last = 0
                if answer and begin <= answer[0] and answer[1] < end:
                    first, last = (token - begin + head for token in answer)
                start_positions.append(first)
                end_positions.append(last)
    positions = {"start_positions": start_positions, "end_positions": end_positions}
    examples = make_examples(sequences, {name: np.array(values, np.int32) for name, values in positions.items()})
    return Windows(examples, np.array(question_index), np.array(passage_start), char_spans, is_max_context)


def _answer_tokens(question: Question, spans: np.ndarray) -> tuple[int, int] | None:
    """Returns the indices of the first and last passage token that overlap the first answer, or None if none do."""
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
