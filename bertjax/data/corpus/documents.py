"""Division of streamed text into documents, and of documents into sentences, with bounded memory.

Documents longer than `MAX_PIECE_CHARS` are yielded in several pieces.
"""

import dataclasses
import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import sentencex

# Layouts of a text: one sentence per line (google-research/bert's input), one paragraph per line, wrapped paragraphs.
LINES = "lines"
PARAGRAPHS = "paragraphs"
WRAPPED = "wrapped"

# Maximum characters in a piece of a document.
MAX_PIECE_CHARS = 1 << 20
# Longer sentences are divided. They are usually base64 data or text without punctuation.
MAX_SENTENCE_CHARS = 8192
# Approximate number of characters and maximum number of texts in a batch.
BATCH_CHARS = 1 << 20
_MAX_BATCH_TEXTS = 8192

_BLANK_LINE = re.compile(r"\n\s*\n")
_DOC_OPEN = re.compile(r"^<doc\b[^\n]*>[^\S\n]*(?:\n|\Z)", re.MULTILINE)
_DOC_CLOSE = re.compile(r"^</doc>", re.MULTILINE)
_TITLE = re.compile(r'\btitle="(.*?)"(?:\s+\w+="|>\s*$)')
# Longer paragraphs are divided: `sentencex` pairs quotes, so an unclosed quote would hide all later sentence ends.
_MAX_PARAGRAPH_CHARS = 1 << 16
# Characters to replace by spaces, because `sentencex` fails next to whitespace of several UTF-8 bytes. U+0085 is not
# one of them: it is removed, as in BERT's tokenizer.
_WIDE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_SENTENCE_END = re.compile("[.!?:;\u2026\u3002][\"'\u2019\u201d)\\]*_]*$")
# A line ends a paragraph if it ends a sentence and is shorter than this fraction of the longest line.
_SHORT_LINE = 0.8


@dataclasses.dataclass(frozen=True)
class Text:
    """A document, or a piece of a document of more than `MAX_PIECE_CHARS` characters.

    Attributes:
      text: text of the source, unchanged.
      layout: `LINES`, `PARAGRAPHS` or `WRAPPED`.
      continues: whether this text continues the document of the previous text.
    """

    text: str
    layout: str
    continues: bool = False


def single_document(blocks: Iterator[str], layout: str, problems: Counter[str]) -> Iterator[Text]:
    """Joins all blocks of text into one document. Yields a long document in several pieces."""
    return _documents(blocks, layout, problems, lambda text: [text])


def blank_line_documents(blocks: Iterator[str], layout: str, problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents of a text in which blank lines separate documents."""
    return _documents(blocks, layout, problems, _BLANK_LINE.split)


def _documents(
    blocks: Iterator[str], layout: str, problems: Counter[str], split: Callable[[str], list[str]]
) -> Iterator[Text]:
    buffer = ""
    continues = False
    for block in blocks:
        buffer += block
        *complete, buffer = split(buffer)
        for document in complete:
            if continues or document.strip():
                yield Text(document, layout, continues)
            continues = False
        while len(buffer) > MAX_PIECE_CHARS:
            at = _split_piece(buffer, problems)
            yield Text(buffer[:at], layout, continues)
            buffer = buffer[at:]
            continues = True
    if buffer.strip():
        yield Text(buffer, layout, continues)


def _split_piece(buffer: str, problems: Counter[str]) -> int:
    """Returns an index at which to split a long document, and counts the split unless it is at a line end."""
    at = split_point(buffer, MAX_PIECE_CHARS)
    # The newline may begin a blank line, so it belongs to the next piece of the text.
    if buffer[at - 1] == "\n":
        return at - 1
    problems["long_sentence_cuts"] += 1
    return at


def prose(blocks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the documents of running text.

    The first megabyte of the file determines its layout, one of these:

    - Lines wrapped at a fixed width: paragraphs end at blank or short lines, and the file is one document.
    - One paragraph per line, without blank lines or with a blank line after each paragraph: the file is one document.
    - One paragraph per line, with blank lines mostly between groups of paragraphs: each group is a document.
    """
    first = next(blocks, "")
    groups = [group.split("\n") for group in _BLANK_LINE.split(first.strip())]
    lines = [line.strip() for group in groups for line in group]
    grouped = sum(len(group) > 1 for group in groups)

    blocks = itertools.chain([first], blocks)
    if is_wrapped(lines):
        return single_document(blocks, WRAPPED, problems)
    if len(groups) > 1 and 2 * grouped > len(groups):
        return blank_line_documents(blocks, PARAGRAPHS, problems)
    return single_document(blocks, PARAGRAPHS, problems)


def wiki(blocks: Iterator[str], problems: Counter[str]) -> Iterator[Text]:
    """Yields the articles of WikiExtractor output. Removes the first line of an article if it repeats the title."""
    buffer = ""
    # Whether the buffer begins inside an article, and whether a piece of this article was already yielded.
    inside = continues = False
    ended = False
    while not ended:
        block = next(blocks, None)
        ended = block is None
        buffer += block or ""
        # Search complete lines only: the last one may be an incomplete tag.
        ready = len(buffer) if ended else buffer.rfind("\n") + 1
        position = 0
        while True:
            tag = (_DOC_CLOSE if inside else _DOC_OPEN).search(buffer, position, ready)
            if not tag:
                break
            if not inside and not ended and buffer.find("\n", tag.end()) < 0:
                break  # Wait for the line after the tag, which `_after_title` compares with the title.
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
            at = _split_piece(buffer, problems)
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


def batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Groups texts into batches of about `BATCH_CHARS` characters."""
    batch: list[Text] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text.text)
        if chars >= BATCH_CHARS or len(batch) >= _MAX_BATCH_TEXTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def split_sentences(text: str, layout: str, problems: Counter[str]) -> list[str]:
    """Returns the sentences of a text, without surrounding whitespace and without empty sentences.

    Args:
      text: a document, or a piece of one.
      layout: `LINES`, `PARAGRAPHS` or `WRAPPED`.
      problems: counter whose `long_sentence_cuts` and `paragraphs_not_split` are incremented.
    """
    if layout == LINES:
        sentences = [line.strip() for line in text.split("\n")]
    else:
        if not text.isascii():
            text = _WIDE_SPACES.sub(" ", text).replace("\x85", "")
        paragraphs = _unwrap(text) if layout == WRAPPED else text.split("\n")
        sentences = [sentence.strip() for p in paragraphs if p for sentence in _segment(p.strip(), problems)]
    if len(text) <= MAX_SENTENCE_CHARS:
        return [sentence for sentence in sentences if sentence]
    return [piece for sentence in sentences if sentence for piece in _split_long(sentence, problems)]


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
        # A Rust panic in `sentencex` is a BaseException of a class that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        problems["paragraphs_not_split"] += 1
        return [*head, paragraph]


def _unwrap(text: str) -> Iterator[str]:
    lines = [line.strip() for line in text.split("\n")]
    width = max(map(len, lines), default=0)
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
    """Returns whether lines are wrapped: none exceeds 120 characters, and most do not end a sentence."""
    if len(lines) < 2 or max(map(len, lines)) > 120:
        return False
    return sum(bool(_SENTENCE_END.search(line)) for line in lines) * 2 < len(lines)
