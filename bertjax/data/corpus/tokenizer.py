"""Text to word-piece ids, as google-research/bert `tokenization.py` (`FullTokenizer`) makes them, and back.

Everything that tokenizer does is separable at the plain space: cleaning, spacing of CJK characters, lower-casing,
accent stripping, splitting at punctuation and the greedy longest match each look at one word. So a line is split at
spaces and each raw chunk looked up in a bounded cache; only a chunk not seen before runs the whole procedure.

What can still differ from google-research/bert: characters whose Unicode category or lower case changed between the
Unicode version of the Python that made the other ids and the running one (`unicodedata.unidata_version`). Those are
characters new in one of the two versions, and no released vocabulary holds them.
"""

import dataclasses
import functools
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from etils import epath
from tokenizers import models

from bertjax.errors import UsageError
from bertjax.utils.io import as_path, reject_utf16

WORDPIECE = "wordpiece"
SENTENCEPIECE = "sentencepiece"
KINDS = (WORDPIECE, SENTENCEPIECE)
VOCABULARY_FILES = {WORDPIECE: "vocab.txt", SENTENCEPIECE: "spiece.model"}
# In the order a vocabulary trained here gives them: [PAD] is 0.
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARS = 200
CACHE_ENTRIES = 1 << 19

_CONTINUATION = "##"
_WORD_START = "\u2581"
_SENTENCEPIECE_NAMES = {"[PAD]": ("[PAD]", "<pad>"), "[UNK]": ("[UNK]", "<unk>")}
# Longer chunks are rarely met twice and would let a few lines fill the memory.
_MAX_CACHED_CHARS = 32
_ASCII_WORDS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9 ]")
_CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The pieces of one vocabulary file and what is known of them.

    Attributes:
      path: the file, a `vocab.txt` (one piece a line) or a SentencePiece `.model`.
      content: the file's bytes.
      kind: `wordpiece` or `sentencepiece`.
      pieces: all pieces, the index is the id.
      lower_case: whether text is lower-cased (and, for word pieces, stripped of accents) before segmentation.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of [PAD], [UNK], [CLS], [SEP] and [MASK].
      sha256: of the content.
    """

    path: Path | epath.Path
    content: bytes = dataclasses.field(repr=False)
    kind: str
    pieces: tuple[str, ...] = dataclasses.field(repr=False)
    lower_case: bool
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    sha256: str

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD], [UNK], [CLS], [SEP], [MASK], in this order."""
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    @functools.cached_property
    def is_continuation(self) -> np.ndarray:
        """bool [V]: the piece continues the word of the piece before it. False for special pieces."""
        if self.kind == WORDPIECE:
            inside = np.array([piece.startswith(_CONTINUATION) for piece in self.pieces])
        else:
            inside = np.array([not piece.startswith(_WORD_START) for piece in self.pieces])
        inside[list(self.special_ids)] = False
        return inside


def load_vocabulary(
    path: str | os.PathLike, lower_case: bool | None = None, content: bytes | None = None
) -> Vocabulary:
    """Reads a `vocab.txt` (released BERT files work unchanged) or a SentencePiece `.model`.

    Args:
      path: the file, here or at an address; the name's ending `.model` tells SentencePiece.
      lower_case: None decides by the vocabulary: word pieces are lower-cased unless some piece holds an upper-case
        letter; a SentencePiece model does its own normalisation, and text reaches it as it is.
      content: of a `vocab.txt` that is not there.

    Raises:
      UsageError: the file is missing, is no vocabulary, or lacks one of the five special pieces.
    """
    path = as_path(path)
    try:
        data = path.read_bytes() if content is None else content
    except OSError as error:
        raise UsageError(f"cannot read the vocabulary {path}: {error.strerror}") from error
    if path.suffix == ".model":
        kind, pieces = SENTENCEPIECE, _sentencepiece_pieces(path, data)
    else:
        kind, pieces = WORDPIECE, _wordpiece_pieces(path, data)
    # google-research/bert's `load_vocab` takes the last of two equal lines; two of a special piece are a mistake.
    ids = {piece: index for index, piece in enumerate(pieces)}
    special = {}
    for piece in SPECIAL_PIECES:
        names = _SENTENCEPIECE_NAMES.get(piece, (piece,)) if kind == SENTENCEPIECE else (piece,)
        found = [ids[name] for name in names if name in ids]
        if not found:
            raise UsageError(
                f"the vocabulary {path} has no {' or '.join(names)}; BERT needs {', '.join(SPECIAL_PIECES)}"
            )
        if pieces.count(piece) > 1:
            raise UsageError(f"the vocabulary {path} has {piece} on {pieces.count(piece)} lines")
        special[f"{piece[1:-1].lower()}_id"] = found[0]
    if lower_case is None:
        lower_case = kind == WORDPIECE and not any(p != p.lower() for p in pieces if not p.startswith("["))
    return Vocabulary(path, data, kind, pieces, lower_case, **special, sha256=hashlib.sha256(data).hexdigest())


def _wordpiece_pieces(path: os.PathLike, data: bytes) -> tuple[str, ...]:
    reject_utf16(path, data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the vocabulary {path} is not UTF-8 text at byte {error.start}") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(
            f"the vocabulary {path} holds a NUL byte on line {line}, as a damaged file does; copy it again"
        )
    return tuple(line.strip() for line in text.removesuffix("\n").split("\n"))


def _sentencepiece_pieces(path: os.PathLike, data: bytes) -> tuple[str, ...]:
    model = _sentencepiece_model(path, data)
    return tuple(model.id_to_piece(list(range(model.get_piece_size()))))


def _sentencepiece_model(path: os.PathLike, data: bytes):
    import sentencepiece

    try:
        if not data:
            raise RuntimeError("it is empty, which SentencePiece takes for no model yet")
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError) as error:
        raise UsageError(f"the vocabulary {path} is not a SentencePiece model") from error


def is_control(char: str) -> bool:
    """Whether cleaning drops the character (`_is_control` of `tokenization.py`)."""
    return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def is_punctuation(char: str) -> bool:
    """Whether the character stands alone: all ASCII but letters, digits, space and control, and categories P*."""
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


class _Cleaning(dict[int, str]):
    """`str.translate` table, filled as characters are met: drops control characters, spaces out CJK characters."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if code in (0, 0xFFFD) or is_control(char):
            result = ""
        elif char in " \t\n\r" or unicodedata.category(char) == "Zs":
            result = " "
        elif any(first <= code <= last for first, last in _CJK_RANGES):
            result = f" {char} "
        else:
            result = char
        self[code] = result
        return result


class _Splitting(dict[int, str]):
    """`str.translate` table, filled as characters are met: spaces out punctuation, drops accents where asked."""

    def __init__(self, strip_accents: bool):
        super().__init__()
        self._strip_accents = strip_accents

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if self._strip_accents and unicodedata.category(char) == "Mn":
            result = ""
        else:
            result = f" {char} " if is_punctuation(char) else char
        self[code] = result
        return result


class BasicTokenizer:
    """Text to words: `BasicTokenizer` of google-research/bert. Holds tables of the characters met so far."""

    def __init__(self, lower_case: bool):
        self._lower_case = lower_case
        self._cleaning = _Cleaning()
        self._splitting = _Splitting(strip_accents=lower_case)

    def words(self, text: str) -> list[str]:
        """The words and punctuation characters of a text, in order."""
        if text.isascii() and text.isprintable():
            return _ASCII_WORDS.findall(text.lower() if self._lower_case else text)
        words = text.translate(self._cleaning).split()
        if self._lower_case:
            # Word by word: the lower case of a final sigma depends on what stands beside it.
            words = [unicodedata.normalize("NFD", word.lower()) for word in words]
        return " ".join(words).translate(self._splitting).split()


class _Chunks(dict[str, tuple[int, ...]]):
    """Ids by raw chunk of a line, computed when first met; emptied when full."""

    def __init__(self, vocabulary: Vocabulary, entries: int):
        super().__init__()
        self._basic = BasicTokenizer(vocabulary.lower_case)
        self._entries = entries
        self._unk_id = vocabulary.unk_id
        self._ids = {piece: index for index, piece in enumerate(vocabulary.pieces) if len(piece) <= MAX_WORD_CHARS}
        self._model = models.WordPiece(
            {piece: index for index, piece in enumerate(vocabulary.pieces)},
            unk_token=vocabulary.pieces[vocabulary.unk_id],
            max_input_chars_per_word=MAX_WORD_CHARS,
            continuing_subword_prefix=_CONTINUATION,
        )

    def __missing__(self, chunk: str) -> tuple[int, ...]:
        ids: list[int] = []
        for word in self._basic.words(chunk):
            # A word that is a piece is its own longest match; most are.
            if (index := self._ids.get(word)) is not None:
                ids.append(index)
            else:
                ids += self._segment(word)
        # A tuple of integers, unlike a list, costs the garbage collector nothing.
        result = tuple(ids)
        if len(chunk) <= _MAX_CACHED_CHARS:
            if len(self) >= self._entries:
                self.clear()
            self[chunk] = result
        return result

    def _segment(self, word: str) -> list[int]:
        try:
            return [token.id for token in self._model.tokenize(word)]
        except UnicodeEncodeError:
            # Half a surrogate pair, as careless JSON holds them: no vocabulary has it.
            return [self._unk_id]


class Tokenizer:
    """Text to ids and back with one vocabulary. Text that looks like a special piece is ordinary text.

    Not safe to share between threads; each process and thread makes its own.
    """

    def __init__(self, vocabulary: Vocabulary, cache_entries: int = CACHE_ENTRIES):
        """Args: cache_entries bounds the chunks remembered, about 250 bytes each."""
        self.vocabulary = vocabulary
        if vocabulary.kind == WORDPIECE:
            self._chunks = _Chunks(vocabulary, cache_entries)
        else:
            self._model = _sentencepiece_model(vocabulary.path, vocabulary.content)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without [CLS] and [SEP]; empty where only white space and control characters are in it."""
        if self.vocabulary.kind == WORDPIECE:
            # The plain space only: other white space is for the cleaning to judge (U+000B is dropped, not a space).
            return list(chain.from_iterable(map(self._chunks.__getitem__, text.split(" "))))
        return self._model.encode(self._sentencepiece_text(text))

    def sentencepiece_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as of `encode`, and of each the first character and the one after the last, of the lower-cased text."""
        found = self._model.encode(self._sentencepiece_text(text), return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def _sentencepiece_text(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        return text.lower() if self.vocabulary.lower_case else text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of the ids.

        Raises:
          UsageError: one is none of the vocabulary's.
        """
        ids = [int(index) for index in ids]
        if wrong := [index for index in ids if not 0 <= index < self.vocabulary.size]:
            raise UsageError(f"no piece has the id {wrong[0]}; they go from 0 to {self.vocabulary.size - 1}")
        return [self.vocabulary.pieces[index] for index in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text: words separated by one space, continuations joined to their word.

        Raises:
          UsageError: as `pieces`.
        """
        pieces = self.pieces(ids)
        if self.vocabulary.kind == WORDPIECE:
            return " ".join(pieces).replace(" " + _CONTINUATION, "")
        special = set(self.vocabulary.special_ids)
        text = "".join(f" {p} " if int(i) in special else p for i, p in zip(ids, pieces, strict=True))
        return " ".join(text.replace(_WORD_START, " ").split())
