"""Tokenizer: text to token ids, as in `tokenization.py` of google-research/bert, and token ids to text."""

import copy
import functools
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat

import numpy as np
import tokenizers
from tokenizers import models, normalizers

from bertjax.data.corpus.vocabulary import BYTE_LEVEL_START, CONTINUATION, TOKENIZER_JSON, WORDPIECE, Vocabulary
from bertjax.errors import UsageError, quoted
from bertjax.utils.process_pool import available_cores

# Maximum number of cached chunks, about 250 bytes each, per process. `prepare` runs one process per core.
_CACHE_ENTRIES = max(1 << 15, (1 << 20) // available_cores())
# Do not cache longer chunks, because they rarely occur twice and would fill the memory.
_MAX_CACHED_CHARS = 32

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
    """Splitter of text into words and punctuation, equivalent to `BasicTokenizer` of google-research/bert.

    The words equal those of google-research/bert if both programs use the same Unicode data
    (`unicodedata.unidata_version`). Otherwise, only words with characters whose category or lower case differs between
    the versions can differ. No released vocabulary contains such a character.
    """

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

    def words_with_origins(self, text: str) -> list[tuple[str, Sequence[int]]]:
        """Returns (word, origins) for each of `words(text)`. Character i of the word is from `text[origins[i]]`."""
        if text.isascii() and text.isprintable():
            matches = _ASCII_WORDS.finditer(text.lower() if self._lower_case else text)
            return [(match[0], range(*match.span())) for match in matches]
        # Number of normalized characters for each character. Neighbors can change which characters these are, as for a
        # final sigma or the order of combining marks, but not their number.
        lengths = {char: len("".join(self.words(char))) for char in {*text}}
        origins = (index for index, char in enumerate(text) for _ in range(lengths[char]))
        return [(word, list(islice(origins, len(word)))) for word in self.words(text)]


def wordpiece_model(vocabulary: Vocabulary, max_word_chars: int) -> models.WordPiece:
    """Returns a WordPiece model with the pieces of a vocabulary. Words longer than `max_word_chars` become [UNK]."""
    return models.WordPiece(
        {piece: index for index, piece in enumerate(vocabulary.pieces)},
        unk_token=vocabulary.pieces[vocabulary.unk_id],
        max_input_chars_per_word=max_word_chars,
        continuing_subword_prefix=CONTINUATION,
    )


class _ChunkIds(dict[str, tuple[int, ...]]):
    """Bounded cache of the token ids of chunks (text between spaces). The cache is cleared when it is full."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._basic = BasicTokenizer(vocabulary.lower_case)
        self._unk_id = vocabulary.unk_id
        max_chars = vocabulary.max_word_chars
        self._ids = {piece: index for index, piece in enumerate(vocabulary.pieces) if len(piece) <= max_chars}
        self._wordpiece = wordpiece_model(vocabulary, max_chars)

    def __missing__(self, chunk: str) -> tuple[int, ...]:
        ids: list[int] = []
        for word in self._basic.words(chunk):
            # Look the word up first, because most words are pieces of the vocabulary and thus their own longest match.
            if (index := self._ids.get(word)) is not None:
                ids.append(index)
                continue
            try:
                ids += [token.id for token in self._wordpiece.tokenize(word)]
            except UnicodeEncodeError:
                # The word has an unpaired surrogate, which no vocabulary contains.
                ids.append(self._unk_id)
        # Use a tuple, because the garbage collector does not track tuples of integers, unlike lists.
        entry = tuple(ids)
        if len(chunk) <= _MAX_CACHED_CHARS:
            if len(self) >= _CACHE_ENTRIES:
                self.clear()
            self[chunk] = entry
        return entry


class Tokenizer:
    """Tokenizer with a WordPiece or SentencePiece vocabulary, or with a `tokenizer.json`.

    `encode` and `encode_all` treat special tokens in a text, such as [MASK], as ordinary text. The other methods
    recognize them. A `tokenizer.json` always recognizes its special and added tokens.

    Not thread-safe; each thread needs its own tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._special_ids = {vocabulary.pieces[index]: index for index in vocabulary.special_ids}
        self._special_pieces = re.compile(f"({'|'.join(map(re.escape, self._special_ids))})")
        if vocabulary.kind == WORDPIECE:
            self._chunk_ids = _ChunkIds(vocabulary)
        else:
            self._engine = vocabulary.engine()

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without [CLS] and [SEP]."""
        if not isinstance(text, str):
            raise UsageError(f"text must be a str, not {quoted(text)}; encode one text at a time")
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text. With a `tokenizer.json`, this is faster than `encode` for each text."""
        if self.vocabulary.kind == WORDPIECE:
            # Split only at spaces. Cleaning removes some other whitespace, such as U+000B, so the characters around it
            # belong to one word.
            return [list(chain.from_iterable(map(self._chunk_ids.__getitem__, text.split(" ")))) for text in texts]
        if self.vocabulary.kind == TOKENIZER_JSON:
            texts = [_without_surrogates(text) for text in texts]
            return [encoding.ids for encoding in self._engine.encode_batch_fast(texts, add_special_tokens=False)]
        return [self._engine.encode(self._sentencepiece_text(text)) for text in texts]

    def encode_with_special(self, text: str) -> list[int]:
        """Returns the token ids of a text. Special tokens in the text, such as [MASK], become single tokens."""
        return list(chain.from_iterable(ids for _, _, ids in self._parts(text)))

    def encode_all_with_special(self, texts: Sequence[str], lower_case: bool = False) -> list[list[int]]:
        """Returns `encode_with_special(text)` for each text. A `tokenizer.json` encodes texts in parallel.

        `lower_case` converts texts to lower case first. Special tokens keep their case, as do added tokens of a
        `tokenizer.json` with `normalized=false`.
        """
        if self.vocabulary.kind == TOKENIZER_JSON:
            return (self._lower_cased if lower_case else self).encode_all(texts)
        return [self.encode_with_special(self._lower(text) if lower_case else text) for text in texts]

    def encode_word(self, word: str) -> list[int]:
        """Encodes one word of a text that is already split into words, as if the word followed a space."""
        return self.encode_with_special(f" {word}" if self.missing_prefix else word)

    @functools.cached_property
    def missing_prefix(self) -> str:
        """Prefix that gives the first word of a text the same pieces as later words ("": none needed)."""
        marker, starts_word = self.vocabulary.word_marker
        if self.vocabulary.kind != TOKENIZER_JSON or not starts_word or self.encode("a") == self.encode(" a"):
            return ""
        # "a" and " a" also differ if a normalizer marks both the start of a text and a space. Then no prefix is needed.
        alone, later = self.encode("a"), self.encode("b a")
        if alone and self.vocabulary.pieces[alone[0]].startswith(marker) and later[-len(alone) :] == alone:
            return ""
        # ByteLevel replaces spaces by its marker after the prefix is added, so the prefix is a space. Other tokenizers
        # replace spaces before the prefix is added, so the prefix is the marker itself.
        return " " if marker == BYTE_LEVEL_START else marker

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of `encode_with_special`, and the start and end (exclusive) character offset of each piece.

        The offsets are int64 [pieces, 2]. The span of a piece may be empty.
        """
        all_ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, part, ids in self._parts(text):
            all_ids += ids
            if part in self._special_ids:
                part_spans = [(0, len(part))]
            elif self.vocabulary.kind == WORDPIECE:
                part_spans = self._wordpiece_spans(part)
            elif self.vocabulary.kind == TOKENIZER_JSON:
                offsets = self._engine.encode(_without_surrogates(part), add_special_tokens=False).offsets
                part_spans = [_without_space(part, first, end) for first, end in offsets]
            else:
                part_spans = self._sentencepiece_spans(part)
            spans += [(start + first, start + end) for first, end in part_spans]
        return all_ids, np.array(spans, np.int64).reshape(-1, 2)

    def word_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and end (exclusive) character offset of each word and punctuation character, in order.

        Special tokens and the added tokens of a `tokenizer.json` are one word each.
        """
        tokens = [match.span() for match in self._special_pieces.finditer(text)]
        if self.vocabulary.kind == TOKENIZER_JSON:
            added = self._engine.get_added_tokens_decoder()
            ids, spans = self.encode_with_offsets(text)
            tokens = [
                (first, end)
                for index, (first, end) in zip(ids, spans.tolist(), strict=True)
                # An unknown word also has the id of [UNK]. Only a literal [UNK] in the text is an added token.
                if index in added and (index != self.vocabulary.unk_id or text[first:end] == added[index].content)
            ]
        words: list[tuple[int, int]] = []
        basic, start = BasicTokenizer(lower_case=False), 0
        for first, end in [*tokens, (len(text), len(text))]:
            found = basic.words_with_origins(text[start:first])
            words += [(start + origins[0], start + origins[-1] + 1) for _, origins in found]
            words += [(first, end)] * (first < end)
            start = end
        return words

    def _parts(self, text: str) -> Iterator[tuple[int, str, list[int]]]:
        """Splits a text at special tokens, and yields the start, text and token ids of each part."""
        if self.vocabulary.kind == TOKENIZER_JSON:
            yield 0, text, self.encode(text)
            return
        start = 0
        for part in self._special_pieces.split(text):
            yield start, part, [self._special_ids[part]] if part in self._special_ids else self.encode(part)
            start += len(part)

    @functools.cached_property
    def _lower_cased(self) -> "Tokenizer":
        lower_cased = copy.copy(self)
        lower_cased._engine = self.vocabulary.engine()
        prepend_lower_case(lower_cased._engine)
        return lower_cased

    def _lower(self, text: str) -> str:
        # Lower-case each character without regard to its neighbors, as Hugging Face's normalizer `Lowercase` does.
        parts = self._special_pieces.split(text)
        return "".join(part if part in self._special_ids else "".join(map(str.lower, part)) for part in parts)

    def _wordpiece_spans(self, text: str) -> list[tuple[int, int]]:
        spans = []
        for word, origins in BasicTokenizer(self.vocabulary.lower_case).words_with_origins(text):
            ids, lengths = self._chunk_ids[word], [len(word)]  # The only piece of a word, or [UNK], covers the word.
            if len(ids) > 1:
                lengths = [len(piece.removeprefix(CONTINUATION)) for piece in self.pieces(ids)]
            for length in lengths:
                first, end = origins[0], origins[length - 1] + 1
                while end < len(text) and unicodedata.category(text[end]) == "Mn":
                    end += 1
                spans.append((first, end))
                origins = origins[length:]
        return spans

    def _sentencepiece_spans(self, text: str) -> list[tuple[int, int]]:
        encoded = self._engine.encode(self._sentencepiece_text(text), return_type="offset_mapping")
        # Lower-casing may turn one character into two, for example U+0130.
        lengths = (len(char.lower()) for char in text) if self.vocabulary.lower_case else repeat(1, len(text))
        origins = [index for index, length in enumerate(lengths) for _ in range(length)]
        spans = []
        for start, stop in encoded["offsets"]:
            first = origins[start] if start < len(origins) else len(text)
            spans.append(_without_space(text, first, origins[stop - 1] + 1 if stop > start else first))
        return spans

    def _sentencepiece_text(self, text: str) -> str:
        text = _without_surrogates(text)
        return text.lower() if self.vocabulary.lower_case else text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Converts token ids to pieces of the vocabulary."""
        ids = list(ids)
        if invalid := [index for index in ids if not 0 <= index < self.vocabulary.size]:
            raise UsageError(f"token id {invalid[0]} is outside the vocabulary of {self.vocabulary.size} tokens")
        return [self.vocabulary.pieces[index] for index in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Converts token ids to text, with one space between words. A `tokenizer.json` has its own spacing."""
        pieces = self.pieces(ids)
        if self.vocabulary.kind == WORDPIECE:
            return " ".join(pieces).replace(" " + CONTINUATION, "")
        if self.vocabulary.kind == TOKENIZER_JSON:
            return self._engine.decode([int(index) for index in ids], skip_special_tokens=False)
        special_ids = set(self.vocabulary.special_ids)
        text = "".join(f" {p} " if int(i) in special_ids else p for i, p in zip(ids, pieces, strict=True))
        return " ".join(text.replace(self.vocabulary.word_marker[0], " ").split())


def prepend_lower_case(engine: tokenizers.Tokenizer) -> None:
    """Makes a tokenizer convert texts to lower case before its other normalizations."""
    engine.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [engine.normalizer])])


def _without_surrogates(text: str) -> str:
    """Replaces unpaired surrogates, which UTF-8 cannot represent, by `?`."""
    return text.encode("utf-8", "replace").decode()


def _without_space(text: str, first: int, end: int) -> tuple[int, int]:
    """Trims whitespace from both ends of a span, since a piece or an added token may include the space before it."""
    first += len(text[first:end]) - len(text[first:end].lstrip())
    return first, first + len(text[first:end].rstrip())
