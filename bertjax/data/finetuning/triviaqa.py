"""Reader of TriviaQA's Wikipedia questions, for fine-tuning before SQuAD (section 4.2 of the paper)."""

import json
import re
from collections import Counter
from pathlib import Path

from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.tables import ReadStats, replace_surrogates
from bertjax.errors import UsageError, quoted

# Length of the searched text (footnote of section 4.2), in words, since the paper does not define its tokens.
_MAX_TOKENS = 400
_EVIDENCE = Path("evidence", "wikipedia")


def read_triviaqa(path: Path, folder: Path, stats: ReadStats) -> list[Question]:
    """Reads TriviaQA. Returns one question for each evidence document with an answer in its first 400 tokens.

    The answer is the earliest match of any alias, ignoring case.

    Args:
      path: question file, such as `qa/wikipedia-train.json`.
      folder: root of the dataset, with `evidence/wikipedia`.
      stats: document counts, updated in place. Missing documents and documents without an answer are skipped.

    Raises:
      UsageError: the file is missing or malformed, or no document can be used.
    """
    try:
        content = json.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        entries = [
            (
                str(entry["QuestionId"]),
                replace_surrogates(entry["Question"]),
                tuple(replace_surrogates(name) for name in (entry["Answer"]["Value"], *entry["Answer"]["Aliases"])),
                [str(page["Filename"]) for page in entry["EntityPages"]],
            )
            for entry in content["Data"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not in TriviaQA's format: {type(error).__name__}: {error}; use the JSON files of the dataset"
        ) from error
    duplicate = next((id_ for id_, count in Counter(id_ for id_, *_ in entries).items() if count > 1), None)
    if duplicate is not None:
        raise UsageError(f"{path} has several questions with the id {quoted(duplicate)}; make ids unique")
    questions = []
    for question_id, text, answers, documents in entries:
        for document in dict.fromkeys(documents):
            stats.read += 1
            if question := _read_question(question_id, text, answers, document, folder, stats):
                questions.append(question)
    stats.used += len(questions)
    if not questions:
        reasons = f": {', '.join(stats.skipped)}" if stats.skipped else ""
        raise UsageError(f"{path} has no usable questions{reasons}; check the documents in {folder / _EVIDENCE}")
    return questions


def _read_question(
    question_id: str, text: str, answers: tuple[str, ...], document: str, folder: Path, stats: ReadStats
) -> Question | None:
    place = f"question {question_id}, {document}"
    try:
        # Reject file names outside of the folder.
        if ".." in Path(document).parts or Path(document).is_absolute():
            raise OSError
        content = (folder / _EVIDENCE / document).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        stats.skip("whose document is missing", place)
        return None
    context = _first_tokens(content)
    span = _find_answer(answers, context)
    if span is None:
        stats.skip(f"whose document has no answer in its first {_MAX_TOKENS} tokens", place)
        return None
    match = context[span[0] : span[1]]
    return Question(f"{question_id}--{document}", text, context, tuple(dict.fromkeys((match, *answers))), span[0])


def _first_tokens(text: str) -> str:
    ends = [match.end() for _, match in zip(range(_MAX_TOKENS), re.finditer(r"\S+", text), strict=False)]
    return text[: ends[-1]] if ends else ""


def _find_answer(answers: tuple[str, ...], context: str) -> tuple[int, int] | None:
    """Finds the earliest answer, ignoring case, and returns its character span. The longest answer wins a tie."""
    spans = [
        match.span()
        for answer in dict.fromkeys(answers)
        if answer.strip() and (match := re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", context, re.IGNORECASE))
    ]
    return min(spans, key=lambda span: (span[0], -span[1]), default=None)
