"""Tagged words from CoNLL files or table rows, and their tokenization."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import is_missing, read_list
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples, max_context_window
from bertjax.data.finetuning.tables import ReadStats, Row, decode_utf8, read_utf8, replace_surrogates
from bertjax.errors import UsageError, listed, quoted

OUTSIDE = "O"
_DOCUMENT = "-DOCSTART-"
_TAG = re.compile("O|[BIESLU](-.+)?")
# Index of a word in CoNLL-U and similar formats, also of a range or an empty word.
_INDEX = re.compile(r"(\d+)([.:)]|[-.]\d+)?")
# Types of the chunks that CoNLL files have in the column before the entities.
_CHUNKS = {"NP", "VP", "PP", "ADJP", "ADVP", "SBAR", "PRT", "CONJP", "INTJ", "LST", "UCP", "NC", "PC", "VC"}
# Line number and columns of a line.
_Line: TypeAlias = tuple[int, list[str]]


@dataclasses.dataclass(frozen=True)
class TaggedText:
    """Words and tags of a file.

    Attributes:
      words: all words in order.
      tags: one tag per word; all tags are "" if the file has none.
      sentence_ends: end (exclusive) of each sentence, as word indices.
      document_ends: end (exclusive) of each document, as word indices.
      lines: line number of each sentence's first word; empty if the words are not from a file.
    """

    words: list[str]
    tags: list[str]
    sentence_ends: list[int]
    document_ends: list[int]
    lines: tuple[int, ...] = ()

    @property
    def has_tags(self) -> bool:
        return any(self.tags)

    def sentences(self, values: list[str]) -> list[list[str]]:
        """Splits a list with one value per word into sentences."""
        starts = [0, *self.sentence_ends[:-1]]
        return [values[start:end] for start, end in zip(starts, self.sentence_ends, strict=True)]


def read_conll(path: Path, stats: ReadStats, labeled: bool = True) -> TaggedText:
    """Reads a CoNLL file, which has one word per line and the word's tag in the last column.

    Blank lines separate sentences, `-DOCSTART-` lines separate documents. If `labeled` is False, the file may contain
    only the column of words. Updates `stats` with the counts of sentences and irregular lines.

    A first column that numbers the words of each sentence is not used, nor are comment lines, which start with `#`. Of
    two columns with nested entities, as in GermEval, the first one contains the tags.
    """
    lines = []
    for line, row in enumerate(read_utf8(path).split(b"\n"), 1):
        text = decode_utf8(row, stats, line)
        columns = [column.strip() for column in text.rstrip().split("\t")] if "\t" in text.strip() else text.split()
        lines.append((line, columns))
    lines, is_indexed = _without_comments_and_index(lines, path, stats)
    rows = [columns for _, columns in lines if columns and columns[0] != _DOCUMENT]
    tag_column = _tag_column(rows, is_indexed)
    if rows and (is_indexed or tag_column < -1):
        last = f", tags in column {is_indexed + len(rows[0]) + tag_column + 1}" if len(rows[0]) > 1 else ""
        stats.columns = f"words in column {1 + is_indexed}{last}"

    words: list[str] = []
    tags: list[str] = []
    word_lines: list[int] = []
    sentence_ends: list[int] = []
    document_ends: list[int] = []

    def append_end(ends: list[int]) -> None:
        if len(words) > (ends[-1] if ends else 0):
            ends.append(len(words))

    width = 0
    for line, columns in lines:
        if not columns:
            append_end(sentence_ends)
        elif columns[0] == _DOCUMENT:
            append_end(sentence_ends)
            append_end(document_ends)
        else:
            width = width or len(columns)
            if len(columns) != width:
                raise UsageError(
                    f"{path} line {line} has {len(columns)} columns, but earlier lines have {width}; use "
                    "the same number of columns in all lines"
                )
            if len(columns[0].split()) != 1:
                raise UsageError(f"{path} line {line}: {quoted(columns[0])} is not one word; write one word per line")
            words.append(columns[0])
            tags.append(_read_tag(columns, tag_column, path, line) if labeled or width > 1 else "")
            word_lines.append(line)
    append_end(sentence_ends)
    append_end(document_ends)
    if not words:
        raise UsageError(f"{path} has no words; use a file with one word per line")
    sentences = [words[start:end] for start, end in itertools.pairwise([0, *sentence_ends])]
    if width > 2 and len(words) > len(sentences) + 1 and all(len({*sentence}) == 1 for sentence in sentences):
        raise UsageError(
            f"{path}: the first column has the same value in each line of a sentence, such as {quoted(words[0])}, so "
            "it contains no words; remove the column"
        )
    stats.read = stats.used = len(sentence_ends)
    lines_of_sentences = tuple(word_lines[start] for start in (0, *sentence_ends[:-1]))
    return TaggedText(words, tags, sentence_ends, document_ends, lines_of_sentences)


def _without_comments_and_index(lines: list[_Line], path: Path, stats: ReadStats) -> tuple[list[_Line], bool]:
    """Removes comment lines and a first column with the indices of the words, and returns whether there is one.

    Only in a file without indices may a line that starts with `#` be a word: it then has a tag and as many columns as
    the other lines.
    """
    rows = [columns for _, columns in lines if columns and not columns[0].startswith((_DOCUMENT, "#"))]
    width = len(rows[0]) if rows else max((len(columns) for _, columns in lines), default=0)
    # The file has one column of words if all second columns are tags: then the numbers are words.
    may_have_index = width > 1 and any(not _TAG.fullmatch(row[1]) for row in rows if len(row) > 1)
    numbers = [row[0] for row in rows] if may_have_index else []
    is_indexed = bool(numbers) and all(_INDEX.fullmatch(number) for number in numbers)
    if is_indexed:
        _check_indices(lines, path)
    kept = []
    for line, columns in lines:
        is_word = columns and columns[0] != _DOCUMENT
        if is_word and columns[0].startswith("#"):
            is_token = len(columns) == width and (width == 1 or _TAG.fullmatch(columns[-1]))
            if is_indexed or not is_token:
                stats.count_irregular("comments (#)", line)
                continue
        if is_word and is_indexed:
            # Lines of a range of words, such as 1-2, and of empty words, such as 1.1, repeat or add to CoNLL-U's words.
            if _index(columns) is None:
                continue
            columns = columns[1:]
        kept.append((line, columns))
    return kept, is_indexed


def _index(columns: list[str]) -> int | None:
    """Returns the index of a word in the first column, or None if it is no index, or that of a range."""
    match = _INDEX.fullmatch(columns[0]) if columns else None
    return int(match[1]) if match and len(match[2] or "") < 2 else None


def _check_indices(lines: list[_Line], path: Path) -> None:
    """Raises a UsageError unless numbers in the first column count the words of each sentence, or of the file."""
    previous, previous_line = None, 0
    for line, columns in lines:
        index = _index(columns)
        if index is None:
            continue
        is_next = previous is not None and index == previous + 1
        if not is_next and (index > 1 or (previous is not None and line == previous_line + 1)):
            raise UsageError(
                f"{path} line {line}: the first column contains only numbers, but {index} is not the index of a word "
                "in its sentence; remove the column"
            )
        previous, previous_line = index, line
    if previous is None:
        raise UsageError(f"{path}: the first column contains only ranges such as 1-2; remove the column")


def _tag_column(rows: list[list[str]], is_indexed: bool) -> int:
    """Returns the index of the column of tags, from the end.

    This is the last column, unless it contains the inner ones of nested entities. Then the column before contains the
    outer ones, which have types in common with the inner ones, or the columns are those of GermEval: index, word, outer
    tag and inner tag.
    """
    column = -1
    while rows and -column < len(rows[0]) - 1 and all(len(row) == len(rows[0]) for row in rows):
        outer, inner = ({row[index] for row in rows} for index in (column - 1, column))
        outer_types, inner_types = ({tag.partition("-")[2] for tag in tags - {OUTSIDE}} for tags in (outer, inner))
        if not all(map(_TAG.fullmatch, outer)) or outer_types <= _CHUNKS:
            break
        if inner_types and not inner_types & outer_types and not (is_indexed and len(rows[0]) == 3):
            break
        column -= 1
    return column


def read_tagged_rows(
    rows: Iterable[Row], text: str, label: str | None, stats: ReadStats, keep_untagged: bool = False
) -> TaggedText:
    """Reads one sentence per table row. Words and tags are lists (see `read_list`), or are separated by spaces.

    `text` is the column with the words. `label` is the column with one tag per word (None: the file has no tags). With
    `keep_untagged`, sentences may lack tags; these sentences are predicted but not scored. Counts used and irregular
    rows in `stats`.
    """
    words: list[str] = []
    tags: list[str] = []
    ends: list[int] = []
    lines: list[int] = []
    for row in rows:
        place = f"{stats.file} line {row.line}"
        row_words = _items(row.fields[text], place, in_text=True)
        if not row_words:
            stats.count_irregular("with an empty text", row.line)
        row_tags = _items(row.fields[label], place, in_text=False) if label else [""] * len(row_words)
        if keep_untagged and not row_tags and row_words:
            stats.count_irregular("without tags, predicted but not scored", row.line)
            row_tags = [""] * len(row_words)
        if len(row_tags) != len(row_words):
            raise UsageError(f"{place} has {len(row_words)} words and {len(row_tags)} tags; write one tag per word")
        words += row_words
        tags += row_tags
        ends.append(len(words))
        lines.append(row.line)
    if not words:
        raise UsageError(f"{stats.file} has no words; use rows with words and tags")
    stats.used = len(ends)
    return TaggedText(words, tags, ends, ends, tuple(lines))


def _items(value: Any, place: str, in_text: bool) -> list[str]:
    try:
        items = read_list(value, in_text)
    except ValueError as error:
        raise UsageError(
            f'{place}: {quoted(value)} is {error}; write a list such as ["a", "b"], or words separated by spaces'
        ) from error
    if items is None:
        return [] if not in_text and is_missing(value.strip()) else value.split()
    for item in items:
        # Reject words with spaces, because prediction files separate words by spaces.
        if not isinstance(item, (str, int, float)) or item != item or len(str(item).split()) != 1:
            raise UsageError(f"{place}: {quoted(item)} is not a single word or tag; remove spaces and empty items")
    return [replace_surrogates(str(item)) for item in items]


def _read_tag(columns: list[str], tag_column: int, path: Path, line: int) -> str:
    if len(columns) < 2:
        raise UsageError(f"{path} line {line}: {quoted(columns[0])} has no tag; add it as the last column")
    tag = columns[tag_column]
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"{path} line {line}: {quoted(tag)} is not a tag of IOB, BIOES or BILOU; use O, B-TYPE and I-TYPE"
        )
    return tag


def encode_tagged(
    tagged: TaggedText, labels: Sequence[str], tokenizer: Tokenizer, seq_len: int, documents: bool, path: str
) -> tuple[Examples, np.ndarray, list[np.ndarray]]:
    """Tokenizes tagged words; the first word piece of each word has the word's label.

    An example is one sentence, or one document if `documents` is True. Texts longer than `seq_len` are split into
    examples that overlap by half. A word in two examples is labeled only in the example with more context. `labels`
    contains the tag names in the order of their ids.

    Returns:
      A tuple of three values. First, examples with `token_labels`: the label id at the first piece of a word, -1 at all
      other pieces and at words without a tag. Second, the index of the example in which each word is labeled, int64
      [words]. Third, for each example, the token positions of its labeled words, int64 [labeled words].
    """
    vocabulary = tokenizer.vocabulary
    max_pieces = seq_len - 2
    # A word of control characters has no pieces, but needs a position for its label, so represent it by [UNK].
    pieces = [tokenizer.encode_with_special(word)[:max_pieces] or [vocabulary.unk_id] for word in tagged.words]
    label_ids = _label_ids(tagged, labels, path)
    lengths = np.array([len(ids) for ids in pieces])
    sequences, positions = [], []
    example_of_word = np.zeros(len(pieces), np.int64)
    start = 0
    for stop in tagged.document_ends if documents else tagged.sentence_ends:
        windows = _overlapping_windows(lengths[start:stop], max_pieces)
        best_window = max_context_window(windows, stop - start)
        for index, (first, last) in enumerate(windows):
            ids = [piece for word in pieces[start + first : start + last] for piece in word]
            token_labels = [-1] * (len(ids) + 2)
            offsets = 1 + np.cumsum([0, *lengths[start + first : start + last - 1]])
            labeled = np.flatnonzero(best_window[first:last] == index)
            for word in labeled:
                token_labels[offsets[word]] = label_ids[start + first + word]
            example_of_word[start + first + labeled] = len(sequences)
            positions.append(offsets[labeled])
            row = encode_pair(ids, None, seq_len, vocabulary)
            sequences.append(row | {"token_labels": token_labels})
        start = stop
    return make_examples(sequences, {}), example_of_word, positions


def gather_words(example_of_word: np.ndarray, positions: list[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Gathers one value per word from the per-token arrays [length, ...] of all examples. Returns [words, ...]."""
    # Each stream yields the values of an example's labeled words in text order.
    streams = [iter(value[places]) for value, places in zip(values, positions, strict=True)]
    return np.array([next(streams[example]) for example in example_of_word])


def _label_ids(tagged: TaggedText, labels: Sequence[str], path: str) -> list[int]:
    ids = {label: index for index, label in enumerate(labels)} | {"": -1}
    unknown = sorted({*tagged.tags} - {*ids})
    if unknown:
        raise UsageError(
            f"{path} has unknown tags: {listed(unknown)}, which the training file lacks; correct them, or list all "
            "tags in a JSON file and set --config.data.labels to it"
        )
    return [ids[tag] for tag in tagged.tags]


def _overlapping_windows(lengths: np.ndarray, max_pieces: int) -> list[tuple[int, int]]:
    """Splits words into half-overlapping windows of at most `max_pieces` pieces. Returns each window's word range."""
    if not len(lengths):
        return [(0, 0)]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    windows = []
    first = 0
    while True:
        last = int(np.searchsorted(ends, starts[first] + max_pieces, side="right"))
        windows.append((first, last))
        if last == len(lengths):
            return windows
        first = min(last, max(first + 1, int(np.searchsorted(starts, starts[first] + max_pieces // 2))))
