"""Division of streamed text into documents, with bounded memory.

Documents longer than `MAX_PIECE_CHARS` are yielded in several pieces.
"""

import dataclasses
import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from bertjax.data.corpus.sentences import LINES, PARAGRAPHS, WRAPPED, is_wrapped, is_wrapped_prose, split_point

# Maximum characters in a piece of a document.
MAX_PIECE_CHARS = 1 << 20

_BLANK_LINE = re.compile(r"\n\s*\n")
_LINE_END = re.compile(r"\n")
_DOC_OPEN = re.compile(r"<doc\b.*(?<!</doc)>\s*")
_DOC_CLOSE = "</doc>"
# `<doc>` tag and title line of an article, which WikiExtractor does not escape.
_TAG_AND_TITLE = re.compile(r"^<doc\b.*\n?.*", re.MULTILINE)
_NOT_ESCAPED = re.compile("&(?!amp;|lt;|gt;)")
_TITLE = re.compile(r'\btitle="(.*?)"(?:\s+\w+="|>\s*$)')
# Marker at the start or end of a Project Gutenberg book. It extends to the next *** in the paragraph, or else to the
# end of the line. The license and the publisher's notes are outside the two markers. Books of the 1990s start after
# the "small print", and end with a sentence. Only markers of a start match a group.
_BOOK_MARKER = re.compile(
    r"^(?:\*\*\* ?(?:(START)|END) OF TH(?:E|IS) (?:COPYRIGHTED )?PROJECT GUTENBERG E(?:BOOK|TEXT)"
    r"(?:(?:.|\n(?!\s*\n))*?\*\*\*|.*)"
    r"|(\*END\*? ?THE SMALL PRINT!.*)|End of (?:the |this )?Project Gutenberg.*)",
    re.MULTILINE,
)
# Document separator in corpora of language models. If a file has it at the start or end of a line in the first
# megabyte, it divides the file into documents, and blank lines only separate paragraphs.
_SEPARATOR = "<|endoftext|>"
_SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>|<\|endoftext\|>$", re.MULTILINE)
_ANY_SEPARATOR = re.compile(re.escape(_SEPARATOR))
# Line with the title of an article in WikiText: ` = Title = `. Section headings have several `=`: ` = = Plot = = `.
_TITLE_LINE = re.compile(r"^ ?= [^\n]*(?<!=) = ?$", re.MULTILINE)
_HEADING_LINE = re.compile(r"^ ?(?:= ){2,}(.*?)(?: =){2,} ?$", re.MULTILINE)
# Hyphens and separators within numbers in WikiText: `1 @,@ 000`.
_JOINER = re.compile(r" @([-,.])@ ")
# Markers of Wiki-40B. The first one of an article precedes its title.
_WIKI40B_MARKER = re.compile(r"_START_ARTICLE_\n.*|_START_(SECTION|PARAGRAPH)_|_NEWLINE_")


@dataclasses.dataclass(frozen=True)
class Text:
    """A document, or a piece of a document of more than `MAX_PIECE_CHARS` characters."""

    text: str  # text of the source, unchanged
    layout: str  # `LINES`, `PARAGRAPHS` or `WRAPPED`
    continues: bool = False  # whether this text continues the document of the previous text


def sentence_lines(blocks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents of a text with one sentence per line and blank lines between documents."""
    first = next(blocks, "")
    separator = _ANY_SEPARATOR if _SEPARATOR_LINE.search(first) else _BLANK_LINE
    number, text = 0, Text("", LINES)
    for text in _documents(_divide(itertools.chain([first], blocks), separator), LINES, problems):
        number += not text.continues
        yield text
    problems["undivided_files"] += number == 1 and "\n" in text.text.strip()


def single_lines(blocks: Iterable[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields each line of a text as a document of running text."""
    return _documents(_divide(blocks, _LINE_END), PARAGRAPHS, problems)


def _divide(blocks: Iterable[str], separator: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Divides streamed text at `_BLANK_LINE`, `_LINE_END` or `_ANY_SEPARATOR`. Yields parts for `_documents`."""
    rest = ""
    for block in blocks:
        *complete, text = separator.split(rest + block)
        yield from ((document, True) for document in complete)
        # Carry the end of the text over to the next block, because it may be the start of a separator.
        at = len(text.rstrip()) if separator is _BLANK_LINE else max(0, len(text) - len(_SEPARATOR) + 1)
        yield text[:at], False
        rest = text[at:]
    yield rest, True


def _documents(parts: Iterable[tuple[str, bool]], layout: str, problems: Counter[str]) -> Iterator[Text]:
    """Joins consecutive parts of a text into documents. A part is a pair (text, whether it ends a document)."""
    buffer = ""
    continues = False
    for part, is_end in parts:
        buffer += part
        if is_end:
            if continues or buffer.strip():
                yield Text(buffer, layout, continues)
            buffer, continues = "", False
        while len(buffer) > MAX_PIECE_CHARS:
            at = split_point(buffer, MAX_PIECE_CHARS)
            if buffer[at - 1] == "\n":
                at -= 1  # The newline may begin a blank line, so it belongs to the next piece of the text.
            else:
                problems["long_sentence_cuts"] += 1
            yield Text(buffer[:at], layout, continues)
            buffer = buffer[at:]
            continues = True
    if buffer.strip():
        yield Text(buffer, layout, continues)


def prose(blocks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents of running text.

    The first megabyte of the file determines its layout, one of these:

    - Lines wrapped at a fixed width: paragraphs end at blank or short lines, and the file is one document.
    - One paragraph per line, without blank lines or with a blank line after each paragraph: the file is one document.
    - One paragraph per line, with blank lines mostly between groups of paragraphs: each group is a document.

    With any layout, each Project Gutenberg book (without its license), each text between two `<|endoftext|>`, and each
    WikiText article is a document.
    """
    first = next(blocks, "")
    blocks = itertools.chain([first], blocks)
    marker = _BOOK_MARKER.search(first)
    is_divided = True
    if marker is not None and marker.lastindex:
        blocks = _books(blocks)
    elif _TITLE_LINE.search(first):
        blocks = _articles(blocks, problems)
    else:
        is_divided = _SEPARATOR_LINE.search(first) is not None
    first = next(blocks, "")
    groups = [group.split("\n") for group in _BLANK_LINE.split(first.replace(_SEPARATOR, "\n").strip())]
    lines = [line.strip() for group in groups for line in group]
    with_paragraphs = sum(len(group) > 1 for group in groups)
    blocks = itertools.chain([first], blocks)
    layout = WRAPPED if is_wrapped(lines) else PARAGRAPHS
    if is_divided:
        return _documents(_divide(blocks, _ANY_SEPARATOR), layout, problems)
    if layout == PARAGRAPHS and len(groups) > 1 and 2 * with_paragraphs > len(groups):
        return _documents(_divide(blocks, _BLANK_LINE), layout, problems)
    return _documents(((block, False) for block in blocks), layout, problems)


def _books(blocks: Iterable[str]) -> Iterator[str]:
    """Yields the text of each Project Gutenberg book in a file, followed by `_SEPARATOR`."""
    rest, inside = "", False
    for block in itertools.chain(blocks, ["\n\n"]):
        text, newline, rest = (rest + block).rpartition("\n")
        start = text.rfind("\n***")
        if start >= 0 and "\n\n" not in text[start:]:  # perhaps an incomplete `_BOOK_MARKER`
            text, newline, rest = text[:start], "", text[start:] + newline + rest
        book, at = "", 0
        for marker in _BOOK_MARKER.finditer(text):
            book += text[at : marker.start()] + _SEPARATOR if inside else ""
            inside, at = bool(marker.lastindex), marker.end()
        yield book + text[at:] + newline if inside else book


def _articles(blocks: Iterable[str], problems: Counter[str]) -> Iterator[str]:
    """Yields the text of a WikiText file, with `_SEPARATOR` instead of the title of each article."""
    rest = ""
    for block in itertools.chain(blocks, ["\n"]):
        text, newline, rest = (rest + block).rpartition("\n")
        problems["unknown_words"] += text.count("<unk>")
        text = _JOINER.sub(r"\1", _HEADING_LINE.sub(r"\1", _TITLE_LINE.sub(_SEPARATOR, text)))
        yield text + newline


def is_title(line: str) -> bool:
    """Returns whether a line is the title of an article in WikiText."""
    return _TITLE_LINE.fullmatch(line.rstrip("\n")) is not None


def rows(texts: Iterable[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields each row of a dataset as a document. A row with Project Gutenberg books becomes one document per book.

    Wiki-40B articles lose their title, and line breaks replace their markers.
    """
    for text in texts:
        marker = _BOOK_MARKER.search(text)
        if marker is not None and marker.lastindex:
            yield from prose(iter([text]), problems)
            continue
        if text.lstrip().startswith("_START_ARTICLE_\n"):
            text = _WIKI40B_MARKER.sub("\n", text)
        lines = [line for line in map(str.strip, text.split("\n")) if line]
        yield Text(text, WRAPPED if is_wrapped_prose(lines) else PARAGRAPHS)


def wiki(blocks: Iterable[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the articles of WikiExtractor output. Removes the first line of an article if it repeats the title.

    WikiExtractor 3 escapes `&`, `<` and `>` by default. If all `&` in the first megabyte are escaped, the characters
    are restored.
    """
    blocks = iter(blocks)
    first = next(blocks, "")
    text = _TAG_AND_TITLE.sub("", first.rpartition("\n")[0])  # The last line may be incomplete.
    is_escaped = "&" in text and not _NOT_ESCAPED.search(text)

    def parts() -> Iterator[tuple[str, bool]]:
        inside = False
        titles: tuple[str, ...] = ()  # Lines to remove at the start of an article.
        for line in _lines(itertools.chain([first], blocks)):
            if inside and (line.startswith(_DOC_CLOSE) or _DOC_OPEN.fullmatch(line)):
                inside = False
                problems["unclosed_doc"] += not line.startswith(_DOC_CLOSE)
                yield "", True
                line = line.removeprefix(_DOC_CLOSE)
            if inside:
                yield "\n" if line.strip() in titles else html.unescape(line) if is_escaped else line, False
                titles = ()
            elif _DOC_OPEN.fullmatch(line):
                inside = True
                title = _TITLE.search(line)
                titles = (title[1].strip(), html.unescape(title[1]).strip()) if title and title[1].strip() else ()
            else:
                problems["characters_outside_doc"] += len(line.strip())
        problems["unclosed_doc"] += inside

    return _documents(parts(), PARAGRAPHS, problems)


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yields lines with their line endings. Lines of more than `MAX_PIECE_CHARS` characters are yielded in parts."""
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).split("\n")
        yield from (f"{line}\n" for line in lines)
        if len(rest) > MAX_PIECE_CHARS:
            yield rest
            rest = ""
    yield rest


def grouped(texts: Iterable[Text], min_chars: int, divide_documents: bool = False) -> Iterator[Iterator[Text]]:
    """Groups consecutive texts. Once a group has `min_chars` characters, the next document starts a new group.

    With `divide_documents`, the next text starts a new group, even if it continues a document. Read each group before
    the next one, as with `itertools.groupby`.
    """
    number = chars = 0

    def group_of(text: Text) -> int:
        nonlocal number, chars
        if chars >= min_chars and (divide_documents or not text.continues):
            number, chars = number + 1, 0
        chars += len(text.text)
        return number

    return (group for _, group in itertools.groupby(texts, group_of))


def with_spaces(sentences: Sequence[str], text: Text) -> list[str]:
    """Adds leading spaces to the sentences of a text, for byte-level BPE.

    The first sentence of a document and the lines of the layout `LINES` get no space.
    """
    first = len(sentences) if text.layout == LINES else int(not text.continues)
    return [*sentences[:first], *(f" {sentence}" for sentence in sentences[first:])]
