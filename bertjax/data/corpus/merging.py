"""Finished parts of a corpus, one after the other, as the arrays of one split. Memory stays bounded.

A part holds whole documents in three arrays as those of a split (see `store`), which count from its own start.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from bertjax.data.corpus import store

_BLOCK_ENTRIES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive documents of a part.

    Attributes:
      part: where its arrays are, for whoever reads them.
      documents, sentences, tokens: of the part's, the first and the one after the last.
    """

    part: Any
    documents: tuple[int, int]
    sentences: tuple[int, int]
    tokens: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive numbers of one array of a part.

    Attributes:
      part: None for one number that is 0.
      first, last: the first, and the one after the last.
      shift: is added to each.
    """

    part: Any
    first: int
    last: int
    shift: int


def run_of(part: Any, sentences: np.ndarray, documents: np.ndarray, first: int, last: int) -> Run:
    """Documents `first` to `last - 1` of a part with these arrays."""
    first_sentence, last_sentence = int(documents[first]), int(documents[last])
    tokens = int(sentences[first_sentence]), int(sentences[last_sentence])
    return Run(part, (first, last), (first_sentence, last_sentence), tokens)


def runs_without(part: Any, sentences: np.ndarray, documents: np.ndarray, left_out: Iterable[int]) -> list[Run]:
    """All documents of a part with these arrays but some, which are given in order."""
    edges = [-1, *map(int, left_out), documents.size - 1]
    return [run_of(part, sentences, documents, a + 1, b) for a, b in zip(edges, edges[1:], strict=False) if b > a + 1]


def spans_of(runs: Iterable[Run], array: str) -> Iterator[Span]:
    """What makes one array of the split that has the documents of these runs."""
    token = sentence = 0
    for run in runs:
        if array == "tokens":
            yield Span(run.part, *run.tokens, 0)
        elif array == "sentences":
            yield Span(run.part, *run.sentences, token - run.tokens[0])
        else:
            yield Span(run.part, *run.documents, sentence - run.sentences[0])
        token += run.tokens[1] - run.tokens[0]
        sentence += run.sentences[1] - run.sentences[0]
    if array != "tokens":
        yield Span(None, 0, 1, token if array == "sentences" else sentence)


def pieces_of(spans: Iterable[Span], entries: int) -> Iterator[list[Span]]:
    """Cuts what makes an array into pieces of so many numbers, the last one shorter; of an empty array, one."""
    piece: list[Span] = []
    room = entries
    for span in spans:
        first = span.first
        while first < span.last:
            if not room:
                yield piece
                piece, room = [], entries
            last = min(span.last, first + room)
            piece.append(dataclasses.replace(span, first=first, last=last))
            room -= last - first
            first = last
    yield piece


def write(spans: Iterable[Span], array: str, read: Callable[[Any, str, int, int], np.ndarray], file: Any) -> None:
    """Writes the numbers of spans to a file.

    Args:
      array: that they are of.
      read: (part, array, first, last) to numbers of a part.

    Raises:
      OSError: the disk is full.
    """
    for span in spans:
        for at in range(span.first, span.last, _BLOCK_ENTRIES):
            last = min(at + _BLOCK_ENTRIES, span.last)
            block = np.zeros(1, store.OFFSET_DTYPE) if span.part is None else read(span.part, array, at, last)
            if span.shift:
                block = (block.astype(np.int64) + span.shift).astype(block.dtype)
            file.write(block.tobytes())
