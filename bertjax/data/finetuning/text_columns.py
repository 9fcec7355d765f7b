"""Tokenization of tables whose columns are texts to embed: an anchor, a positive and negatives, or two scored texts."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import read_list, sort_labels
from bertjax.data.finetuning.examples import encode_pair, make_examples
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.text_batches import TextExamples
from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Tokenizes anchors and documents.

    Attributes:
      tokenizer: tokenizer of the model.
      query_prompt, document_prompt: text before each anchor, and before each other text.
      query_len, document_len: maximum tokens of an anchor, and of another text, including special tokens.
    """

    tokenizer: Tokenizer
    query_prompt: str = ""
    document_prompt: str = ""
    query_len: int = 128
    document_len: int = 128

    def encode(self, text: str, is_query: bool) -> dict[str, list[int]]:
        """Returns `input_ids` and `segment_ids` of a text, truncated."""
        prompt, limit = self.settings(is_query)
        ids = self.tokenizer.encode_with_special(prompt + text)
        return encode_pair(ids, None, limit, self.tokenizer.vocabulary)

    def settings(self, is_query: bool) -> tuple[str, int]:
        """Returns prompt and maximum length of an anchor or of another text."""
        return (self.query_prompt, self.query_len) if is_query else (self.document_prompt, self.document_len)


def read_examples(
    rows: Iterable[Row], columns: Sequence[str], label: str, kind: str, encoder: TextEncoder, stats: ReadStats
) -> tuple[TextExamples, list[str]]:
    """Tokenizes the rows of a file, and updates `stats`. Returns the examples, and the names of the classes.

    `columns` are the columns of anchor, positive and negatives. A cell of the last column may be a list of texts. Rows
    with an empty anchor or positive, or without a label, are skipped; empty negatives are missing texts. `label` is the
    column with labels of the `kind` that `EmbeddingLoss` describes.
    """
    texts, labels = [], []
    for row in rows:
        values = [_text(row, column, stats) for column in columns[:-1]]
        last = row.fields[columns[-1]]
        values += last if isinstance(last, list) else [_text(row, columns[-1], stats)]
        if not all(isinstance(value, str) for value in values):
            raise UsageError(f"{stats.file} line {row.line}: {columns[-1]} is a list with items that are not text")
        values = [value.strip() for value in values]
        if "" in values[:2]:
            stats.skip("with an empty text", row.line)
            continue
        value = _read_label(row, label, kind, len(values) - 1, stats) if kind else None
        if kind and value is None:
            stats.skip("with an empty label", row.line)
            continue
        texts.append(values)
        labels.append(value)
    stats.used = len(texts)
    if not texts:
        raise UsageError(f"{stats.file} has no usable rows; use a file with nonempty {' and '.join(columns[:2])}")
    width = max(map(len, texts))
    names = sort_labels({*labels}) if kind == "class" else []
    arrays: dict[str, np.ndarray] = {}
    if kind == "class":
        labels = [[names.index(value)] for value in labels]
    if kind:
        arrays["labels"] = np.array(
            [[*value, *[0.0] * (width - 1 - len(value))] if kind == "scores" else value for value in labels], np.float32
        )
    texts = [[*values, *[""] * (width - len(values))] for values in texts]
    empty: dict[str, list[int]] = {"input_ids": [], "segment_ids": []}
    sequences = [
        encoder.encode(text, is_query=column == 0) if text else empty
        for values in texts
        for column, text in enumerate(values)
    ]
    for is_query, lengths in (
        (True, sequences[::width]),
        (False, [each for i, each in enumerate(sequences) if i % width]),
    ):
        limit = encoder.settings(is_query)[1]
        if count := sum(len(each["input_ids"]) >= limit for each in lengths):
            stats.columns += (
                f"; {count:,} {'anchors' if is_query else 'other texts'} have {limit} or more tokens, the maximum"
            )
    keys = np.array([[text_key(text) for text in values] for values in texts], np.int64)
    strings = [text for values in texts for text in values]
    return TextExamples(stats.file, make_examples(sequences, {}), width, keys, arrays, strings=strings), names


def text_key(text: str) -> int:
    """Returns a hash of a text, an integer of 63 bits, or -1 for an empty text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1 if text else -1


def _text(row: Row, column: str, stats: ReadStats) -> str:
    value = row.fields[column]
    if not isinstance(value, str):
        raise UsageError(
            f"{stats.file} line {row.line}: {column} is a list; only the last column may be a list of texts"
        )
    return value


def _read_label(row: Row, column: str, kind: str, num_documents: int, stats: ReadStats) -> Any:
    """Returns a class name, or a list of numbers, or None if the label is missing."""
    target = Target(column, ())
    if kind == "class":
        return next(iter(target.names(row, stats) or []), None)
    items = read_list(row.fields[column]) if kind == "scores" else None
    cells = [row.fields[column]] if items is None else [*map(str, items)]
    numbers = [target.read(dataclasses.replace(row, fields={column: cell}), stats) for cell in cells]
    if None in numbers:
        return None
    if kind == "scores" and len(numbers) == num_documents - 1:
        # Margins between the positive and each negative, as in sentence-transformers.
        numbers = [0.0, *(-number for number in numbers)]
    if len(numbers) != (num_documents if kind == "scores" else 1):
        raise UsageError(
            f"{stats.file} line {row.line}: {column} has {len(numbers)} scores for {num_documents} documents; write "
            "one score per document, or the margin of each negative"
        )
    return numbers
