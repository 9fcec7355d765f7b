"""Tagged words from CoNLL files or table rows, and their tokenization."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import is_integer, is_missing, read_list
from bertjax.data.finetuning.examples import Examples, Source, encode_pair, make_examples, max_context_window
from bertjax.data.finetuning.tables import ReadStats, Row, read_utf8, replace_surrogates
from bertjax.errors import UsageError, listed, quoted

logger = logging.getLogger(__name__)

OUTSIDE = "O"
_DOCUMENT = "-DOCSTART-"
_TAG = re.compile("O|[BIESLUM](-[^ ]+)?")
# Cell that may be a word index: a number, perhaps with a prefix and punctuation after it: 3, [3], T3, 3. or 2-3.
_INDEX = re.compile(r"(?:.*\D)?(\d+)\W*")
# Index of two numbers: a word range (1-2) or empty word (1.1) in CoNLL-U, or sentence and word index (1-2) in WebAnno.
_INDEX_PAIR = re.compile(r"\d+[-.]\d+")
# Word, or column of a line without tabs. It may contain whitespace other than ASCII, such as a no-break space.
_COLUMN = re.compile(r"\S+", re.ASCII)
# Prefix of words in WikiANN, such as en:Paris.
_LANGUAGE = re.compile(r"[a-z][a-z-]+:")
# Chunk types, which CoNLL files have in the column before the entity tags.
_CHUNKS = {"NP", "VP", "PP", "ADJP", "ADVP", "SBAR", "PRT", "CONJP", "INTJ", "LST", "UCP", "NC", "PC", "VC"}
# A file whose sentences all have one word is rejected only if it has at least this many sentences. A CoNLL file whose
# words all end with a number is rejected only if it has at least this many words.
_MIN_ROWS = 20
# Line number and columns of a line.
_Line: TypeAlias = tuple[int, list[str]]
# Example index and token position of each word, by sentence.
Places: TypeAlias = list[list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class TaggedText(Source):
    """Sentences of tagged words."""

    sentences: list[list[str]]  # words of each sentence
    tags: list[list[str]]  # tags of each sentence's words; all tags are "" if the text has none
    documents: Sequence[int]  # number of each sentence's document, ascending
    lines: Sequence[int] = ()  # line number of each sentence's first word (default: (), the words are not from a file)

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def has_tags(self) -> bool:
        return any(map(any, self.tags))

    def texts(self) -> list[bytes]:
        return ["\n".join(words).encode() for words in self.sentences]

    def document_numbers(self) -> Sequence[int]:
        return self.documents

    def subset(self, indices: np.ndarray) -> "TaggedText":
        return TaggedText(
            [self.sentences[index] for index in indices],
            [self.tags[index] for index in indices],
            [self.documents[index] for index in indices],
            [self.lines[index] for index in indices] if self.lines else (),
        )


def read_conll(path: Path, stats: ReadStats, labeled: bool = True) -> TaggedText:
    """Reads a CoNLL file, which has one word per line and the word's tag in the last column, see docs/formats.md.

    Blank lines separate sentences, `-DOCSTART-` lines separate documents. If `labeled` is False, the file may contain
    only the column of words. Updates `stats` with the counts of sentences and irregular lines.
    """
    sentences, documents, is_indexed = _read_sentences(path, stats)
    rows = [*itertools.chain(*sentences)]
    if not rows:
        raise UsageError(f"{path} has no words; use a file with one word per line")
    width = len(rows[0][1])
    tag_column = _tag_column([columns for _, columns in rows], is_indexed, path)
    if is_indexed or width > 2:
        stats.columns = f"words in column {1 + is_indexed}"
    if is_indexed + width > 2:
        stats.columns += f", tags in column {is_indexed + width + tag_column + 1} of {is_indexed + width}"
    for line, columns in rows:
        if len(columns) != width:
            raise UsageError(f"{path} line {line} has {len(columns)} columns, but earlier lines have {width}")
        if not _COLUMN.fullmatch(columns[0]):
            raise UsageError(f"{path} line {line}: {quoted(columns[0])} is not one word; write one word per line")
        tag = columns[tag_column] if width > 1 else ""
        if (labeled or width > 1) and not _TAG.fullmatch(tag):
            raise UsageError(
                f"{path} line {line}: the tag of {quoted(columns[0])} is {quoted(tag)}; write O, B-TYPE or I-TYPE "
                "(IOB, BIOES, BILOU or BMES) in the last column, and remove header lines"
            )
        if len(columns[0]) > 2 and columns[0][0] == columns[0][-1] == '"':
            stats.count_irregular("words with quotes, as CSV writers add them", line)
    words = [[columns[0] for _, columns in sentence] for sentence in sentences]
    tags = [[columns[tag_column] if width > 1 else "" for _, columns in sentence] for sentence in sentences]
    first_word = words[0][0]
    is_constant = len(rows) > len(words) + 1 and all(len({*sentence}) == 1 for sentence in words)
    is_numbered = all(_INDEX.fullmatch(columns[0]) for _, columns in rows)
    # Detect Weibo NER, which appends to each character its position in the word. Numbers without a letter may be words.
    has_positions = is_numbered and len(rows) >= _MIN_ROWS and any(columns[0][0].isalpha() for _, columns in rows)
    if has_positions or (width > 2 and (is_constant or is_numbered)):
        raise UsageError(
            f"{path}: column {1 + is_indexed} contains no words: its values, such as {quoted(first_word)}, end with "
            "numbers or are the same for all words of a sentence; remove the numbers or the column"
        )
    prefixes = [_LANGUAGE.match(word) for word in itertools.chain(*words)]
    if all(prefixes):
        words = [[word.partition(":")[2] or word for word in sentence] for sentence in words]
        names = listed(map(quoted, sorted({match[0] for match in prefixes if match})))
        for line, _ in rows:
            stats.count_irregular(f"words read without their prefix {names}", line)
    if labeled and len(words) >= _MIN_ROWS and all(len(sentence) < 2 for sentence in words):
        raise UsageError(f"{path} has a blank line after every word; write blank lines only between sentences")
    stats.read = stats.used = len(words)
    return TaggedText(words, tags, documents, [sentence[0][0] for sentence in sentences])


def _read_sentences(path: Path, stats: ReadStats) -> tuple[list[list[_Line]], list[int], bool]:
    """Returns the lines of each sentence's words, each sentence's document number, and whether lines had indices.

    Removes comment lines and a first column of word indices, which must count the words of each sentence, or of the
    file. A line that starts with `#` is a comment, unless the file has no indices, and the line has a tag and as many
    columns as other lines. Document separators may have suffixes, such as `-DOCSTART-(7)`.
    """
    lines = []
    for line, row in enumerate(read_utf8(path).split("\n"), 1):
        text = row.removeprefix("\ufeff").rstrip()  # Concatenated files may have several byte-order marks.
        columns = [column.strip(" ") for column in text.split("\t")] if "\t" in text.strip() else _COLUMN.findall(text)
        lines.append((line, columns))
    rows = [columns for _, columns in lines if columns and not columns[0].startswith((_DOCUMENT, "#"))]
    width = len(rows[0]) if rows else max(len(columns) for _, columns in lines)
    # If the second column contains only tags, the first column contains the words, even if they are numbers.
    may_have_index = width > 1 and any(not _TAG.fullmatch(row[1]) for row in rows if len(row) > 1)
    is_indexed = may_have_index and all(_INDEX.fullmatch(row[0]) for row in rows)
    has_ranges = is_indexed and not all(_INDEX_PAIR.fullmatch(row[0]) for row in rows)
    sentences: list[list[_Line]] = []
    documents: list[int] = []
    document, previous, in_sentence = 0, 0, False
    for line, columns in lines:
        if columns[:2] == ["#", "newdoc"]:  # CoNLL-U
            document += 1
            continue
        if columns and columns[0].startswith("#"):
            is_token = len(columns) == width and (width == 1 or _TAG.fullmatch(columns[-1]))
            if is_indexed or not is_token:
                stats.count_irregular("comments (#)", line)
                continue
        # Skip CoNLL-U's lines for word ranges, which repeat words, and for empty words, which the text lacks.
        if has_ranges and columns and _INDEX_PAIR.fullmatch(columns[0]):
            continue
        if is_indexed and columns and not columns[0].startswith(_DOCUMENT):
            index = int(_INDEX.sub(r"\1", columns[0]))
            if index != previous + 1 and (in_sentence or index > 1):
                raise UsageError(
                    f"{path} line {line}: each value of the first column ends with a number, but {quoted(columns[0])} "
                    "does not count the words of a sentence or file; remove the column"
                )
            previous, columns = index, columns[1:]
        if not columns or columns[0].startswith(_DOCUMENT):
            document += bool(columns)
            in_sentence = False
            continue
        if not in_sentence:
            sentences.append([])
            documents.append(document)
            in_sentence = True
        sentences[-1].append((line, columns))
    return sentences, documents, is_indexed


def _tag_column(rows: list[list[str]], is_indexed: bool, path: Path) -> int:
    """Returns the index of the tag column, counted from the end.

    This is the last column with entities, or the last column if no column has entities. Chunks, such as NP, are not
    entities. If entities are nested, it is the first column with entities, which has the outer ones. Columns contain
    nested entities if they share an entity type, or if the file has an index, a word and two tags (GermEval).
    """
    types: dict[int, set[str]] = {}
    width = len(rows[0]) if len({*map(len, rows)}) == 1 else 0
    for column in range(-1, -width, -1):
        tags = [row[column] for row in rows if _TAG.fullmatch(row[column])]
        # A tag column may have some misspelled tags, which `read_conll` reports later.
        if 2 * len(tags) < len(rows):
            break
        if column_types := {tag.partition("-")[2] for tag in {*tags} - {OUTSIDE}} - _CHUNKS:
            types[column] = column_types
    chosen = next(iter(types), -1)
    for column in types:
        if types[column] & types[chosen] or (is_indexed and width == 3):
            chosen = column
    numbers = [is_indexed + width + column + 1 for column in (chosen, *types)]
    if len(types) > 1:
        logger.warning(
            f"{path} has entity tags in the columns {listed(sorted(numbers[1:]))}; those of column {numbers[0]} are "
            "used; to use others, remove this column"
        )
    if joined := sorted(name for name in types.get(chosen, ()) if "|" in name):
        logger.warning(f"{path}: a tag with several types, such as {quoted(joined[0])}, counts as one type")
    return chosen


def read_tagged_rows(
    rows: Iterable[Row], text: str, label: str | None, stats: ReadStats, keep_untagged: bool = False
) -> TaggedText:
    """Reads one sentence per table row. Words and tags are lists (see `read_list`), or are separated by spaces.

    `text` is the column with the words. `label` is the column with one tag per word (None: the file has no tags). With
    `keep_untagged`, sentences may lack tags; these sentences are predicted but not scored.
    """
    sentences, tags, lines = [], [], []
    for row in rows:
        place = f"{stats.file} line {row.line}"
        words = _items(row.fields[text], place, in_text=True)
        if not words:
            stats.count_irregular("with an empty text", row.line)
        row_tags = [""] * len(words)
        if label and not row.has_problem:
            row_tags = _items(row.fields[label], place, in_text=False)
        # Reject -100, which transformers uses for ignored tokens. Accept `,`, which is a tag in the Penn Treebank.
        if wrong := [tag for tag in row_tags if tag == "-100" or ("," in tag and tag != ",")]:
            raise UsageError(f"{place}: {quoted(wrong[0])} is not a tag; write one tag per word, separated by spaces")
        if keep_untagged and not row_tags and words:
            stats.count_irregular("without tags, predicted but not scored", row.line)
            row_tags = [""] * len(words)
        if len(row_tags) != len(words):
            raise UsageError(f"{place} has {len(words)} words and {len(row_tags)} tags; write one tag per word")
        sentences.append(words)
        tags.append(row_tags)
        lines.append(row.line)
    if not any(sentences):
        raise UsageError(f"{stats.file} has no words; use rows with words and tags")
    if label and len(sentences) >= _MIN_ROWS and all(len(words) < 2 for words in sentences):
        raise UsageError(f"{stats.file} has one word per row; write one sentence per row, or use ner with a CoNLL file")
    stats.used = len(sentences)
    return TaggedText(sentences, tags, range(len(sentences)), lines)


def _items(value: Any, place: str, in_text: bool) -> list[str]:
    items = read_list(value, place, in_text)
    if items is None:
        return [] if not in_text and is_missing(value.strip()) else _COLUMN.findall(value)
    for item in items:
        # Reject words with spaces, because prediction files separate words by spaces.
        if not isinstance(item, (str, int, float)) or item != item or not _COLUMN.fullmatch(str(item)):
            raise UsageError(f"{place}: {quoted(item)} is not a word or tag; write each as one string without spaces")
    return [replace_surrogates(str(item)) for item in items]


def encode_tagged(
    tagged: TaggedText, labels: Sequence[str], tokenizer: Tokenizer, seq_len: int, by_document: bool, path: str
) -> tuple[Examples, Places]:
    """Tokenizes tagged words; the first word piece of each word has the word's label.

    An example is one sentence, or one document if `by_document` is True. Texts longer than `seq_len` are split into
    examples that overlap by half. A word in two examples is labeled only in the example with more context.

    Returns the examples, and the example index and token position of each word. At the first piece of a word, the array
    `token_labels` is the index of the word's tag in `labels`. It is -1 at other pieces and at words without a tag.
    """
    label_ids = {label: index for index, label in enumerate(labels)} | {"": -1}
    if unknown := sorted({*itertools.chain(*tagged.tags)} - {*label_ids}):
        fix = "correct them, or list all tags in a JSON file and set --config.data.labels to it"
        if all(map(is_integer, unknown)):
            fix = "write names instead of ids, because files may number the tags differently"
        raise UsageError(f"{path} has unknown tags: {listed(unknown)} (known: {listed(labels)}); {fix}")
    vocabulary, max_pieces = tokenizer.vocabulary, tokenizer.vocabulary.room(seq_len)
    encoded: list[dict[str, list[int]]] = []
    places = []
    units = tagged.documents if by_document else range(len(tagged))
    for _, unit in itertools.groupby(zip(units, tagged.sentences, tagged.tags, strict=True), key=lambda row: row[0]):
        sentences = list(unit)
        words = [word for _, sentence, _ in sentences for word in sentence]
        tags = [tag for *_, sentence_tags in sentences for tag in sentence_tags]
        # A word of control characters has no pieces, but needs a position for its label, so represent it by [UNK].
        pieces = [tokenizer.encode_word(word)[:max_pieces] or [vocabulary.unk_id] for word in words]
        lengths = np.array([len(ids) for ids in pieces], np.int64)
        starts = np.cumsum(lengths) - lengths
        windows = _overlapping_windows(lengths, max_pieces)
        rows = [
            encode_pair([*itertools.chain(*pieces[first:last])], None, seq_len, vocabulary) for first, last in windows
        ]
        for row in rows:
            row["token_labels"] = [-1] * len(row["input_ids"])
        for word, window in enumerate(max_context_window(windows, len(words))):
            position = 1 + int(starts[word] - starts[windows[window][0]])
            rows[window]["token_labels"][position] = label_ids[tags[word]]
            places.append((len(encoded) + int(window), position))
        encoded += rows
    remaining = iter(places)
    return make_examples(encoded, {}), [[*itertools.islice(remaining, len(words))] for words in tagged.sentences]


def gather_words(places: Places, values: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Returns the values of each sentence's words, gathered from the per-token arrays [length, ...] of all examples."""
    return [[values[example][position] for example, position in sentence] for sentence in places]


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
