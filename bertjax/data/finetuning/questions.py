"""Readers of SQuAD and TriviaQA questions."""

import dataclasses
import itertools
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertjax.data.finetuning.examples import Source
from bertjax.data.finetuning.tables import ReadStats, replace_surrogates
from bertjax.errors import UsageError, first_line, quoted
from bertjax.utils.io import reject_binary, unix_newlines

# Number of words at the start of a TriviaQA document that are searched for an answer. The paper (section 4.2, footnote)
# says 400 tokens without defining a token.
_TRIVIAQA_WORDS = 400
_EVIDENCE = Path("evidence", "wikipedia")
_NOT_IN_CONTEXT = "whose answer is not in its context"
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "none": None}

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a passage."""

    id: str  # unique id from the dataset
    text: str  # the question
    context: str  # the passage
    answers: tuple[str, ...]  # reference answers; empty for unanswerable questions and unlabeled files
    answer_start: int  # character offset of the first answer in `context`, -1 if there are no answers
    # Reason for a missing answer (default: "", the question has an answer or is marked as unanswerable).
    lacks_answer: str = ""


class Questions(list[Question], Source):
    """The questions in a file. Questions about the same passage are in the same split."""

    def texts(self) -> list[bytes]:
        return [question.context.encode() for question in self]

    def subset(self, indices: np.ndarray) -> "Questions":
        return Questions(self[index] for index in indices)


def read_questions(path: Path, stats: ReadStats, training: bool, all_answerable: bool = False) -> Questions:
    """Reads the questions of a SQuAD file (`.json`, `.jsonl` or `.json.xz`), and counts them in `stats`.

    A wrong answer offset is corrected if the answer occurs near it, see `_find_first_answer`. In training, questions
    whose answer is missing or not found are skipped. With `all_answerable`, as in SQuAD 1.1, every question needs an
    answer. Otherwise, a question is unanswerable if `is_impossible` is true, or if this field is absent and the list
    of answers is empty.
    """
    questions = _read_json(path, "SQuAD", _parse_squad)
    stats.read += len(questions)
    usable = Questions()
    for question in questions:
        place = f"question {question.id}"
        problem, effect = question.lacks_answer, "as wrong" if all_answerable else "as unanswerable"
        span = _find_first_answer(question) if question.answers else None
        if question.answers and not span:
            problem, effect = _why_not_found(question), "by the text of its answers"
        elif all_answerable and not question.answers:
            problem = problem or "without an answer (only version=2.0 trains on them)"
        if problem and training:
            stats.skip(problem, place)
            continue
        if problem:
            stats.count_irregular(f"{problem}, scored {effect}", place)
        if span and _is_inside_word(question.context, span):
            stats.count_irregular("whose answer starts or ends inside a word, but is a word elsewhere", place)
        if span and span != (question.answer_start, question.answer_start + len(question.answers[0])):
            stats.count_irregular("whose answer_start was corrected", place)
            answers = (question.context[slice(*span)], *question.answers[1:])
            question = dataclasses.replace(question, answers=answers, answer_start=span[0])
        if not question.text.strip():
            stats.count_irregular("with an empty question", place)
        usable.append(question)
    _check_questions(path, [question.id for question in questions], usable, stats)
    return usable


def _read_json(path: Path, dataset: str, parse: Callable[[Any], list[_T]]) -> list[_T]:
    """Applies `parse` to the value in a `.json` or `.json.xz` file, or to the list of values in a JSON Lines file."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            data = file.read().removeprefix(b"\xef\xbb\xbf")
        try:
            content = json.loads(data)
        except UnicodeDecodeError:
            reject_binary(path, data)
            raise
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
            content = [json.loads(line) for line in b"".join(unix_newlines([data])).split(b"\n") if line.strip()]
        return parse(content)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {first_line(error)}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{path} is not in {dataset}'s format: {error}; use the JSON files of the dataset") from error


def _check_questions(path: Path, ids: Sequence[str], usable: list[Question], stats: ReadStats) -> None:
    """Adds the number of usable questions to `stats`. Raises a UsageError if there are none or ids are not unique."""
    if repeated := [(id_, count) for id_, count in Counter(ids).items() if count > 1]:
        raise UsageError(f"{path} has {repeated[0][1]} questions with the id {quoted(repeated[0][0])}; make ids unique")
    stats.used += len(usable)
    if not usable:
        raise UsageError(
            f"{path} has no usable questions: {', '.join(stats.skipped) or 'none in the file'}; use a file whose "
            "answers occur in their contexts"
        )


def _parse_squad(content: Any) -> list[Question]:
    """Parses SQuAD data: a list of articles with paragraphs, paragraphs with questions, or questions with a context."""
    questions = []
    place = "data"
    try:
        if isinstance(content, dict) and isinstance(content.get("context"), list):
            # `Dataset.to_dict()` of Hugging Face `datasets` returns a list per column.
            content = [dict(zip(content, row, strict=True)) for row in zip(*content.values(), strict=True)]
        elif isinstance(content, dict):
            content = [content] if {"paragraphs", "qas", "context"} & content.keys() else content["data"]
        for i, entry in enumerate(content, 1):
            place = f"entry {i}"
            for j, paragraph in enumerate(entry.get("paragraphs", [entry]), 1):
                place = f"entry {i}, paragraph {j}"
                for qa in paragraph.get("qas", [paragraph]):
                    place = f"question {qa['id']} of entry {i}, paragraph {j}"
                    questions.append(_parse_question(qa, paragraph["context"]))
    except KeyError as error:
        raise ValueError(f"{place} has no field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{place}: {error}") from error
    return questions


def _parse_question(entry: dict[str, Any], context: str) -> Question:
    flag = str(entry.get("is_impossible")).lower()
    if flag not in _FLAGS:
        raise ValueError(f"is_impossible is {flag!r}; use true or false")
    is_impossible = _FLAGS[flag]
    answers = [] if is_impossible else entry.get("answers") or []
    if isinstance(answers, dict) and isinstance(answers["text"], str):
        answers = [answers]
    elif isinstance(answers, dict):
        # Hugging Face `datasets` stores a list of texts and a list of offsets.
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": offset} for text, offset in pairs]
    if not all(isinstance(answer, dict) for answer in answers):
        raise ValueError("answers contains items that are not objects with text and answer_start")
    lacks_answer = ""
    if not answers and not is_impossible:
        if entry.get("answers") is None:
            lacks_answer = "whose field answers is missing"
        elif is_impossible is False:
            lacks_answer = "with is_impossible=false, but without an answer"
    start = answers[0]["answer_start"] if answers else -1
    if not isinstance(start, int | float | str) or not float(start).is_integer():
        raise ValueError(f"answer_start is {start}; use an integer")
    # Each surrogate is replaced by one character, so that character offsets stay valid.
    return Question(
        str(entry["id"]),
        replace_surrogates(entry["question"]),
        replace_surrogates(context),
        tuple(replace_surrogates(answer["text"]) for answer in answers),
        int(start),
        lacks_answer,
    )


def _find_first_answer(question: Question) -> tuple[int, int] | None:
    """Searches for the first answer near its offset, and returns its character span (None: not found).

    If the text at the offset differs, tries the offset as a count of UTF-16 units and of UTF-8 bytes. Then, as in
    google-research/bert `run_squad.py`, searches the expected span, extended to whole words. The words of the answer
    may be separated by any whitespace.
    """
    context, answer, start = question.context, question.answers[0], question.answer_start
    if not answer.strip() or not context.strip() or start < 0:
        return None
    if context[start : start + len(answer)] == answer:
        return start, start + len(answer)
    for encoding, unit_bytes in (("utf-16-le", 2), ("utf-8", 1)):
        at = len(context.encode(encoding)[: start * unit_bytes].decode(encoding, "ignore"))
        if context[at : at + len(answer)] == answer:
            return at, at + len(answer)
    if start >= len(context):
        return None
    words = [match.span() for match in re.finditer(r"[^ \t\r\n\u202f]+", context)]
    # Whitespace belongs to the word before it.
    first, last = (
        max([index for index, (begin, _) in enumerate(words) if begin <= at], default=0)
        for at in (start, start + len(answer) - 1)
    )
    matches = _answer_pattern(answer).finditer(context, words[first][0], words[last][1])
    return min((match.span() for match in matches), key=lambda span: abs(span[0] - start), default=None)


def _is_inside_word(context: str, span: tuple[int, int]) -> bool:
    """Returns whether a span starts or ends inside a word, while its text also occurs as whole words."""
    start, end = span
    edges = (context[at - 1 : at + 1] for at in span if 0 < at < len(context))
    if not any(re.fullmatch(r"\w\w", edge) for edge in edges):
        return False
    return re.search(rf"(?<!\w){re.escape(context[start:end])}(?!\w)", context) is not None


def _answer_pattern(answer: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, answer.split())))


def _why_not_found(question: Question) -> str:
    if not question.answers[0].strip():
        return "whose answer is empty"
    is_elsewhere = _answer_pattern(question.answers[0]).search(question.context)
    return "whose answer is in its context, but not at answer_start" if is_elsewhere else _NOT_IN_CONTEXT


def read_triviaqa(path: Path, folder: Path, stats: ReadStats) -> Questions:
    """Reads TriviaQA's Wikipedia questions, for fine-tuning before SQuAD (section 4.2 of the paper).

    Returns a `Question` for each pair of a question and an evidence document whose first 400 words contain an answer.
    The answer is the earliest match of any alias, ignoring case. `folder` is the root of the dataset, with
    `evidence/wikipedia`.
    """
    entries = _read_json(path, "TriviaQA", _parse_triviaqa)
    questions = Questions()
    for question, documents in entries:
        for document in dict.fromkeys(documents):
            stats.read += 1
            place = f"question {question.id}, {document}"
            context = _first_words(folder / _EVIDENCE, document)
            if context is None:
                stats.skip("whose document is missing", place)
            elif span := _find_answer(question.answers, context):
                answers = tuple(dict.fromkeys((context[slice(*span)], *question.answers)))
                questions.append(Question(f"{question.id}--{document}", question.text, context, answers, span[0]))
            else:
                stats.skip(f"whose document has no answer in its first {_TRIVIAQA_WORDS} words", place)
    _check_questions(path, [question.id for question, _ in entries], questions, stats)
    return questions


def _parse_triviaqa(content: Any) -> list[tuple[Question, list[str]]]:
    """Returns each question, still without context, and the names of its evidence documents."""
    entries = []
    for entry in content["Data"]:
        names = (entry["Answer"]["Value"], *entry["Answer"]["Aliases"])
        text, answers = replace_surrogates(entry["Question"]), tuple(map(replace_surrogates, names))
        documents = [str(page["Filename"]) for page in entry["EntityPages"]]
        entries.append((Question(str(entry["QuestionId"]), text, "", answers, -1), documents))
    return entries


def _first_words(folder: Path, document: str) -> str | None:
    """Returns a document's first words, or None if the document does not exist or is outside `folder`."""
    if ".." in Path(document).parts or Path(document).is_absolute():
        return None
    try:
        content = (folder / document).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None
    ends = [match.end() for match in itertools.islice(re.finditer(r"\S+", content), _TRIVIAQA_WORDS)]
    return content[: ends[-1]] if ends else ""


def _find_answer(answers: tuple[str, ...], context: str) -> tuple[int, int] | None:
    """Finds the earliest answer, ignoring case, and returns its character span. The longest answer wins a tie."""
    spans = [
        match.span()
        for answer in dict.fromkeys(answers)
        if answer.strip() and (match := re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", context, re.IGNORECASE))
    ]
    return min(spans, key=lambda span: (span[0], -span[1]), default=None)
