"""Readers that stream documents from input specs with bounded memory.

    text:GLOB               one sentence per line, a blank line between documents (google-research/bert's input)
    prose:GLOB              running text; `documents.prose` finds the documents
    wiki:GLOB               WikiExtractor output, <doc id= url= title=> ... </doc>
    tfds:NAME/CONFIG:SPLIT  text of a TensorFlow Datasets dataset, one document per example
    hf:ORG/NAME/CONFIG:SPLIT#COLUMN  text of a dataset of the Hugging Face Hub, one document per row
    docs:                   docstrings of the standard library and of the installed distributions

GLOB may be a folder (all files in it) or a gs:// address, may contain `**`, and may match .gz and .xz files.
"""

import codecs
import dataclasses
import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from bertjax.data.corpus import datasets, docstrings, documents
from bertjax.data.corpus.documents import LINES, PARAGRAPHS, Text
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import as_path, reject_utf16, unix_newlines

KINDS = ("text", "prose", "wiki", "tfds", "hf", "docs")
# Kinds of sources that are not files.
_NAMED_KINDS = ("docs", "tfds", "hf")
_READ_BYTES = 1 << 20
_STORAGE_REQUESTS = 32
# First line of a file of WikiExtractor.
_EXTRACTED = re.compile(rb"\s*<doc id=")
_TABLE = re.compile(r".*\.(jsonl?|csv|tsv)(\.gz|\.xz)?", re.IGNORECASE)
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]+")


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of text: a file, a split of a dataset, or all docstrings.

    Attributes:
      kind: one of `KINDS`, `paragraphs` (a file with one paragraph per line and a blank line between documents), or
        `texts` (a file written by `write_texts`).
      name: path of a file or name of a dataset.
      size_bytes: size of the file or dataset in bytes, without decompression; None if unknown.
      split: split of a dataset.
      column: text column of a dataset on the hub (default: "", the column `text` or the only text column).
      data_dir: folder of TFDS datasets (default: None, TFDS's default).
    """

    kind: str
    name: str
    size_bytes: int | None
    split: str = ""
    column: str = ""
    data_dir: str | None = None


def find_sources(specs: list[str], data_dir: str | None = None) -> tuple[list[Source], int]:
    """Returns the sources of input specs, in order, and the number of duplicate sources that were left out.

    `data_dir` is the folder of TFDS datasets (default: None, TFDS's default).
    """
    sources: dict[tuple[str, str, str], Source] = {}
    duplicates = 0
    for spec in specs:
        kind, colon, rest = spec.partition(":")
        if kind not in KINDS or not colon or bool(rest) == (kind == "docs"):
            kinds = "text:GLOB, prose:GLOB, wiki:GLOB, tfds:NAME/CONFIG:SPLIT, hf:ORG/NAME/CONFIG:SPLIT#COLUMN or docs:"
            raise UsageError(f"unknown input {spec!r}; use {kinds}")
        if kind == "docs":
            spec_sources = [Source(kind, "docs:", None)]
        elif kind == "tfds":
            name, split = datasets.parse_tfds(spec, rest)
            spec_sources = [Source(kind, name, datasets.tfds_size_bytes(name, split, data_dir), split, "", data_dir)]
        elif kind == "hf":
            name, split, column = datasets.parse_hub(spec, rest)
            datasets.open_hub(name, split, column)  # Raises if one of them does not exist.
            spec_sources = [Source(kind, name, None, split, column)]
        else:
            spec_sources = [Source(kind, name, size) for name, size in _files(spec, rest)]
            if table := next((source.name for source in spec_sources if _TABLE.fullmatch(source.name)), ""):
                raise UsageError(
                    f"input {spec!r}: {table} is a table or JSON, not text; write its texts to a .txt file, or leave "
                    "the file out, for example with *.txt"
                )
        for source in spec_sources:
            # Read a file once, even if symlinks list it under several paths.
            name = os.path.realpath(source.name) if kind not in _NAMED_KINDS and "://" not in rest else source.name
            key = (source.kind, name, f"{source.split}#{source.column}")
            duplicates += key in sources
            sources.setdefault(key, source)
    return list(sources.values()), duplicates


def _files(spec: str, pattern: str) -> list[tuple[str, int]]:
    if "://" in pattern:
        return _remote_files(spec, pattern)
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        names = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
    else:
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    # Resolve the paths, because in a loop of symbolic links, `glob` lists paths that are too long for the system.
    files = sorted(name for name in names if not os.path.isdir(os.path.realpath(name)))
    if not files:
        if names:
            raise UsageError(f"input {spec!r} matches only folders; append /** to read the files in them")
        if glob.has_magic(pattern) or os.path.isdir(pattern):
            raise UsageError(f"input {spec!r} matches no file; check the pattern")
        raise UsageError(f"input {spec!r}: no file {pattern}; check the path")
    sizes = []
    for name in files:
        real = os.path.realpath(name)
        if not os.path.isfile(real):
            raise UsageError(f"input {spec!r}: {name} is not a regular file; leave it out")
        if not os.access(real, os.R_OK):
            raise UsageError(f"input {spec!r}: {name} cannot be read; check its permissions")
        sizes.append((name if os.path.exists(name) else real, os.path.getsize(real)))
    return sizes


def _remote_files(spec: str, pattern: str) -> list[tuple[str, int]]:
    from etils import epath

    stem = pattern.split("*")[0].rpartition("/")[0]
    try:
        # Object storage has a high latency per request, but serves many requests at a time.
        with ThreadPoolExecutor(_STORAGE_REQUESTS) as pool:
            if "**" in pattern:
                expression = re.compile(_glob_expression(pattern))
                files = [file for file in _walk(epath.Path(stem)) if expression.fullmatch(os.fspath(file))]
            elif "*" in pattern:
                matching = list(epath.Path(stem).glob(pattern[len(stem) + 1 :]))
                folders = pool.map(lambda path: path.is_dir(), matching)
                files = [path for path, is_folder in zip(matching, folders, strict=True) if not is_folder]
            else:
                path = epath.Path(pattern)
                files = _walk(path) if path.is_dir() else [path]
            files = sorted(files)
            sizes = list(pool.map(lambda file: file.stat().length, files))
    except Exception as error:  # Storage backends raise different exception types.
        raise UsageError(f"input {spec!r} cannot be listed: {first_line(error)}; check the address") from error
    if not files:
        raise UsageError(f"input {spec!r} matches no file; check the pattern")
    return [(os.fspath(file), size) for file, size in zip(files, sizes, strict=True)]


def _walk(folder: Any) -> list[Any]:
    """Returns all files in a folder, at any depth."""
    scheme = os.fspath(folder).partition("://")[0]
    files = []
    for root, _, names in folder.walk():
        # With fsspec, `epath.Path.walk` yields folders without their scheme.
        address = os.fspath(root) if "://" in os.fspath(root) else f"{scheme}://{os.fspath(root).lstrip('/')}"
        files += [type(folder)(address) / name for name in names]
    return files


def _glob_expression(pattern: str) -> str:
    """Returns a regular expression for a pattern with `**` (any number of folders) and `*` (part of a name)."""
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return "".join({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)


def read(
    source: Source, problems: Counter[str], advance: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[Text]:
    """Yields the documents of a source, in order, and updates `problems`.

    Calls `advance` with the number of bytes read since the last call, for a progress bar.
    """
    if source.kind == "docs":
        return (Text(text, PARAGRAPHS) for text in docstrings.documents(docstrings.modules(), problems))
    if source.kind == "tfds":
        texts = datasets.tfds_texts(source.name, source.split, source.data_dir, problems, advance)
        return (Text(text, PARAGRAPHS) for text in texts)
    if source.kind == "hf":
        texts = datasets.hub_texts(source.name, source.split, source.column, problems, advance)
        return (Text(text, PARAGRAPHS) for text in texts)
    if source.kind == "texts":
        return _read_texts(source)
    blocks = _text_blocks(source, problems, advance)
    if source.kind in ("text", "paragraphs"):
        return documents.blank_line_documents(blocks, LINES if source.kind == "text" else PARAGRAPHS, problems)
    return documents.prose(blocks, problems) if source.kind == "prose" else documents.wiki(blocks, problems)


def write_texts(texts: Iterable[Text], file: BinaryIO) -> None:
    """Writes texts to a file that can be read as a source of kind `texts`."""
    for text in texts:
        # Datasets may contain unpaired surrogates, which UTF-8 cannot encode.
        file.write(json.dumps(dataclasses.astuple(text), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


def _read_texts(source: Source) -> Iterator[Text]:
    with as_path(source.name).open("rb") as file:
        for line in file:
            yield Text(*json.loads(line))


def _text_blocks(source: Source, problems: Counter[str], advance: Callable[[int], object]) -> Iterator[str]:
    """Yields the decoded text of a file in blocks of about a megabyte.

    If the file ends with an incomplete UTF-8 character, the last block contains its replacement U+FFFD.
    Otherwise, the last block is empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    total_bytes = 0
    position = 0
    try:
        with as_path(source.name).open("rb") as raw:
            opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(source.name)[1].lower())
            file = opener(raw) if opener else raw

            def read_blocks() -> Iterator[bytes]:
                nonlocal total_bytes, position
                block = b"unread"
                while block:
                    block = file.read(_READ_BYTES)
                    advance(raw.tell() - position)
                    position = raw.tell()
                    if total_bytes == 0:
                        reject_utf16(source.name, block)
                        is_text = source.kind in ("text", "prose")
                        if is_text and _EXTRACTED.match(block.removeprefix(codecs.BOM_UTF8)):
                            raise UsageError(
                                f"{source.name} is from WikiExtractor; use wiki: instead of {source.kind}:"
                            )
                    yield block if total_bytes else block.removeprefix(codecs.BOM_UTF8)
                    total_bytes += len(block)

            for block in unix_newlines(read_blocks()):
                problems["nul_characters"] += block.count(0)
                yield _decode(decoder, block, problems)
            yield _decode(decoder, b"", problems)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise BertjaxError(
            f"cannot read {source.name} past byte {total_bytes:,} of the decompressed text: {first_line(error)}; "
            "repair the file or leave it out"
        ) from error
    problems["empty_files"] += total_bytes == 0


def _decode(decoder: Any, block: bytes, problems: Counter[str]) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError:
        # Decode invalid bytes as surrogates and count these, because the text itself may contain U+FFFD.
        decoder.errors = "surrogateescape"
        text = decoder.decode(block, final=not block)
        decoder.errors = "strict"
        problems["invalid_utf8_bytes"] += sum(map(len, _ESCAPED_BYTES.findall(text)))
        return _ESCAPED_BYTES.sub("\ufffd", text)
