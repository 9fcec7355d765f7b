"""Sentences of tagged words, in documents, to rows of word pieces; from CoNLL's form, or from rows of a table."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.context import most_context
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row, decoded, whole_characters
from bertjax.errors import UsageError, listed, quoted
from bertjax.utils.io import normalize_newlines, reject_utf16

OUTSIDE = "O"
_DOCUMENT = "-DOCSTART-"
# Where an entity begins; of one word (S of BIOES, U of BILOU) it begins there in any scheme.
_BEGINS = {"B": "B", "S": "B", "U": "B", "I": "I", "E": "I", "L": "I"}
# Less of the entities that begin in the other way than this are mistakes, not another scheme.
_MIXED_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Tagged:
    """The words of a file.

    Attributes:
      words, tags: all of them, in order; all tags are "" where the file has none.
      sentence_ends: words up to the end of each sentence.
      document_ends: words up to the end of each document.
      lines: of the file, where each sentence begins; empty where they come from none.
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
        """A value of each word, by sentence."""
        starts = [0, *self.sentence_ends[:-1]]
        return [values[start:end] for start, end in zip(starts, self.sentence_ends, strict=True)]


def read_tagged(path: Path, reading: ReadStats, labelled: bool = True) -> Tagged:
    """Reads a word a line, its tag in the last column, a blank line between sentences, -DOCSTART- between documents.

    Args:
      path: the file.
      reading: counts sentences, and notes lines that are not UTF-8.
      labelled: False takes a file of words alone as well.

    Raises:
      UsageError: the file is missing, has no words, lines with more columns than others, or a line has no tag or one
        that is not of IOB, BIOES or BILOU.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    reject_utf16(path, data)
    lines = normalize_newlines(data.removeprefix(b"\xef\xbb\xbf")).split(b"\n")
    words: list[str] = []
    tags: list[str] = []
    places: list[int] = []
    sentence_ends: list[int] = []
    document_ends: list[int] = []

    def end(ends: list[int]) -> None:
        if len(words) > (ends[-1] if ends else 0):
            ends.append(len(words))

    width = 0
    for line, row in enumerate(lines, 1):
        text = decoded(row, reading, line)
        columns = [column.strip() for column in text.rstrip().split("\t")] if "\t" in text.strip() else text.split()
        if not columns:
            end(sentence_ends)
        elif columns[0] == _DOCUMENT:
            end(sentence_ends)
            end(document_ends)
        else:
            width = width or len(columns)
            if len(columns) != width:
                raise UsageError(f"{path} line {line} has {len(columns)} columns, the first word's has {width}")
            if len(columns[0].split()) != 1:
                raise UsageError(f"{path} line {line}: the word {quoted(columns[0])} is no word; give each one a line")
            words.append(columns[0])
            tags.append(_tag(columns, path, line) if labelled or width > 1 else "")
            places.append(line)
    end(sentence_ends)
    end(document_ends)
    if not words:
        raise UsageError(f"{path} has no words")
    reading.read = reading.used = len(sentence_ends)
    _note_mixed_schemes(tags, sentence_ends, places, reading)
    lines = tuple(places[start] for start in (0, *sentence_ends[:-1]))
    return Tagged(words, tags, sentence_ends, document_ends, lines)


def tagged_rows(
    rows: Iterable[Row], text: str, label: str | None, reading: ReadStats, keep_untagged: bool = False
) -> Tagged:
    """Reads a sentence a row, its words and as many tags: lists in JSON, else separated by spaces.

    Args:
      rows: of one file.
      text: the column with the words.
      label: the column with the tags; None where there are none.
      reading: gains `used`, and notes of empty sentences.
      keep_untagged: a sentence with words and no tag at all is taken without any, to be predicted.

    Raises:
      UsageError: a row has not as many tags as words, or there are no words.
    """
    words: list[str] = []
    tags: list[str] = []
    places: list[int] = []
    ends: list[int] = []
    lines: list[int] = []
    for row in rows:
        place = f"{reading.file} line {row.line}"
        here = _items(row.fields[text], place)
        if not here:
            reading.note("with an empty text", row.line)
        labels = _items(row.fields[label], place) if label else [""] * len(here)
        if keep_untagged and not labels and here:
            reading.note("without tags, predicted and not scored", row.line)
            labels = [""] * len(here)
        if len(labels) != len(here):
            raise UsageError(f"{place}: {len(here)} words and {len(labels)} tags")
        words += here
        tags += labels
        places += [row.line] * len(here)
        ends.append(len(words))
        lines.append(row.line)
    if not words:
        raise UsageError(f"{reading.file} has no words")
    reading.used = len(ends)
    _note_mixed_schemes(tags, ends, places, reading)
    return Tagged(words, tags, ends, ends, tuple(lines))


def _note_mixed_schemes(tags: list[str], sentence_ends: list[int], places: list[int], reading: ReadStats) -> None:
    """Notes where entities begin with B- in some places and with I- in others, which is none of the schemes.

    In IOB1, B- is only between two entities of one type; in IOB2, BIOES and BILOU, I- is only inside of one. Below one
    in a hundred it is a tag here and there that is odd, as CoNLL-2003 itself has one, and no scheme.
    """
    begins: dict[str, list[int]] = {prefix: [] for prefix in ("B", "I")}
    firsts = {0, *sentence_ends}
    for index, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        before = "" if index in firsts else tags[index - 1].partition("-")[2]
        if prefix in _BEGINS and kind != before:
            begins[_BEGINS[prefix]].append(places[index])
    fewer, more = sorted(begins, key=lambda prefix: len(begins[prefix]))
    others = f"{len(begins[more]):,} with {more}-"
    if len(begins[fewer]) < _MIXED_SHARE * sum(map(len, begins.values())):
        what = f"with an odd tag: an entity begins with {fewer}-, {others}"
    else:
        what = f"entities begin with {fewer}-, {others}: IOB1 and IOB2 mixed"
    for place in begins[fewer]:
        reading.note(what, place)


def _items(value: str | list[Any], place: str) -> list[str]:
    if isinstance(value, str):
        return value.split()
    for item in value:
        # A word with a blank in it would be two in a file of predictions.
        if not isinstance(item, (str, int, float)) or len(str(item).split()) != 1:
            raise UsageError(f"{place}: {quoted(item)} is no word and no tag; blanks in one are not possible")
    return [whole_characters(str(item)) for item in value]


def _tag(columns: list[str], path: Path, line: int) -> str:
    if len(columns) < 2:
        raise UsageError(f"{path} line {line}: {quoted(columns[0])} has no tag")
    prefix, _, kind = columns[-1].partition("-")
    if columns[-1] != OUTSIDE and (prefix not in _BEGINS or not kind):
        raise UsageError(
            f"{path} line {line}: the tag {quoted(columns[-1])} is neither O nor B-TYPE, I-TYPE and the like of IOB, "
            "BIOES or BILOU; convert the file"
        )
    return columns[-1]


def make_rows(
    tagged: Tagged, labels: list[str], tokenizer: Tokenizer, seq_len: int, documents: bool, path: str
) -> tuple[Examples, np.ndarray, list[np.ndarray]]:
    """Rows in which each word has its label at its first piece, once over all rows.

    A row is a sentence, or as much of a document as fits. What is longer than a row is read in several that overlap by
    half, and a word is labelled where it has most context.

    Args:
      labels: names of the tags, the index is the id; a word without a tag is unlabelled.
      documents: rows are documents, not sentences.
      path: for messages.

    Returns:
      Examples with the flat array `token_labels`, -1 at what is no first piece; int64 [words], the row of each word;
      and for each row the positions of the words it tells, in order.

    Raises:
      UsageError: a tag is none of the labels.
    """
    vocabulary = tokenizer.vocabulary
    room = seq_len - 2
    # A word of control characters alone has no pieces, and still needs a label.
    pieces = [tokenizer.encode(word)[:room] or [vocabulary.unk_id] for word in tagged.words]
    ids = _label_ids(tagged, labels, path)
    lengths = np.array([len(ids) for ids in pieces])
    rows, positions = [], []
    row_of_word = np.zeros(len(pieces), np.int64)
    start = 0
    for stop in tagged.document_ends if documents else tagged.sentence_ends:
        parts = _parts(lengths[start:stop], room)
        best = most_context(parts, stop - start)
        for index, (first, last) in enumerate(parts):
            row = [piece for word in pieces[start + first : start + last] for piece in word]
            token_labels = [-1] * (len(row) + 2)
            offsets = 1 + np.cumsum([0, *lengths[start + first : start + last - 1]])
            told = np.flatnonzero(best[first:last] == index)
            for word in told:
                token_labels[offsets[word]] = ids[start + first + word]
            row_of_word[start + first + told] = len(rows)
            positions.append(offsets[told])
            rows.append(
                {
                    "input_ids": [vocabulary.cls_id, *row, vocabulary.sep_id],
                    "segment_ids": [0] * (len(row) + 2),
                    "token_labels": token_labels,
                }
            )
        start = stop
    return make_examples(rows, {}), row_of_word, positions


def of_words(row_of_word: np.ndarray, positions: list[np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    """What the rows of `make_rows` tell of each word, in order: arrays [length, ...] to [words, ...]."""
    told = [row[places] for row, places in zip(rows, positions, strict=True)]
    # Words of a row come in order, but rows that overlap tell words in turns.
    streams = [iter(row) for row in told]
    return np.array([next(streams[row]) for row in row_of_word])


def _label_ids(tagged: Tagged, labels: list[str], path: str) -> list[int]:
    index = {label: position for position, label in enumerate(labels)} | {"": -1}
    unknown = sorted({*tagged.tags} - {*index})
    if unknown:
        raise UsageError(
            f"{path} has tags that are not among the known ones: {listed(unknown)}; all files need the same types, in "
            "one scheme"
        )
    return [index[tag] for tag in tagged.tags]


def _parts(lengths: np.ndarray, room: int) -> list[tuple[int, int]]:
    """First word and the one after the last of rows with at most `room` pieces, overlapping by half."""
    if not len(lengths):
        return [(0, 0)]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    parts = []
    first = 0
    while True:
        last = int(np.searchsorted(ends, starts[first] + room, side="right"))
        parts.append((first, last))
        if last == len(lengths):
            return parts
        first = min(last, max(first + 1, int(np.searchsorted(starts, starts[first] + room // 2))))
