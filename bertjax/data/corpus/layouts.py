"""Streaming division of a file's text into documents. Long documents are yielded in pieces to bound memory."""

import dataclasses
import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

from bertjax.data.corpus.sentences import PARAGRAPHS, WRAPPED, cut_point, is_wrapped

# Maximum characters in a piece of a document.
MAX_PIECE_CHARS = 1 << 20

_BLANK_LINE = re.compile(r"\n\s*\n")
_DOC_OPEN = re.compile(r"^<doc\b[^\n]*>[^\S\n]*(?:\n|\Z)", re.MULTILINE)
_DOC_CLOSE = re.compile(r"^</doc>", re.MULTILINE)
_TITLE = re.compile(r'\btitle="(.*?)"(?:\s+\w+="|>\s*$)')


@dataclasses.dataclass(frozen=True)
class Text:
    """A document or a piece of a document.

    Attributes:
      text: unchanged text of the source.
      form: layout of the text: `sentences.LINES`, `PARAGRAPHS` or `WRAPPED`.
      continues: whether the text continues the document of the previous `Text`.
    """

    text: str
    form: str
    continues: bool = False


def single_document(chunks: Iterator[str], form: str, problems: Counter[str]) -> Iterator[Text]:
    """Yields the chunks as one document."""
    return _documents(chunks, form, problems, lambda text: [text])


def blank_line_documents(chunks: Iterator[str], form: str, problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents between blank lines."""
    return _documents(chunks, form, problems, _BLANK_LINE.split)


def _documents(
    chunks: Iterator[str], form: str, problems: Counter[str], split: Callable[[str], list[str]]
) -> Iterator[Text]:
    buffer = ""
    continues = False
    for chunk in chunks:
        buffer += chunk
        *complete, buffer = split(buffer)
        for document in complete:
            if continues or document.strip():
                yield Text(document, form, continues)
            continues = False
        while len(buffer) > MAX_PIECE_CHARS:
            at = _cut(buffer, problems)
            yield Text(buffer[:at], form, continues)
            buffer = buffer[at:]
            continues = True
    if buffer.strip():
        yield Text(buffer, form, continues)


def _cut(buffer: str, problems: Counter[str]) -> int:
    at = cut_point(buffer, MAX_PIECE_CHARS)
    # The newline may begin a blank line, so leave it to the next piece.
    if buffer[at - 1] == "\n":
        return at - 1
    problems["long_sentence_cuts"] += 1
    return at


def prose(chunks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents of running text. The first megabyte of the file decides between three layouts.

    - Lines wrapped at a fixed width: paragraphs end at blank or short lines, and the file is one document.
    - One paragraph per line, without blank lines or with a blank line after each paragraph: the file is one document.
    - One paragraph per line, with blank lines mostly between groups of paragraphs: each group is a document.
    """
    first = next(chunks, "")
    groups = [block.split("\n") for block in _BLANK_LINE.split(first.strip())]
    lines = [line.strip() for block in groups for line in block]
    grouped = sum(len(block) > 1 for block in groups)

    chunks = itertools.chain([first], chunks)
    if is_wrapped(lines):
        return single_document(chunks, WRAPPED, problems)
    if len(groups) > 1 and 2 * grouped > len(groups):
        return blank_line_documents(chunks, PARAGRAPHS, problems)
    return single_document(chunks, PARAGRAPHS, problems)


def wiki(chunks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields WikiExtractor articles. A first line that repeats the title is dropped."""
    buffer = ""
    inside = continues = False
    ended = False
    while not ended:
        chunk = next(chunks, None)
        ended = chunk is None
        buffer += chunk or ""
        # The last line may be an incomplete tag.
        ready = len(buffer) if ended else buffer.rfind("\n") + 1
        position = 0
        while True:
            tag = (_DOC_CLOSE if inside else _DOC_OPEN).search(buffer, position, ready)
            if not tag:
                break
            if not inside and not ended and buffer.find("\n", tag.end()) < 0:
                break  # The line after the tag may be the title.
            between = buffer[position : tag.start()]
            position = tag.end()
            if inside:
                if between.strip() or continues:
                    yield Text(between, PARAGRAPHS, continues)
                inside = continues = False
            else:
                problems["characters_outside_doc"] += len(between.strip())
                inside = True
                position = _after_title(buffer, tag)
        if not inside and position < ready and not tag:
            problems["characters_outside_doc"] += len(buffer[position:ready].strip())
            position = ready
        buffer = buffer[position:]
        if not inside and len(buffer) > MAX_PIECE_CHARS:
            problems["characters_outside_doc"] += len(buffer.strip())
            buffer = ""
        while inside and len(buffer) > MAX_PIECE_CHARS:
            at = _cut(buffer, problems)
            yield Text(buffer[:at], PARAGRAPHS, continues)
            buffer = buffer[at:]
            continues = True
    if inside:
        problems["unclosed_doc"] += 1
        yield Text(buffer, PARAGRAPHS, continues)


def _after_title(buffer: str, tag: re.Match[str]) -> int:
    title = _TITLE.search(tag.group())
    end = buffer.find("\n", tag.end())
    line = buffer[tag.end() : end if end >= 0 else None]
    if title and line.strip() and line.strip() in (title[1].strip(), html.unescape(title[1]).strip()):
        return tag.end() + len(line)
    return tag.end()
