"""Splitting of text into words and punctuation, as `BasicTokenizer` of google-research/bert does.

The words equal those of google-research/bert if both programs use the same Unicode data
(`unicodedata.unidata_version`). Otherwise, only characters whose category or lower case differs can change the words.
No released vocabulary contains such a character.
"""

import re
import string
import unicodedata
from collections.abc import Callable
from itertools import islice

_CJK = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
_ASCII_WORDS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9 ]")


def _clean(char: str) -> str:
    """Drops control characters, maps whitespace to a space, and puts spaces around CJK characters."""
    category = unicodedata.category(char)
    if char in "\t\n\r" or category == "Zs":
        return " "
    if char == "\ufffd" or category in ("Cc", "Cf"):
        return ""
    return f" {char} " if _CJK.match(char) else char


def _space_punctuation(char: str) -> str:
    is_punctuation = char in string.punctuation or unicodedata.category(char).startswith("P")
    return f" {char} " if is_punctuation else char


def _strip_accents(char: str) -> str:
    return "" if unicodedata.category(char) == "Mn" else _space_punctuation(char)


class _Table(dict[int, str]):
    """Table for `str.translate` that computes the replacement of a character at its first use."""

    def __init__(self, replace: Callable[[str], str]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, code: int) -> str:
        self[code] = self._replace(chr(code))
        return self[code]


class BasicTokenizer:
    """Splitter of text into words and punctuation, equivalent to `BasicTokenizer` of google-research/bert."""

    def __init__(self, lower_case: bool) -> None:
        self._lower_case = lower_case
        self._cleaning = _Table(_clean)
        self._punctuation = _Table(_strip_accents if lower_case else _space_punctuation)

    def words(self, text: str) -> list[str]:
        """Returns the words and punctuation characters of a text, in order."""
        if text.isascii() and text.isprintable():
            return _ASCII_WORDS.findall(text.lower() if self._lower_case else text)
        words = text.translate(self._cleaning).split()
        if self._lower_case:
            # Lower-case word by word, since the lower case of a sigma depends on its neighbors.
            words = [unicodedata.normalize("NFD", word.lower()) for word in words]
        return " ".join(words).translate(self._punctuation).split()

    def words_with_origins(self, text: str) -> list[tuple[str, list[int]]]:
        """Returns each of `words(text)` with the indices in `text` of the characters from which its characters come."""
        # Number of characters into which each character is normalized. Its neighbors can change the result, such as a
        # final sigma or the order of combining marks, but not this number.
        lengths = {char: len("".join(self.words(char))) for char in {*text}}
        origins = (index for index, char in enumerate(text) for _ in range(lengths[char]))
        return [(word, list(islice(origins, len(word)))) for word in self.words(text)]
