"""TriviaQA's Wikipedia part as questions on passages, for a fine-tuning before SQuAD's (section 4.2 of the paper)."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.tables import ReadStats, whole_characters
from bertjax.errors import UsageError, quoted

# Footnote of section 4.2; tokens are taken to be what stands between white space.
_FIRST_TOKENS = 400
_EVIDENCE = Path("evidence", "wikipedia")


def read_triviaqa(path: Path, folder: Path, reading: ReadStats) -> list[Question]:
    """A question for each document that has an answer in its first 400 tokens, the first one that is there.

    Args:
      path: such as `qa/wikipedia-train.json`.
      folder: of the whole data set, with `evidence/wikipedia`.
      reading: counts documents; those that are missing or without an answer are skipped.

    Raises:
      UsageError: the file is missing, is not of TriviaQA's form, or no document can be used.
    """
    try:
        content = json.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        asked = [
            (
                str(entry["QuestionId"]),
                whole_characters(entry["Question"]),
                tuple(whole_characters(name) for name in (entry["Answer"]["Value"], *entry["Answer"]["Aliases"])),
                [str(page["Filename"]) for page in entry["EntityPages"]],
            )
            for entry in content["Data"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not of TriviaQA's form ({type(error).__name__}: {error})") from error
    twice = next((name for name, count in Counter(name for name, *_ in asked).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"{path} has the question {quoted(twice)} twice")
    kept = []
    for name, text, answers, documents in asked:
        for document in dict.fromkeys(documents):
            reading.read += 1
            if found := _question(name, text, answers, document, folder, reading):
                kept.append(found)
    reading.used += len(kept)
    if not kept:
        why = f": {', '.join(reading.skipped)}" if reading.skipped else ""
        raise UsageError(f"{path} has no questions that can be used{why}; evidence is read from {folder / _EVIDENCE}")
    return kept


def _question(
    name: str, text: str, answers: tuple[str, ...], document: str, folder: Path, reading: ReadStats
) -> Question | None:
    place = f"question {name}, {document}"
    parts = Path(document).parts
    try:
        # A name from a file leads to no other folder.
        if ".." in parts or Path(document).is_absolute():
            raise OSError("its name leads elsewhere")
        whole = (folder / _EVIDENCE / document).read_text("utf-8", errors="replace")
    except OSError:
        reading.skip("whose document is missing", place)
        return None
    context = _first_tokens(whole)
    found = _first(answers, context)
    if found is None:
        reading.skip(f"whose document has no answer in its first {_FIRST_TOKENS} tokens", place)
        return None
    there = context[found[0] : found[1]]
    return Question(f"{name}--{document}", text, context, tuple(dict.fromkeys((there, *answers))), found[0])


def _first_tokens(text: str) -> str:
    ends = [match.end() for _, match in zip(range(_FIRST_TOKENS), re.finditer(r"\S+", text), strict=False)]
    return text[: ends[-1]] if ends else ""


def _first(answers: tuple[str, ...], context: str) -> tuple[int, int] | None:
    """Where the first of the answers begins and ends, whatever its case; of those at one place the longest."""
    found: Any = [
        match.span()
        for answer in dict.fromkeys(answers)
        if answer.strip() and (match := re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", context, re.IGNORECASE))
    ]
    return min(found, key=lambda span: (span[0], -span[1]), default=None)
