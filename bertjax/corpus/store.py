"""The tokenised corpus on disk: three flat arrays a split and one manifest.

A corpus directory holds

    manifest.json              counts, settings, vocabulary hash, checksums
    vocab.txt | spiece.model   the vocabulary, byte for byte
    SPLIT.tokens.bin           little-endian uint16 (uint32 for vocabularies over 65,536), all token ids in order
    SPLIT.sentences.bin        uint64 [sentences + 1], token index where each sentence starts; the last is the total
    SPLIT.documents.bin        uint64 [documents + 1], sentence index where each document starts; likewise

for the splits `train` and `heldout`. Flat arrays are memory-mapped, so a corpus may be larger than RAM and any
sentence is one lookup away, which is what makes a jump to any training step cost the same.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.corpus.mapping import map_file
from bertjax.corpus.tokenizer import Vocabulary, load_vocabulary
from bertjax.errors import UsageError

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
ARRAYS = ("tokens", "sentences", "documents")
OFFSET_DTYPE = np.dtype("<u8")

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64


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
    """An opened corpus: where it is, what its manifest says, and its splits."""

    path: Path
    manifest: dict[str, Any]
    train: Split
    heldout: Split

    @property
    def vocabulary_path(self) -> Path:
        return self.path / self.manifest["vocabulary"]["file"]

    def vocabulary(self) -> Vocabulary:
        """Read anew; the manifest knows whether it lower-cases."""
        return load_vocabulary(self.vocabulary_path, self.manifest["vocabulary"]["lower_case"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest, which holds the checksum of everything else."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()


def array_file(split: str, array: str) -> str:
    """Name of the file that holds one array of one split."""
    return f"{split}.{array}.bin"


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Smallest dtype that holds every id."""
    return np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")


def sha256(path: Path) -> str:
    """SHA-256 of a whole file, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_sha256(path: Path) -> str:
    """SHA-256 of a file's size and of 64 blocks of 64 KiB spread evenly over it, first and last included.

    Costs the same for a megabyte and a terabyte, and sees truncation, a wrong file and wide damage; the full
    checksum, `sha256`, is in the manifest too.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for start in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry of a finished file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path), "sample_sha256": sample_sha256(path)}


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
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["format"]
        if found == FORMAT:
            manifest["files"], manifest["vocabulary"]["file"], manifest["token_dtype"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the corpus manifest {file} is damaged ({error}); run `bertjax prepare` again") from error
    if found != FORMAT:
        raise UsageError(
            f"the corpus {path} has format {found}, this version reads {FORMAT}; run `bertjax prepare` again"
        )
    return manifest


def _verify(path: Path, manifest: dict[str, Any]) -> None:
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise UsageError(f"the corpus {path} is damaged: {name} is missing; run `bertjax prepare` again")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise UsageError(
                f"the corpus {path} is damaged: {name} has {size:,} bytes, its manifest says "
                f"{expected['bytes']:,}; run `bertjax prepare` again"
            )
        if sample_sha256(file) != expected["sample_sha256"]:
            raise UsageError(
                f"the corpus {path} is damaged: {name} does not match its checksum; run `bertjax prepare` again"
            )


def open_corpus(path: str | Path, verify: bool = True) -> Corpus:
    """Opens a corpus, checking sizes and sampled checksums first.

    Raises:
      UsageError: there is no corpus at `path`, or it is damaged.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if verify:
        _verify(path, manifest)
    dtype = np.dtype(manifest["token_dtype"])
    return Corpus(path, manifest, **{split: open_split(path, split, dtype) for split in SPLITS})


def open_split(directory: Path, split: str, dtype: np.dtype) -> Split:
    """Memory-maps the files of one split, unchecked."""
    dtypes = {"tokens": dtype, "sentences": OFFSET_DTYPE, "documents": OFFSET_DTYPE}
    return Split(**{array: map_file(directory / array_file(split, array), dtypes[array]) for array in ARRAYS})
