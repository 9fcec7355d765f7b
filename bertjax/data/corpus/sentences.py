"""Splitting of documents into sentences."""

import re
import statistics
from collections import Counter
from collections.abc import Iterator

import sentencex

# Layouts of a text: one sentence per line (google-research/bert's input), one paragraph per line, wrapped paragraphs.
LINES = "lines"
PARAGRAPHS = "paragraphs"
WRAPPED = "wrapped"

# Maximum characters in a sentence. Longer ones, usually base64 data or text without punctuation, are divided.
MAX_SENTENCE_CHARS = 8192
# Divide longer paragraphs, because `sentencex` pairs quotes, so an unclosed quote would hide all later sentence ends.
_MAX_PARAGRAPH_CHARS = 1 << 16
# Characters to replace by spaces, because `sentencex` fails next to multi-byte whitespace. U+0085 is removed instead,
# as in BERT's tokenizer.
_WIDE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_SENTENCE_END = re.compile(
    "[.!?:;\u061f\u06d4\u0964\u104b\u1362\u2026\u3002\uff01\uff1f][\"'\u2019\u201d\u300d\u300f\uff09)\\]*_]*$"
)
# Maximum characters of a line in wrapped text, and maximum fraction of longer lines, such as web addresses.
_MAX_WRAPPED_CHARS = 120
_MAX_LONG_LINES = 0.05
# A line ends a paragraph if it ends a sentence and is shorter than this fraction of the longest wrapped line.
_SHORT_LINE = 0.8
# Minimum number of lines, and minimum median of their lengths, of running text in a row of a dataset.
_MIN_WRAPPED_LINES, _MIN_WRAPPED_CHARS = 5, 30


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


def is_wrapped_prose(lines: list[str]) -> bool:
    """Returns whether lines without blank ones are wrapped running text, not a list or a poem.

    Most lines of running text start with a lower-case letter, or in a script without case, and are not short.
    """
    if len(lines) < _MIN_WRAPPED_LINES or not is_wrapped(lines):
        return False
    starts = sum(line[0].isalpha() and not line[0].isupper() for line in lines)
    return 2 * starts > len(lines) and statistics.median(map(len, lines)) >= _MIN_WRAPPED_CHARS
