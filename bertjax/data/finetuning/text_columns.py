"""Tokenization of tables of texts to embed: an anchor, a positive and negatives, or two texts with a score."""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import is_list, label_key, missing_class_problem, read_list, sort_labels
from bertjax.data.finetuning.examples import encode_pair, make_examples
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.text_batches import TextExamples
from bertjax.errors import UsageError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Tokenizer with separate prompts and token limits for queries (anchors), documents, and texts of scored pairs."""

    tokenizer: Tokenizer
    query_prompt: str = ""
    document_prompt: str = ""
    scored_prompt: str = ""
    query_len: int = 128
    document_len: int = 128

    def encode(self, text: str, is_query: bool | None) -> dict[str, list[int]]:
        """Returns `input_ids` and `segment_ids` of a text, truncated. `is_query` is None for texts of scored pairs."""
        prompt = {True: self.query_prompt, False: self.document_prompt, None: self.scored_prompt}[is_query]
        ids = self.tokenizer.encode_with_special(prompt + text)
        return encode_pair(ids, None, self.query_len if is_query else self.document_len, self.tokenizer.vocabulary)


def read_examples(
    rows: Iterable[Row], columns: Sequence[str], label: str, kind: str, encoder: TextEncoder, stats: ReadStats
) -> tuple[TextExamples, list[str]]:
    """Tokenizes the rows of a file, and updates `stats`. Returns the examples, and the names of the classes.

    `columns` are the columns of the anchor, the positive and, optionally, negatives. `label` is the label column, and
    `kind` is a value of `EmbeddingLoss.label`. A cell of the last column may be a list of negatives or, if `kind` is
    `scores`, of all documents. If there are negatives and `kind` is "", a cell of positives may also be a list, see
    `split_positives`. Rows with an empty anchor or positive, or without a label, are skipped. Empty negatives are
    missing texts.
    """
    if len(columns) > 2 and not kind:
        rows = split_positives(rows, columns[1], stats)
    examples: list[list[str]] = []
    labels: list[Any] = []
    for row in rows:
        texts = _read_texts(row, columns, kind, stats)
        if "" in texts[:2]:
            stats.skip("with an empty text", row.line)
            continue
        value = _read_label(row, label, kind, len(texts) - 1, stats) if kind else None
        if kind and value is None:
            stats.skip("with an empty label", row.line)
            continue
        examples.append(texts)
        labels.append(value)
    stats.used = len(examples)
    if not examples:
        raise UsageError(f"{stats.file} has no usable rows; use a file with nonempty {' and '.join(columns[:2])}")
    width = max(map(len, examples))
    names = sort_labels({*labels}) if kind == "class" else []
    if problem := missing_class_problem(names):
        logger.warning(f"{stats.file}: {problem}")
    if kind == "class":
        labels = [[names.index(value)] for value in labels]
    elif kind == "scores":
        labels = _pad(labels, width - 1, 0.0)
    arrays = {"labels": np.array(labels, np.float32)} if kind else {}
    strings = [text for texts in _pad(examples, width, "") for text in texts]
    is_query = np.arange(len(strings)) % width == 0
    no_tokens: dict[str, list[int]] = {"input_ids": [], "segment_ids": []}
    pairs = zip(strings, is_query.tolist(), strict=True)
    texts = make_examples([encoder.encode(*pair) if pair[0] else no_tokens for pair in pairs], {})
    limits = ("anchors", is_query, encoder.query_len), ("documents", ~is_query, encoder.document_len)
    for name, mask, limit in limits:
        if count := np.count_nonzero(texts.lengths[mask] >= limit):
            note = f"{count:,} {name} reach the limit of {limit} tokens"
            stats.columns = "; ".join(filter(None, [stats.columns, note]))
    keys = np.array([*map(_text_key, strings)], np.int64).reshape(-1, width)
    return TextExamples(stats.file, texts, width, keys, arrays, strings=strings), names


def split_positives(rows: Iterable[Row], column: str, stats: ReadStats) -> Iterator[Row]:
    """Yields one row per positive. A cell of `column` may list several positives, as in files of FlagEmbedding."""
    for row in rows:
        cell, place = row.fields[column], f"{stats.file} line {row.line}: {column}"
        may_be_list = isinstance(cell, list) or cell.lstrip().startswith("[")
        items = read_list(cell, place, in_text=True) if may_be_list else None
        positives = [cell] if items is None else items
        if not all(isinstance(text, str) for text in positives):
            raise UsageError(f"{place} has items that are not text; use a list of texts")
        if len(positives) > 1:
            stats.count_irregular("with several positives, which become one row each", row.line)
        for text in positives or [""]:
            yield dataclasses.replace(row, fields={**row.fields, column: text})


def _pad(rows: Sequence[list[Any]], width: int, padding: Any) -> list[list[Any]]:
    return [[*row, *[padding] * (width - len(row))] for row in rows]


def _text_key(text: str) -> int:
    """Returns a 63-bit hash of a text, or -1 for an empty text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1 if text else -1


def text_cell(row: Row, column: str, stats: ReadStats) -> str:
    """Returns the text of a cell. Raises a UsageError if it is a list."""
    value = row.fields[column]
    if is_list(value):
        raise UsageError(
            f"{stats.file} line {row.line}: {column} is a list; write one text per row (only a third column, of "
            "negatives, may contain lists)"
        )
    stats.count_irregular_text(value, row.line)
    return value


def _read_texts(row: Row, columns: Sequence[str], kind: str, stats: ReadStats) -> list[str]:
    """Returns the texts of a row, "" for blank ones. The last column may contain a list of texts."""
    texts, last = [text_cell(row, column, stats) for column in columns[:-1]], row.fields[columns[-1]]
    if len(columns) < 3 and kind != "scores":
        last = text_cell(row, columns[-1], stats)
    elif isinstance(last, str) and last.lstrip().startswith("["):
        # In TSV and CSV, every cell is text, so parse it.
        items = read_list(last, f"{stats.file} line {row.line}: {columns[-1]}", in_text=True)
        last = last if items is None else items
    elif isinstance(last, str):
        stats.count_irregular_text(last, row.line)
    texts += last if isinstance(last, list) else [last]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"{stats.file} line {row.line}: {columns[-1]} has items that are not text; use a list of texts"
        )
    return [text if text.strip() else "" for text in texts]


def _read_label(row: Row, column: str, kind: str, num_documents: int, stats: ReadStats) -> Any:
    """Returns a class name, or a list of numbers, or None if the label is missing."""
    target = Target(column, ())
    if kind == "class":
        names = target.names(row, stats)
        return label_key(names[0]) if names else None
    items = read_list(row.fields[column], f"{stats.file} line {row.line}: {column}") if kind == "scores" else None
    cells = [row.fields[column]] if items is None else [*map(str, items)]
    numbers = [target.read(dataclasses.replace(row, fields={column: cell}), stats) for cell in cells]
    if None in numbers:
        return None
    if kind == "scores" and len(numbers) == num_documents - 1:
        # The scores are margins between the positive and each negative, as in sentence-transformers.
        numbers = [0.0, *(-number for number in numbers)]
    if len(numbers) != (num_documents if kind == "scores" else 1):
        raise UsageError(
            f"{stats.file} line {row.line}: {column} has {len(numbers)} scores for {num_documents} documents; write "
            "one score per document, or the margin of each negative"
        )
    return numbers


def read_pairs(rows: Iterable[Row], columns: Sequence[str], stats: ReadStats) -> dict[str, dict[str, None]]:
    """Returns a dict from each anchor to its positives, without duplicates and in order, and updates `stats`.

    The positives are the keys of the inner dicts. `columns` are the columns of anchor and positive.
    """
    anchor, positive = columns
    pairs: dict[str, dict[str, None]] = {}
    for row in rows:
        texts = text_cell(row, anchor, stats), text_cell(row, positive, stats)
        if not all(map(str.strip, texts)):
            stats.skip("with an empty text", row.line)
            continue
        pairs.setdefault(texts[0], {})[texts[1]] = None
        stats.used += 1
    if not pairs:
        raise UsageError(f"no pairs in {stats.summary()}; use a file with texts in the columns {anchor} and {positive}")
    return pairs
