"""A document's text to sentences, by the form its source gave it."""

import re
from collections import Counter
from collections.abc import Iterator

import sentencex

# One sentence a line (google-research/bert's input); one paragraph a line; paragraphs wrapped at a fixed width.
LINES = "lines"
PARAGRAPHS = "paragraphs"
WRAPPED = "wrapped"
FORMS = (LINES, PARAGRAPHS, WRAPPED)

# No sentence of a text is this long; a base64 blob or a file without line ends is, and is cut at white space.
MAX_SENTENCE_CHARS = 8192
# The splitter pairs quotes and brackets over everything it is given, so one unclosed quote in a paragraph of a
# megabyte would swallow its sentences.
_MAX_PARAGRAPH_CHARS = 1 << 16
# The splitter fails beside white space of several UTF-8 bytes. Only U+0085 among these is no space to BERT: dropped.
_WIDE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_SENTENCE_END = re.compile("[.!?:;\u2026\u3002][\"'\u2019\u201d)\\]*_]*$")
# A wrapped line this much shorter than the longest, and closed by a full stop, ends its paragraph.
_SHORT_LINE = 0.8


def split_sentences(text: str, form: str, problems: Counter[str]) -> list[str]:
    """Sentences of one document, stripped, none empty.

    Args:
      text: the document.
      form: `lines`, `paragraphs` or `wrapped`.
      problems: gains `long_sentence_cuts` and `paragraphs_not_split`.
    """
    if form == LINES:
        sentences = [line.strip() for line in text.split("\n")]
    else:
        if not text.isascii():
            text = _WIDE_SPACES.sub(" ", text).replace("\x85", "")
        paragraphs = _unwrap(text) if form == WRAPPED else text.split("\n")
        sentences = [sentence.strip() for p in paragraphs if p for sentence in _segment(p.strip(), problems)]
    if len(text) <= MAX_SENTENCE_CHARS:
        return [sentence for sentence in sentences if sentence]
    return [piece for sentence in sentences if sentence for piece in _bounded(sentence, problems)]


def cut_point(text: str, limit: int) -> int:
    """Where to cut a text longer than `limit`: after a line, a sentence or white space, or else at the limit."""
    for pattern in ("\n", ". ", " "):
        at = text.rfind(pattern, limit // 2, limit)
        if at >= 0:
            return at + len(pattern)
    for at in range(limit, max(limit - 1024, 0), -1):
        if text[at - 1].isspace():
            return at
    return limit


def _bounded(sentence: str, problems: Counter[str]) -> Iterator[str]:
    while len(sentence) > MAX_SENTENCE_CHARS:
        problems["long_sentence_cuts"] += 1
        at = cut_point(sentence, MAX_SENTENCE_CHARS)
        yield sentence[:at].strip()
        sentence = sentence[at:].strip()
    if sentence:
        yield sentence


def _segment(paragraph: str, problems: Counter[str]) -> list[str]:
    head = []
    while len(paragraph) > _MAX_PARAGRAPH_CHARS:
        at = cut_point(paragraph, _MAX_PARAGRAPH_CHARS)
        head += _segment(paragraph[:at], problems)
        paragraph = paragraph[at:]
    try:
        return head + sentencex.segment("en", paragraph)
    except BaseException as error:
        # A failure inside the Rust splitter reaches Python as an exception that is no Exception and has no module.
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
    """Whether these lines (stripped, not empty) are paragraphs wrapped at a fixed width.

    They are if no line is longer than 120 characters and most of them stop in the middle of a sentence.
    """
    if len(lines) < 2 or max(map(len, lines)) > 120:
        return False
    return sum(bool(_SENTENCE_END.search(line)) for line in lines) * 2 < len(lines)
