"""Readers that stream documents from input specs with bounded memory.

    text:GLOB               one sentence per line, a blank line between documents (google-research/bert's input)
    prose:GLOB              running text; `documents.prose` finds the documents
    lines:GLOB              one document per line, running text
    wiki:GLOB               WikiExtractor output, <doc id= url= title=> ... </doc>
    tfds:NAME/CONFIG:SPLIT  text of TensorFlow Datasets, one document per example
    hf:ORG/NAME/CONFIG:SPLIT#COLUMN  text of a Hugging Face Hub dataset, one document per row

GLOB may be a folder (all files in it) or a `gs://` path, may contain `**`, and may match .gz, .xz and .bz2 files.
"""

import bz2
import codecs
import dataclasses
import glob
import gzip
import itertools
import json
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, BinaryIO

from bertjax.data.corpus import datasets, documents
from bertjax.data.corpus.documents import Text
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import as_path, is_remote, reject_binary, unix_newlines

logger = logging.getLogger(__name__)
# Functions that divide the text of a file into documents, keyed by the kind of input.
_DIVIDE = {
    "text": documents.sentence_lines,
    "prose": documents.prose,
    "lines": documents.single_lines,
    "wiki": documents.wiki,
}
KINDS = (*_DIVIDE, "tfds", "hf")
_READ_BYTES = 1 << 20
_STORAGE_REQUESTS = 32
# First line of a WikiExtractor file.
_EXTRACTED = re.compile(rb"\s*<doc [a-z]+=")
# Start of a file that is not plain text: JSON (for example, from WikiExtractor with --json), HTML, XML (for example, a
# dump of Wikipedia), PDF or RTF.
NO_TEXT = re.compile(
    rb'\s*(<!--.*?-->\s*)?((\[\s*)?\{\s*"[^"\n]*"\s*:|<(!doctype|html|\?xml|mediawiki)\b|%PDF-|\{\\rtf)',
    re.IGNORECASE | re.DOTALL,
)
# Other starts of a file that is not a text corpus: a Python dictionary, JSON list of texts, or HTML, TEI or TREC tag.
_NO_CORPUS = re.compile(
    rb"\s*(\{'[^'\n]*':|\[\s*\"[^\"\n]*\"\s*[,\]]|<(head|body|tei|(?-i:DOC))(?=[\s>]))", re.IGNORECASE
)
# Number of rows to check at the start of a dataset. If one is an article title, the rows are lines of WikiText.
_START_ROWS = 100
# Number of lines to check at the start of a file. If each has a tab between words, the file is a table.
_TABLE_LINES = 20
# A file is not UTF-8 if its start has more invalid bytes than both limits, and most non-ASCII bytes are invalid.
_MAX_INVALID_BYTES, _MAX_INVALID_FRACTION = 20, 0.005
_TABLE = re.compile(r".*\.(jsonl?|csv|tsv)(\.gz|\.xz|\.bz2)?", re.IGNORECASE)
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]+")


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of text: a file, or a split of a dataset."""

    kind: str  # one of `KINDS`, or `texts` (a file written by `write_texts`)
    name: str  # path of a file or name of a dataset
    size_bytes: int | None  # size of the file or dataset in bytes, without decompression; None if unknown
    split: str = ""  # split of a dataset, "" for a file
    column: str = ""  # text column of a Hub dataset (default: "", the column `text` or the only text column)
    data_dir: str | None = None  # folder of TFDS datasets (default: None, TFDS's default)


def find_sources(specs: list[str], data_dir: str | None = None) -> tuple[list[Source], int]:
    """Returns the sources of input specs, in order, and the number of duplicate sources that were left out."""
    sources: dict[Source, Source] = {}
    duplicates = 0
    for spec in specs:
        kind, _, rest = spec.partition(":")
        if kind not in KINDS or not rest:
            kinds = f"{':GLOB, '.join(_DIVIDE)}:GLOB, tfds:NAME/CONFIG:SPLIT or hf:ORG/NAME/CONFIG:SPLIT#COLUMN"
            raise UsageError(f"unknown input {spec!r}; use {kinds}")
        if kind in ("tfds", "hf"):
            name, split, column = datasets.parse_dataset(spec)
            size = datasets.tfds_size_bytes(name, split, data_dir) if kind == "tfds" else None
            if kind == "hf":
                dataset = datasets.open_hub(name, split)
                datasets.hub_text_column(dataset, name, column)  # Raises if the dataset lacks the text column.
                if dataset.info.builder_name == "text":
                    fix = "download the files, and use prose: or text: to read their documents"
                    logger.warning(f"{spec} has .txt files, and each of their lines becomes a document; {fix}")
            spec_sources = [Source(kind, name, size, split, column, data_dir)]
        else:
            files = _remote_files(spec, rest) if is_remote(rest) else _local_files(spec, rest)
            spec_sources = [Source(kind, name, size) for name, size in files]
        for source in spec_sources:
            if not source.split and _TABLE.fullmatch(source.name):
                raise UsageError(f"{source.name} is a table or JSON, not text; leave it out, or extract its texts")
            # Read a file once, even if symlinks list it under several paths.
            key = dataclasses.replace(source, name=os.path.realpath(source.name))
            duplicates += key in sources
            sources.setdefault(key, source)
    return list(sources.values()), duplicates


def _local_files(spec: str, pattern: str) -> list[tuple[str, int]]:
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        names = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
    else:
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    files = []
    for name in sorted(names):
        # Resolve the path, because in a loop of symbolic links, `glob` lists paths that are too long for the system.
        real = os.path.realpath(name)
        if os.path.isdir(real):
            continue
        if not os.path.isfile(real) or not os.access(real, os.R_OK):
            raise UsageError(f"input {spec!r}: {name} is not a readable file; check its permissions, or leave it out")
        # Return absolute paths, because the workers of Beam may run in other folders.
        files.append((os.path.join(os.getcwd(), name) if os.path.exists(name) else real, os.path.getsize(real)))
    if not files:
        raise UsageError(f"input {spec!r} matches no file; check the path (append /** to read files in folders)")
    return files


def _remote_files(spec: str, pattern: str) -> list[tuple[str, int]]:
    from etils import epath

    stem = pattern.split("*")[0].rpartition("/")[0]
    try:
        # Send requests in parallel, because object storage has a high latency per request.
        with ThreadPoolExecutor(_STORAGE_REQUESTS) as pool:
            if "**" in pattern:
                # `**` matches any number of folders, and `*` a part of a name.
                parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
                wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
                expression = re.compile("".join(wildcards.get(part, re.escape(part)) for part in parts))
                files = [file for file in _walk(epath.Path(stem)) if expression.fullmatch(os.fspath(file))]
            elif "*" in pattern:
                files = epath.Path(stem).glob(pattern[len(stem) + 1 :])
            else:
                path = epath.Path(pattern)
                files = _walk(path) if path.is_dir() else [path]
            stats = pool.map(lambda file: (os.fspath(file), file.stat()), sorted(files))
            sizes = [(name, stat.length) for name, stat in stats if not stat.is_directory]
    except Exception as error:  # Catch everything, because storage backends raise different types.
        raise UsageError(f"input {spec!r} cannot be listed: {first_line(error)}; check the path") from error
    if not sizes:
        raise UsageError(f"input {spec!r} matches no file; check the path")
    return sizes


def _walk(folder: Any) -> list[Any]:
    scheme = os.fspath(folder).partition("://")[0]
    files = []
    for root, _, names in folder.walk():
        # Restore the scheme, which `epath.Path.walk` omits with fsspec.
        address = os.fspath(root) if "://" in os.fspath(root) else f"{scheme}://{os.fspath(root).lstrip('/')}"
        files += [type(folder)(address) / name for name in names]
    return files


def read(
    source: Source, problems: Counter[str], advance: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[Text]:
    """Yields the documents of a source, in order, and updates `problems`.

    Calls `advance` with the number of bytes read since the last call, for a progress bar.
    """
    if source.kind == "texts":
        return _read_texts(source)
    if source.split:
        return _read_dataset(source, problems, advance)
    return _DIVIDE[source.kind](_text_blocks(source, problems, advance), problems)


def _read_dataset(source: Source, problems: Counter[str], advance: Callable[[int], object]) -> Iterator[Text]:
    """Returns the rows of a dataset as documents, or its articles if the rows are lines of WikiText."""

    def read_rows() -> Iterator[str]:
        if source.kind == "tfds":
            texts = datasets.tfds_texts(source.name, source.split, source.data_dir)
        else:
            texts = datasets.hub_texts(source.name, source.split, source.column)
        for text in texts:
            problems["nul_characters"] += text.count("\0")
            advance(len(text.encode("utf-8", "surrogatepass")))
            yield text

    rows = read_rows()
    start = [*itertools.islice(rows, _START_ROWS)]
    if any(map(documents.is_title, start)):
        lines = (f"{row}\n" for row in rows)
        return documents.prose(itertools.chain(["".join(f"{row}\n" for row in start)], lines), problems)
    return documents.rows(itertools.chain(start, rows), problems)


def write_texts(texts: Iterable[Text], file: BinaryIO) -> None:
    """Writes texts to a file that can be read as a source of kind `texts`."""
    for text in texts:
        # Pass surrogates through, because datasets may contain unpaired ones, which UTF-8 cannot encode.
        file.write(json.dumps(dataclasses.astuple(text), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


def _read_texts(source: Source) -> Iterator[Text]:
    with as_path(source.name).open("rb") as file:
        for line in file:
            yield Text(*json.loads(line))


def _text_blocks(source: Source, problems: Counter[str], advance: Callable[[int], object]) -> Iterator[str]:
    """Yields the decoded text of a file in blocks of about a megabyte."""
    total_bytes = 0

    def read_blocks(raw: IO[bytes]) -> Iterator[bytes]:
        nonlocal total_bytes
        opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(os.path.splitext(source.name)[1].lower())
        file = opener(raw) if opener else raw
        position = 0
        while block := file.read(_READ_BYTES):
            advance(raw.tell() - position)
            position = raw.tell()
            if total_bytes == 0:
                reject_binary(source.name, block)
                block = block.removeprefix(codecs.BOM_UTF8)
                if source.kind != "wiki" and _EXTRACTED.match(block):
                    raise UsageError(f"{source.name} is from WikiExtractor; use wiki: instead of {source.kind}:")
                if NO_TEXT.match(block) or (source.kind != "wiki" and _NO_CORPUS.match(block)):
                    fix = "write its texts to a .txt file (WikiExtractor: omit --json)"
                    raise UsageError(f"{source.name} contains JSON, HTML, XML, PDF or RTF, not text; {fix}")
                _check_encoding(source.name, block)
                if source.kind != "wiki":
                    _check_no_table(source.name, block)
            total_bytes += len(block)
            yield block
        advance(raw.tell() - position)

    try:
        with as_path(source.name).open("rb") as raw:
            # Decode invalid bytes as surrogates and count these, because the text itself may contain U+FFFD.
            for text in codecs.iterdecode(unix_newlines(read_blocks(raw)), "utf-8", "surrogateescape"):
                problems["nul_characters"] += text.count("\0")
                if not text.isascii() and (invalid := _ESCAPED_BYTES.findall(text)):
                    problems["invalid_utf8_bytes"] += sum(map(len, invalid))
                    text = _ESCAPED_BYTES.sub("\ufffd", text)
                yield text
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        place = f"past byte {total_bytes:,} of the decompressed text"
        raise BertjaxError(f"cannot read {source.name} {place}: {first_line(error)}; repair or omit it") from error
    problems["empty_files"] += total_bytes == 0


def _check_no_table(name: str, block: bytes) -> None:
    """Raises a UsageError if all lines at the start of a file have tabs between words."""
    start = [line.strip() for line in block.split(b"\n", 2 * _TABLE_LINES)[:-1] if line.strip()][:_TABLE_LINES]
    if len(start) == _TABLE_LINES and all(b"\t" in line for line in start):
        raise UsageError(
            f"{name} is a table: each line has a tab; write only its texts to the file, or replace the tabs"
        )


def _check_encoding(name: str, block: bytes) -> None:
    """Raises a UsageError if the start of a file is not encoded in UTF-8."""
    invalid = sum(map(len, _ESCAPED_BYTES.findall(block.decode("utf-8", "surrogateescape"))))
    is_frequent = invalid > max(_MAX_INVALID_BYTES, _MAX_INVALID_FRACTION * len(block))
    if is_frequent and 2 * invalid > sum(byte > 0x7F for byte in block):
        raise UsageError(f"{name} is not in UTF-8; convert it, for example with iconv -f ENCODING -t UTF-8")
