"""Model inputs at inference: lines of text files, and batches of encoded examples."""

import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.finetuning.batches import Batching, make_batch
from bertjax.data.finetuning.examples import Examples, encode_pair
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, TAGS
from bertjax.utils.io import reject_utf16, unix_newlines

logger = logging.getLogger(__name__)

# Texts of one example, such as a question, a pair of texts, or a context and its endings (multiple choice).
Texts = tuple[str, ...]

_STDIN = "-"
# Separator of the texts of a line: the two texts of a pair, or a context and its endings.
PAIR_SEPARATOR = " ||| "
# Tokens per batch, including padding. This number keeps a CPU or GPU busy, and the activations need little memory
# compared to the parameters of a BASE model.
BATCH_TOKENS = 4096
_BUCKET = 32
_UTF8_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


@dataclasses.dataclass
class TruncationCount:
    """Number of encoded texts (a pair counts as one text), and number of texts truncated to `seq_len` tokens.

    Attributes:
      seq_len: maximum tokens per row.
      total: number of texts.
      truncated: number of truncated texts.
    """

    seq_len: int
    total: int = 0
    truncated: int = 0

    def log(self) -> None:
        """Logs a warning with both counts if any text was truncated."""
        if self.truncated:
            logger.warning(f"{self.truncated:,} of {self.total:,} texts were truncated to {self.seq_len} tokens")


def make_batches(examples: Examples, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches that contain every example once, longest first.

    Rows are padded to a multiple of 32 tokens. A batch has as many rows as fit into `BATCH_TOKENS` tokens (at least
    one), so that a model compiles once per row length. The last batch may have fewer rows, rounded up to a power of
    two.

    Yields:
      A batch. Its `example` array [B] contains the index of each row's example, or -1 for padding rows.
    """
    batching = Batching(1, min(_BUCKET, seq_len), seq_len)
    order = np.argsort(-examples.lengths, kind="stable")
    start = 0
    while start < len(order):
        length = batching.padded_length(int(examples.lengths[order[start]]))
        num_rows = max(1, BATCH_TOKENS // (length * examples.sequences_per_example))
        selected = order[start : start + num_rows]
        batch_size = min(num_rows, 1 << (len(selected) - 1).bit_length())
        yield make_batch(examples, selected, length, batch_size, SINGLE_SHARD)
        start += num_rows


def encode_row(ids: Sequence[list[int]], vocabulary: Vocabulary, truncation: TruncationCount) -> dict[str, list[int]]:
    """Encodes the token ids of one text or of a pair as a row with [CLS] and [SEP].

    Truncates the row to `truncation.seq_len` tokens and counts the text in `truncation`.
    """
    first, *second = ids
    pair = second[0] if second else None
    truncation.total += 1
    # The row has a [CLS], and a [SEP] after each text.
    truncation.truncated += sum(map(len, ids)) + len(ids) + 1 > truncation.seq_len
    return encode_pair(first, pair, truncation.seq_len, vocabulary)


def split_line(line: str, kind: str) -> str | Texts:
    """Splits a line at ` ||| ` into texts for an output layer of `kind`. Lines for tags and spans are not split."""
    if kind == TAGS:
        return line
    return tuple(line.split(PAIR_SEPARATOR, {CLASSES: 1, MULTILABEL: 1, CHOICES: -1}.get(kind, 0)))


def read_lines(path: str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, with about a megabyte in memory. The path `-` means standard input."""
    name = "standard input" if path == _STDIN else path
    try:
        file: Any = sys.stdin.buffer if path == _STDIN else Path(path).expanduser().open("rb")
        first_block = file.read1(_READ_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}; check the path") from error
    reject_utf16(name, first_block)
    if not first_block:
        raise UsageError(f"{name} is empty; write one text per line")
    return _decode_lines(file, first_block.removeprefix(_UTF8_BOM), name)


def _decode_lines(file: Any, first_block: bytes, name: str) -> Iterator[str]:
    with file:
        for number, line in enumerate(_split_lines(file, first_block), 1):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{name} line {number} is not UTF-8 at byte {error.start}; convert the file to UTF-8"
                ) from error


def _split_lines(file: Any, first_block: bytes) -> Iterator[bytes]:
    # Unlike `read`, `read1` returns the lines of a pipe as soon as they arrive.
    blocks = itertools.chain([first_block], iter(lambda: file.read1(_READ_BYTES), b""))
    rest = b""
    for block in unix_newlines(blocks):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest
