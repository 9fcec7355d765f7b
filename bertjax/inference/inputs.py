"""Model inputs at inference: lines of text files, and rows of token ids."""

import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.data.corpus.readers import NO_TEXT
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.tables import FORMATS
from bertjax.errors import UsageError, first_line, quoted
from bertjax.inference.load import LoadedModel
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, TAGS
from bertjax.utils.io import reject_binary, unix_newlines

logger = logging.getLogger(__name__)

# Texts of one example, such as a question, a pair of texts, or a context and its endings (multiple choice).
Texts = tuple[str, ...]
Text = str | Texts

STDIN = "-"
# Separator of texts in a line: the two texts of a pair, or a context and its endings.
PAIR_SEPARATOR = " ||| "
_UTF8_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


@dataclasses.dataclass
class TruncationCount:
    """Number of encoded texts (a pair counts as one text), and number of texts truncated to `seq_len` tokens."""

    seq_len: int
    total: int = 0
    truncated: int = 0

    def log(self) -> None:
        """Logs a warning with both counts if any text was truncated."""
        if self.truncated:
            logger.warning(f"{self.truncated:,} of {self.total:,} texts were truncated to {self.seq_len} tokens")


def encode_row(ids: Sequence[list[int]], vocabulary: Vocabulary, truncation: TruncationCount) -> dict[str, list[int]]:
    """Builds a row with [CLS] and [SEP] from the ids of a text or pair, truncates it, and updates `truncation`."""
    first, second = ids if len(ids) > 1 else (*ids, None)
    truncation.total += 1
    truncation.truncated += sum(map(len, ids)) > vocabulary.room(truncation.seq_len, len(ids))
    return encode_pair(first, second, truncation.seq_len, vocabulary)


def as_tuples(texts: Iterable[Text]) -> Iterator[Texts]:
    """Returns an iterator over the texts, each as a tuple of str."""
    if isinstance(texts, str):
        raise UsageError(f"texts must be a list, such as ['a film'], not {quoted(texts)}")
    return ((text,) if isinstance(text, str) else tuple(text) for text in texts)


def tokenize(
    model: LoadedModel,
    texts: Iterable[Text],
    truncation: TruncationCount,
    prompt: str = "",
    embedder: SentenceEmbedder | None = None,
) -> Examples:
    """Tokenizes texts and pairs as rows with [CLS] and [SEP].

    With `embedder`, the rows are those of sentence-transformers. Special tokens in a text remain single tokens.
    `prompt` is prepended to each text, or to the first text of a pair.
    """
    vocabulary, lower_case = model.vocabulary, embedder is not None and embedder.lower_case
    inputs = [(prompt + first, *second) for first, *second in as_tuples(texts)]
    all_parts = [part for parts in inputs for part in parts]
    ids_of_parts = iter(model.tokenizer.encode_all_with_special(all_parts, lower_case))
    rows = []
    for parts in inputs:
        ids = list(itertools.islice(ids_of_parts, len(parts)))
        if embedder and len(ids) > 1:
            room = vocabulary.room(truncation.seq_len, num_texts=2)
            ids[0] = ids[0][: first_len(len(ids[0]), len(ids[1]), room)]
        rows.append(encode_row(ids, vocabulary, truncation))
    return make_examples(rows, {})


def first_len(first: int, second: int, room: int) -> int:
    """Returns the number of tokens of a pair's first text to keep before `encode_row` truncates the pair.

    `first` and `second` are the lengths of the texts, and `room` is the maximum of their sum. If both are truncated,
    their new lengths may differ by 1. As in Hugging Face's tokenizers, the second text is then longer, unless the first
    text was longer before truncation. In google-research/bert, the first text is always longer.
    """
    return first if first > second else min(first, max(room - second, room // 2))


def split_line(line: str, kind: str) -> str | Texts:
    """Splits a line at ` ||| ` into texts for an output layer of `kind`. Does not split lines for tags or spans."""
    if kind == TAGS:
        return line
    return tuple(line.split(PAIR_SEPARATOR, {CLASSES: 1, MULTILABEL: 1, CHOICES: -1}.get(kind, 0)))


def read_texts(texts: Iterable[str], path: str | None) -> Iterator[str]:
    """Returns an iterator over `texts`, then over the lines of a UTF-8 file, which is read in blocks of 1 MiB.

    The path `-` means standard input. Raises a UsageError at once if the file cannot be read or is empty.
    """
    if not path:
        return iter(texts)
    name = "standard input" if path == STDIN else path
    if (form := Path(path).suffix.removeprefix(".").lower()) in (*FORMATS, "json"):
        fix = "write its texts to a .txt file, or use predict --output DIR --config.data.test_file=FILE"
        raise UsageError(f"{path} is a {form} table, not one text per line; {fix}")
    try:
        file: Any = sys.stdin.buffer if path == STDIN else Path(path).expanduser().open("rb")
        first_block = file.read1(_READ_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {first_line(error)}; check the path") from error
    reject_binary(name, first_block)
    if not first_block:
        raise UsageError(f"{name} is empty; write one text per line")
    if NO_TEXT.match(first_block):
        raise UsageError(f"{name} contains JSON or markup, not one text per line; write its texts to a .txt file")
    return itertools.chain(texts, _decode_lines(file, first_block.removeprefix(_UTF8_BOM), name))


def _decode_lines(file: Any, first_block: bytes, name: str) -> Iterator[str]:
    with file:
        for number, line in enumerate(_split_lines(file, first_block), 1):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                problem = f"{name} line {number} is not UTF-8 at byte {error.start}; convert the file to UTF-8"
                raise UsageError(problem) from error


def _split_lines(file: Any, first_block: bytes) -> Iterator[bytes]:
    # Unlike `read`, `read1` returns the lines of a pipe as soon as they arrive.
    blocks = itertools.chain([first_block], iter(lambda: file.read1(_READ_BYTES), b""))
    rest = b""
    for block in unix_newlines(blocks):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest
