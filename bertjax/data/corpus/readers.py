"""Input specs to documents, streamed: memory stays bounded whatever the size of a file or a document.

    text:GLOB               one sentence a line, a blank line between documents (google-research/bert's form)
    prose:GLOB              running text; see `layouts.prose` for what is a document
    wiki:GLOB               WikiExtractor output, <doc id= url= title=> ... </doc>
    tfds:NAME/CONFIG:SPLIT  a TensorFlow Datasets text dataset, one example a document
    docs:                   the docstrings of the standard library and of the installed distributions

GLOB may hold `**`, name a directory (all files in it), be a gs:// address, and match .gz and .xz files.
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

from bertjax.data.corpus import datasets, docstrings, layouts
from bertjax.data.corpus.layouts import Text
from bertjax.data.corpus.sentences import LINES, PARAGRAPHS
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import reject_utf16

FORMS = ("text", "prose", "wiki", "tfds", "docs")
_READ_BYTES = 1 << 20
_QUESTIONS_AT_ONCE = 32
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]+")


@dataclasses.dataclass(frozen=True)
class Source:
    """One thing to read: a file, a TFDS split, or all docstrings.

    Attributes:
      kind: one of `FORMS`; `paragraphs`: a paragraph a line, a blank line between documents; or `texts`: what
        `write_texts` wrote.
      name: path or dataset, for messages.
      size_bytes: bytes to read, compressed where the file is; None where not known.
    """

    kind: str
    name: str
    size_bytes: int | None
    split: str = ""
    data_dir: str | None = None


def expand(specs: list[str], data_dir: str | None = None) -> tuple[list[Source], int]:
    """The sources of the specs, files sorted by path within each spec, and how many files were named again.

    Args:
      specs: see the module's docstring.
      data_dir: where TFDS datasets lie; None is the library's default.

    Raises:
      UsageError: a spec is malformed, matches nothing, or names a file that cannot be read.
    """
    sources: dict[tuple[str, str, str], Source] = {}
    repeated = 0
    for spec in specs:
        kind, colon, rest = spec.partition(":")
        if kind not in FORMS or not colon or bool(rest) == (kind == "docs"):
            known = "text:GLOB, prose:GLOB, wiki:GLOB, tfds:NAME/CONFIG:SPLIT, docs:"
            raise UsageError(f"input {spec!r} is none of {known}")
        if kind == "docs":
            found = [Source(kind, "docs:", None)]
        elif kind == "tfds":
            name, split = datasets.parse(spec, rest)
            found = [Source(kind, name, datasets.size_bytes(name, split, data_dir), split, data_dir)]
        else:
            found = [Source(kind, name, size) for name, size in _files(spec, rest)]
        for source in found:
            # One file by several names, or by a loop of links, is read once.
            name = os.path.realpath(source.name) if kind not in ("docs", "tfds") and "://" not in rest else source.name
            key = (source.kind, name, source.split)
            repeated += key in sources
            sources.setdefault(key, source)
    return list(sources.values()), repeated


def _files(spec: str, pattern: str) -> list[tuple[str, int]]:
    if "://" in pattern:
        return _remote_files(spec, pattern)
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        names = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
    else:
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    # Beyond forty links in a row the system gives up on a name; the file has a shorter one that is listed too.
    files = sorted(name for name in names if not os.path.isdir(os.path.realpath(name)))
    if not files:
        if names:
            raise UsageError(f"input {spec!r} matches folders only; end it with /** for the files in them")
        if glob.has_magic(pattern) or os.path.isdir(pattern):
            raise UsageError(f"input {spec!r} matches no file")
        raise UsageError(f"input {spec!r}: there is no file {pattern}")
    found = []
    for name in files:
        real = os.path.realpath(name)
        if not os.path.isfile(real):
            raise UsageError(f"input {spec!r}: {name} is no file that can be read to an end")
        if not os.access(real, os.R_OK):
            raise UsageError(f"input {spec!r}: {name} cannot be read; check its permissions")
        found.append((name if os.path.exists(name) else real, os.path.getsize(real)))
    return found


def _remote_files(spec: str, pattern: str) -> list[tuple[str, int]]:
    from etils import epath

    stem = pattern.split("*")[0].rpartition("/")[0]
    try:
        # Each question takes a while to be answered, however many are asked at once.
        with ThreadPoolExecutor(_QUESTIONS_AT_ONCE) as pool:
            if "**" in pattern:
                wanted = re.compile(_remote_pattern(pattern))
                files = [file for file in _walked(epath.Path(stem)) if wanted.fullmatch(os.fspath(file))]
            elif "*" in pattern:
                matching = list(epath.Path(stem).glob(pattern[len(stem) + 1 :]))
                folders = pool.map(lambda path: path.is_dir(), matching)
                files = [path for path, is_folder in zip(matching, folders, strict=True) if not is_folder]
            else:
                path = epath.Path(pattern)
                files = _walked(path) if path.is_dir() else [path]
            files = sorted(files)
            sizes = list(pool.map(lambda file: file.stat().length, files))
        found = [(os.fspath(file), size) for file, size in zip(files, sizes, strict=True)]
    except Exception as error:  # Each file system behind epath has errors of its own.
        raise UsageError(f"input {spec!r} cannot be listed: {first_line(error)}") from error
    if not found:
        raise UsageError(f"input {spec!r} matches no file")
    return found


def _walked(folder: Any) -> list[Any]:
    """All files in a folder, as `epath.Path`."""
    scheme = os.fspath(folder).partition("://")[0]
    files = []
    for root, _, names in folder.walk():
        # With fsspec, the folders that epath walks through have lost what kind of storage they are in.
        place = os.fspath(root) if "://" in os.fspath(root) else f"{scheme}://{os.fspath(root).lstrip('/')}"
        files += [type(folder)(place) / name for name in names]
    return files


def _remote_pattern(pattern: str) -> str:
    """A regular expression for a pattern with `**`, which is any folders, and `*`, which is within one."""
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return "".join({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)


def read(source: Source, problems: Counter[str], advance: Callable[[int], None]) -> Iterator[Text]:
    """The documents of a source, in order.

    Args:
      problems: gains what was met and how often.
      advance: told the bytes read, as they are read.

    Raises:
      BertjaxError: the source cannot be read to its end.
    """
    if source.kind == "docs":
        return (Text(text, PARAGRAPHS) for text in docstrings.documents(docstrings.modules(), problems))
    if source.kind == "tfds":
        texts = datasets.texts(source.name, source.split, source.data_dir, problems, advance)
        return (Text(text, PARAGRAPHS) for text in texts)
    if source.kind == "texts":
        return _written_texts(source)
    chunks = _chunks(source, problems, advance)
    if source.kind in ("text", "paragraphs"):
        return layouts.blocks(chunks, LINES if source.kind == "text" else PARAGRAPHS, problems)
    return layouts.prose(chunks, problems) if source.kind == "prose" else layouts.wiki(chunks, problems)


def write_texts(texts: Iterable[Text], file: BinaryIO) -> None:
    """Writes texts as they were read, to be read again as a source of kind `texts`.

    Raises:
      OSError: the disk is full.
    """
    for text in texts:
        # Careless JSON holds halves of surrogate pairs.
        file.write(json.dumps(dataclasses.astuple(text), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


def _written_texts(source: Source) -> Iterator[Text]:
    with _open(source.name) as file:
        for line in file:
            yield Text(*json.loads(line))


def _open(name: str) -> BinaryIO:
    if "://" not in name:
        return open(name, "rb")
    from etils import epath

    return epath.Path(name).open("rb")


def _chunks(source: Source, problems: Counter[str], advance: Callable[[int], None]) -> Iterator[str]:
    """The decoded text of a file in chunks of about a megabyte, counting what is wrong with it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    total = 0
    position = 0
    try:
        with _open(source.name) as raw:
            opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(source.name)[1].lower())
            file = opener(raw) if opener else raw
            while True:
                block = file.read(_READ_BYTES)
                here = raw.tell()
                advance(here - position)
                position = here
                if total == 0:
                    reject_utf16(source.name, block)
                text = _decode(decoder, block, problems)
                if total == 0:
                    text = text.removeprefix("\ufeff")
                problems["nul_characters"] += block.count(0)
                total += len(block)
                yield text
                if not block:
                    break
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise BertjaxError(
            f"cannot read {source.name} past byte {total:,} of its text: {first_line(error)}; "
            "mend the file or leave it out"
        ) from error
    problems["empty_files"] += total == 0


def _decode(decoder: Any, block: bytes, problems: Counter[str]) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError:
        # Escapes rather than U+FFFD, which the text may hold of its own.
        decoder.errors = "surrogateescape"
        text = decoder.decode(block, final=not block)
        decoder.errors = "strict"
        problems["invalid_utf8_bytes"] += sum(map(len, _ESCAPED_BYTES.findall(text)))
        return _ESCAPED_BYTES.sub("\ufffd", text)
