"""Division of streamed text into documents, and of documents into sentences, with bounded memory.

Documents longer than `MAX_PIECE_CHARS` are yielded in several pieces.
"""

import dataclasses
import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import sentencex

# Layouts of a text: one sentence per line (google-research/bert's input), one paragraph per line, wrapped paragraphs.
LINES = "lines"
PARAGRAPHS = "paragraphs"
WRAPPED = "wrapped"

# Maximum characters in a piece of a document.
MAX_PIECE_CHARS = 1 << 20
# Maximum characters in a sentence. Longer ones, usually base64 data or text without punctuation, are divided.
MAX_SENTENCE_CHARS = 8192

_BLANK_LINE = re.compile(r"\n\s*\n")
_LINE_END = re.compile(r"\n")
_DOC_OPEN = re.compile(r"<doc\b.*(?<!</doc)>\s*")
_DOC_CLOSE = "</doc>"
# `<doc>` tag and title line of an article, which WikiExtractor does not escape.
_TAG_AND_TITLE = re.compile(r"^<doc\b.*\n?.*", re.MULTILINE)
_NOT_ESCAPED = re.compile("&(?!amp;|lt;|gt;)")
_TITLE = re.compile(r'\btitle="(.*?)"(?:\s+\w+="|>\s*$)')
# Marker at the start or end of a Project Gutenberg book. It extends to the next *** in the paragraph, or else to the
# end of the line. The license and the publisher's notes are outside the two markers.
_BOOK_MARKER = re.compile(
    r"^\*\*\* ?(START|END) OF TH(?:E|IS) PROJECT GUTENBERG EBOOK(?:(?:.|\n(?!\s*\n))*?\*\*\*|.*)", re.MULTILINE
)
# Document separator in corpora of language models. If a file has it at the start or end of a line in the first
# megabyte, it divides the file into documents, and blank lines only separate paragraphs.
_SEPARATOR = "<|endoftext|>"
_SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>|<\|endoftext\|>$", re.MULTILINE)
_ANY_SEPARATOR = re.compile(re.escape(_SEPARATOR))
# Line with the title of an article in WikiText: ` = Title = `. Section headings have several `=`: ` = = Plot = = `.
_TITLE_LINE = re.compile(r"^ ?= [^\n]*(?<!=) = ?$", re.MULTILINE)
# Markers of Wiki-40B. The first one of an article precedes its title.
_WIKI40B_MARKER = re.compile(r"_START_ARTICLE_\n.*|_START_(SECTION|PARAGRAPH)_|_NEWLINE_")
# Divide longer paragraphs, because `sentencex` pairs quotes, so an unclosed quote would hide all later sentence ends.
_MAX_PARAGRAPH_CHARS = 1 << 16
# Characters to replace by spaces, because `sentencex` fails next to multi-byte whitespace. U+0085 is removed instead,
# as in BERT's tokenizer.
_WIDE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_SENTENCE_END = re.compile("[.!?:;\u2026\u3002\uff01\uff1f][\"'\u2019\u201d\u300d\u300f\uff09)\\]*_]*$")
# Maximum characters of a line in wrapped text, and maximum fraction of longer lines, such as web addresses.
_MAX_WRAPPED_CHARS = 120
_MAX_LONG_LINES = 0.05
# A line ends a paragraph if it ends a sentence and is shorter than this fraction of the longest wrapped line.
_SHORT_LINE = 0.8


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
    return _documents(_divide(itertools.chain([first], blocks), separator), LINES, problems)


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
    if marker is not None and marker[1] == "START":
        blocks = _books(blocks)
    elif _TITLE_LINE.search(first):
        blocks = _articles(blocks)
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
            inside, at = marker[1] == "START", marker.end()
        yield book + text[at:] + newline if inside else book


def _articles(blocks: Iterable[str]) -> Iterator[str]:
    """Yields the text of a WikiText file, with `_SEPARATOR` before the title of each article."""
    rest = ""
    for block in itertools.chain(blocks, ["\n"]):
        text, newline, rest = (rest + block).rpartition("\n")
        yield _TITLE_LINE.sub(rf"{_SEPARATOR}\g<0>", text) + newline


def is_title(line: str) -> bool:
    """Returns whether a line is the title of an article in WikiText."""
    return _TITLE_LINE.fullmatch(line.rstrip("\n")) is not None


def without_markers(text: str) -> str:
    """Removes the title of a Wiki-40B article, and replaces its markers by line breaks. Does not change other texts."""
    return _WIKI40B_MARKER.sub("\n", text) if text.lstrip().startswith("_START_ARTICLE_\n") else text


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


def split_sentences(text: str, layout: str, problems: Counter[str]) -> list[str]:
    """Returns the sentences of a text, without surrounding whitespace and without empty sentences."""
    if layout == LINES:
        sentences = [line.strip() for line in text.split("\n")]
    else:
        if not text.isascii():
            text = _WIDE_SPACES.sub(" ", text).replace("\x85", "")
        paragraphs = _unwrap(text) if layout == WRAPPED else text.split("\n")
        sentences = [sentence.strip() for p in paragraphs if p for sentence in _segment(p.strip(), problems)]
    return [piece for sentence in sentences for piece in _split_long(sentence, problems)]


def with_spaces(sentences: Sequence[str], text: Text) -> list[str]:
    """Adds leading spaces to the sentences of a text, for byte-level BPE.

    The first sentence of a document and the lines of the layout `LINES` get no space.
    """
    first = len(sentences) if text.layout == LINES else int(not text.continues)
    return [*sentences[:first], *(f" {sentence}" for sentence in sentences[first:])]


def split_point(text: str, limit: int) -> int:
    """Returns an index of at most `limit` at which to split a text, preferably after a line, sentence or word."""
    for pattern in ("\n", ". ", " "):
        at = text.rfind(pattern, limit // 2, limit)
        if at >= 0:
            return at + len(pattern)
    for at in range(limit, max(limit - 1024, 0), -1):
        if text[at - 1].isspace():
            return at
    return limit


def _split_long(sentence: str, problems: Counter[str]) -> Iterator[str]:
    while len(sentence) > MAX_SENTENCE_CHARS:
        problems["long_sentence_cuts"] += 1
        at = split_point(sentence, MAX_SENTENCE_CHARS)
        yield sentence[:at].strip()
        sentence = sentence[at:].strip()
    if sentence:
        yield sentence


def _segment(paragraph: str, problems: Counter[str]) -> list[str]:
    head = []
    while len(paragraph) > _MAX_PARAGRAPH_CHARS:
        at = split_point(paragraph, _MAX_PARAGRAPH_CHARS)
        head += _segment(paragraph[:at], problems)
        paragraph = paragraph[at:]
    try:
        return head + sentencex.segment("en", paragraph)
    except BaseException as error:
        # Compare the class name, because a Rust panic in `sentencex` raises an exception that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        problems["paragraphs_not_split"] += 1
        return [*head, paragraph]


def _unwrap(text: str) -> Iterator[str]:
    lines = [line.strip() for line in text.split("\n")]
    width = max((len(line) for line in lines if len(line) <= _MAX_WRAPPED_CHARS), default=0)
    paragraph: list[str] = []
    for line in lines:
        if line:
            paragraph.append(line)
        if paragraph and (not line or (len(line) < _SHORT_LINE * width and _SENTENCE_END.search(line))):
            yield " ".join(paragraph)
            paragraph = []
    if paragraph:
        yield " ".join(paragraph)


def is_wrapped(lines: list[str]) -> bool:
    """Returns whether lines are wrapped: nearly all have at most 120 characters, and most do not end a sentence."""
    long = sum(len(line) > _MAX_WRAPPED_CHARS for line in lines)
    if len(lines) < 2 or long > _MAX_LONG_LINES * len(lines):
        return False
    return sum(bool(_SENTENCE_END.search(line)) for line in lines) * 2 < len(lines)
