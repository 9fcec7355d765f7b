"""The tokenised corpus on disk: three flat arrays a split, their checksums, and one manifest.

A corpus directory holds

    manifest.json              counts, settings, vocabulary hash, checksums
    vocab.txt | spiece.model   the vocabulary, byte for byte
    SPLIT.tokens.bin           little-endian uint16 (uint32 for vocabularies over 65,536), all token ids in order
    SPLIT.sentences.bin        uint64 [sentences + 1], token index where each sentence starts; the last is the total
    SPLIT.documents.bin        uint64 [documents + 1], sentence index where each document starts; likewise
    SPLIT.ARRAY.crc32          uint32 [blocks], CRC-32 of each 256 KiB of the array's file

for the splits `train` and `heldout`. A corpus made on many machines has each array in files of equal size, cut without
regard to its content: SPLIT.ARRAY-00000-of-00002.bin and so on, which its manifest lists; their checksums are those of
the one array. Flat arrays are memory-mapped, so a corpus may be larger than RAM and any sentence is one lookup away,
which is what makes a jump to any training step cost the same. The manifest has the SHA-256 of every other file, so that
its own stands for the whole corpus.
"""

import dataclasses
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.blocks import BLOCK_BYTES, CHECKSUM_DTYPE, BlockFile, Verification, checksums_of
from bertjax.data.corpus.mapping import map_files
from bertjax.data.corpus.tokenizer import VOCABULARY_FILES, Vocabulary, load_vocabulary
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import read_json

FORMAT = 2
MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
ARRAYS = ("tokens", "sentences", "documents")
OFFSET_DTYPE = np.dtype("<u8")

_TOKEN_DTYPES = ("<u2", "<u4")
_AGAIN = "run `bertjax prepare` again"


@dataclasses.dataclass(frozen=True)
class Split:
    """One split, memory-mapped.

    Attributes:
      tokens: [tokens] uint16 or uint32 ids.
      sentences: [sentences + 1] uint64, token index of each sentence's start, then the number of tokens.
      documents: [documents + 1] uint64, sentence index of each document's start, then the number of sentences.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened corpus: where it is, what its manifest says, its splits, and which blocks of them were verified."""

    path: Path
    manifest: dict[str, Any]
    train: Split
    heldout: Split
    verification: Verification

    @property
    def vocabulary_path(self) -> Path:
        return self.path / self.manifest["vocabulary"]["file"]

    def vocabulary(self) -> Vocabulary:
        """Read anew; the manifest knows whether it lower-cases."""
        return load_vocabulary(self.vocabulary_path, self.manifest["vocabulary"]["lower_case"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest, which holds that of everything else."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()


def array_file(split: str, array: str) -> str:
    """Name of the file that holds one array of one split."""
    return f"{split}.{array}.bin"


def shard_file(split: str, array: str, shard: int, shards: int) -> str:
    """Name of one of the files that together hold one array of one split."""
    return f"{split}.{array}-{shard:05d}-of-{shards:05d}.bin"


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Smallest dtype that holds every id."""
    return np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")


def checksum_file(split: str, array: str) -> str:
    """Name of the file that holds the checksums of the blocks of one array."""
    return f"{split}.{array}.crc32"


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries of the finished files of a corpus; writes the checksums of the blocks of its arrays.

    Raises:
      OSError: the disk is full.
    """
    tables = {array_file(split, array): checksum_file(split, array) for split in SPLITS for array in ARRAYS}
    entries = {}
    for file in sorted(directory.iterdir()):
        checksums = checksums_of(file)
        entries[file.name] = {"bytes": file.stat().st_size, "sha256": checksums.sha256}
        if file.name in tables:
            table = directory / tables[file.name]
            table.write_bytes(checksums.blocks.tobytes())
            entries[table.name] = {"bytes": table.stat().st_size, "sha256": checksums_of(table).sha256}
    return entries


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest with its keys sorted, so that equal corpora have equal bytes."""
    text = json.dumps({"format": FORMAT, **manifest}, indent=1, sort_keys=True, ensure_ascii=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks a corpus manifest.

    Raises:
      UsageError: the directory is not a corpus of this format.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise UsageError(f"no corpus at {path}: {MANIFEST} is missing; make one with `bertjax prepare --output {path}`")
    try:
        manifest = read_json(file)
        found = manifest["format"]
        odd = _odd_value(manifest) if found == FORMAT else ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the corpus manifest {file} is damaged ({_told(error)}); {_AGAIN}") from error
    if found != FORMAT:
        raise UsageError(f"the corpus {path} has format {str(found)[:20]}, this version reads {FORMAT}; {_AGAIN}")
    if odd:
        raise UsageError(f"the corpus manifest {file} is damaged ({odd}); {_AGAIN}")
    return manifest


def _told(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _odd_value(manifest: dict[str, Any]) -> str:
    """What in a manifest can be no value of it; "" where nothing is.

    Raises:
      KeyError, TypeError, AttributeError: something is not there, or is not of the kind it must be.
    """
    vocabulary, files, dtype = manifest["vocabulary"], manifest["files"], manifest["token_dtype"]
    if dtype not in _TOKEN_DTYPES:
        return f"token_dtype is {str(dtype)[:40]!r}, known: {', '.join(_TOKEN_DTYPES)}"
    size, lower_case, name = vocabulary["size"], vocabulary["lower_case"], vocabulary["file"]
    if type(size) is not int or size < 1 or token_dtype(size).str != dtype:
        return f"a vocabulary of {str(size)[:40]} pieces does not go with token_dtype {dtype}"
    if type(lower_case) is not bool:
        return f"the vocabulary's lower_case is {str(lower_case)[:40]!r}"
    if name not in VOCABULARY_FILES.values():
        return f"the vocabulary's file is {str(name)[:40]!r}"
    itemsizes = {name: 1}
    for split in SPLITS:
        for array in ARRAYS:
            itemsize = dtypes(np.dtype(dtype))[array].itemsize
            itemsizes |= dict.fromkeys(_array_files(manifest, split, array), itemsize)
            itemsizes[checksum_file(split, array)] = CHECKSUM_DTYPE.itemsize
    if other := {*files} - {*itemsizes}:
        return f"it lists {str(min(other))[:40]!r}, which is no file of a corpus"
    for name, itemsize in itemsizes.items():
        length, sha256 = files[name]["bytes"], files[name]["sha256"]
        if type(length) is not int or length < 0 or length % itemsize:
            return f"{name} has {str(length)[:40]} bytes in it"
        if type(sha256) is not str:
            return f"{name} has the checksum {str(sha256)[:40]}"
    for split in SPLITS:
        for array in ARRAYS:
            sizes = [files[name]["bytes"] for name in _array_files(manifest, split, array)]
            if len({*sizes[:-1]}) > 1 or any(size % BLOCK_BYTES or not size for size in sizes[:-1]):
                return f"the files of {split}.{array} have not the same number of whole blocks each"
            blocks = -(-sum(sizes) // BLOCK_BYTES)
            if files[checksum_file(split, array)]["bytes"] != blocks * CHECKSUM_DTYPE.itemsize:
                return f"{checksum_file(split, array)} has not one checksum for each block"
    return ""


def dtypes(tokens: np.dtype) -> dict[str, np.dtype]:
    """Array to its dtype; that of the tokens depends on the vocabulary."""
    return {"tokens": tokens, "sentences": OFFSET_DTYPE, "documents": OFFSET_DTYPE}


def _array_files(manifest: dict[str, Any], split: str, array: str) -> list[str]:
    """Names of the files that hold one array of one split, in order."""
    if "shards" not in manifest:
        return [array_file(split, array)]
    shards = manifest["shards"][f"{split}.{array}"]
    if type(shards) is not int or not 1 <= shards <= len(manifest["files"]):
        raise TypeError(f"{split}.{array} is in {str(shards)[:40]} files")
    return [shard_file(split, array, shard, shards) for shard in range(shards)]


def _check_files(path: Path, manifest: dict[str, Any]) -> None:
    """Refuses a corpus whose files have another size, or whose vocabulary is another."""
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise UsageError(f"the corpus {path} is damaged: {name} is missing; {_AGAIN}")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise UsageError(
                f"the corpus {path} is damaged: {name} has {size:,} bytes, its manifest says "
                f"{expected['bytes']:,}; {_AGAIN}"
            )
    _checked(path, manifest, manifest["vocabulary"]["file"])


def _checked(path: Path, manifest: dict[str, Any], name: str) -> bytes:
    """The content of a small file of the corpus."""
    expected = manifest["files"][name]
    content = (path / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise BertjaxError(f"the corpus {path} is damaged: {name} does not match its checksum; {_AGAIN}")
    return content


def open_corpus(path: str | Path) -> Corpus:
    """Opens a corpus after a quick check: sizes, and some blocks of each array, or all of a small corpus.

    What is read later is verified by `Corpus.verification`.

    Raises:
      UsageError: there is no corpus at `path`, or a file is missing or has another size.
      BertjaxError: a file is damaged, with the block.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_files(path, manifest)
    dtype = np.dtype(manifest["token_dtype"])
    # The held-out split first: it is small, and every evaluation reads all of it.
    verification = Verification(
        [_block_file(path, manifest, split, array) for split in reversed(SPLITS) for array in ARRAYS]
    )
    verification.verify_at_start()
    files = {
        split: {array: [path / name for name in _array_files(manifest, split, array)] for array in ARRAYS}
        for split in SPLITS
    }
    splits = {split: Split(**_mapped(files[split], dtype)) for split in SPLITS}
    return Corpus(path, manifest, **splits, verification=verification)


def _block_file(path: Path, manifest: dict[str, Any], split: str, array: str) -> BlockFile:
    dtype = np.dtype(manifest["token_dtype"])
    if array == "tokens":
        fault = partial(_odd_id, manifest["vocabulary"]["size"])
    else:
        beyond = "tokens" if array == "sentences" else "sentences"
        count = _array_bytes(manifest, split, beyond) // dtypes(dtype)[beyond].itemsize
        fault = partial(_odd_offset, count if array == "sentences" else count - 1, beyond)
    names = _array_files(manifest, split, array)
    return BlockFile(
        path=path / array_file(split, array),
        checksums=np.frombuffer(_checked(path, manifest, checksum_file(split, array)), CHECKSUM_DTYPE),
        dtype=dtypes(dtype)[array],
        of=f"the corpus {path}",
        remedy=_AGAIN,
        fault=fault,
        shards=tuple(path / name for name in names) if "shards" in manifest else (),
        shard_blocks=-(-manifest["files"][names[0]]["bytes"] // BLOCK_BYTES),
    )


def _array_bytes(manifest: dict[str, Any], split: str, array: str) -> int:
    return sum(manifest["files"][name]["bytes"] for name in _array_files(manifest, split, array))


def _odd_id(vocabulary_size: int, ids: np.ndarray) -> str:
    largest = int(ids.max(initial=0))
    return "" if largest < vocabulary_size else f"holds the id {largest:,}, the vocabulary has {vocabulary_size:,}"


def _odd_offset(last: int, what: str, offsets: np.ndarray) -> str:
    if np.any(offsets[1:] < offsets[:-1]):
        return f"holds starts of {what} that do not rise"
    return "" if int(offsets[-1]) <= last else f"points to {what[:-1]} {int(offsets[-1]):,}, there are {last:,}"


def open_split(directory: Path, split: str, dtype: np.dtype) -> Split:
    """Memory-maps the files of one split, one an array, unchecked."""
    return Split(**_mapped({array: [directory / array_file(split, array)] for array in ARRAYS}, dtype))


def _mapped(files: dict[str, list[Path]], tokens: np.dtype) -> dict[str, np.ndarray]:
    return {array: map_files(files[array], dtype) for array, dtype in dtypes(tokens).items()}
