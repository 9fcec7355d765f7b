"""Division of a document's text into sentences."""

import re
from collections import Counter
from collections.abc import Iterator

import sentencex

# Forms of text: one sentence per line (google-research/bert's input), one paragraph per line, wrapped paragraphs.
LINES = "lines"
PARAGRAPHS = "paragraphs"
WRAPPED = "wrapped"
FORMS = (LINES, PARAGRAPHS, WRAPPED)

# Longer sentences are cut. They are usually base64 data or text without punctuation.
MAX_SENTENCE_CHARS = 8192
# `sentencex` pairs quotes and brackets, so an unclosed quote in a very long paragraph would hide its sentence ends.
_MAX_PARAGRAPH_CHARS = 1 << 16
# `sentencex` fails next to white space of several UTF-8 bytes, so such characters are replaced by spaces. U+0085 is
# dropped, as by BERT's tokenizer.
_WIDE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_SENTENCE_END = re.compile("[.!?:;\u2026\u3002][\"'\u2019\u201d)\\]*_]*$")
# A line that ends a sentence and is shorter than this fraction of the longest line ends a paragraph.
_SHORT_LINE = 0.8


def split_sentences(text: str, form: str, problems: Counter[str]) -> list[str]:
    """Returns the nonempty sentences of a text, stripped.

    Args:
      text: a document, or a piece of one.
      form: `LINES`, `PARAGRAPHS` or `WRAPPED`.
      problems: counter whose `long_sentence_cuts` and `paragraphs_not_split` are incremented.
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
    return [piece for sentence in sentences if sentence for piece in _cut_long(sentence, problems)]


def cut_point(text: str, limit: int) -> int:
    """Returns where to cut a text: an index of at most `limit`, preferably after a line, sentence or word."""
    for pattern in ("\n", ". ", " "):
        at = text.rfind(pattern, limit // 2, limit)
        if at >= 0:
            return at + len(pattern)
    for at in range(limit, max(limit - 1024, 0), -1):
        if text[at - 1].isspace():
            return at
    return limit


def _cut_long(sentence: str, problems: Counter[str]) -> Iterator[str]:
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
    """Returns whether a text is wrapped: lines have at most 120 characters, and most lines end inside a sentence."""
    if len(lines) < 2 or max(map(len, lines)) > 120:
        return False
    return sum(bool(_SENTENCE_END.search(line)) for line in lines) * 2 < len(lines)
