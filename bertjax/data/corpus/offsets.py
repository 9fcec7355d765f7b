"""Where each piece of a tokenised text stands in it, to the character."""

import unicodedata
from itertools import repeat

import numpy as np

from bertjax.data.corpus.tokenizer import WORDPIECE, BasicTokenizer, Tokenizer


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> tuple[list[int], np.ndarray]:
    """Ids of a text, equal to `tokenizer.encode(text)`, and the characters each of them covers.

    Returns:
      ids, and int64 [pieces, 2]: first character and the one after the last; of SentencePiece's, some cover none.
    """
    if tokenizer.vocabulary.kind != WORDPIECE:
        return _sentencepiece_offsets(tokenizer, text)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    basic = BasicTokenizer(tokenizer.vocabulary.lower_case)
    start = 0
    for chunk in text.split(" "):
        here = tokenizer.encode(chunk)
        if here:
            ids += here
            spans += _chunk_spans(tokenizer, basic, chunk, start, here)
        start += len(chunk) + 1
    return ids, np.array(spans, np.int64).reshape(-1, 2)


def _chunk_spans(
    tokenizer: Tokenizer, basic: BasicTokenizer, chunk: str, start: int, ids: list[int]
) -> list[tuple[int, int]]:
    """Characters of each piece of a part of the text without plain spaces, which starts at `start`."""
    if len(ids) == 1 and chunk.isascii() and chunk.isprintable():
        return [(start, start + len(chunk))]
    words = basic.words(chunk)
    # The characters that are left of each one, if it stood alone: what the tokenizer makes of the whole but for the
    # lower case of a final sigma, which is as long, and for marks that change places.
    if chunk.isascii() and chunk.isprintable():
        origins = range(len(chunk))
    else:
        origins = [index for index, char in enumerate(chunk) for _ in "".join(basic.words(char))]
    if len(origins) != sum(map(len, words)):
        return [(start, start + len(chunk))] * len(ids)
    spans = []
    position = 0
    taken = 0
    for word in words:
        pieces = tokenizer.pieces(ids[taken : taken + len(tokenizer.encode(word))])
        lengths = [len(piece.removeprefix("##")) for piece in pieces]
        if sum(lengths) != len(word):
            # An unknown word is one piece, whatever its name.
            lengths = [len(word)]
        taken += len(pieces)
        for length in lengths:
            covered = origins[position : position + length]
            spans.append((start + covered[0], start + _end(chunk, covered[-1])))
            position += length
    return spans


def _end(chunk: str, last: int) -> int:
    """The character after `last` and the combining marks that belong to it."""
    end = last + 1
    while end < len(chunk) and unicodedata.category(chunk[end]) == "Mn":
        end += 1
    return end


def _sentencepiece_offsets(tokenizer: Tokenizer, text: str) -> tuple[list[int], np.ndarray]:
    ids, offsets = tokenizer.sentencepiece_offsets(text)
    # Lower case of one character may be two, as of \u0130.
    lengths = (len(char.lower()) for char in text) if tokenizer.vocabulary.lower_case else repeat(1, len(text))
    origins = [index for index, length in enumerate(lengths) for _ in range(length)]
    spans = []
    for start, end in offsets:
        first = origins[start] if start < len(origins) else len(text)
        after = origins[end - 1] + 1 if end > start else first
        # A piece has the space before its word; one that is nothing else covers nothing, where its word begins.
        while first < after and text[first].isspace():
            first += 1
        spans.append((first, after))
    return ids, np.array(spans, np.int64).reshape(-1, 2)
