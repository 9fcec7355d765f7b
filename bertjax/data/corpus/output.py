"""The writing side of the corpus format: the splits in a directory."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bertjax.data.corpus import heldout, store
from bertjax.data.corpus.encoding import Encoded, Part
from bertjax.errors import BertjaxError

INDEX = "index"
INDEX_DTYPE = np.dtype([("sentences", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20


class _SplitWriter:
    """Appends to the files of one split. The documents' sizes and hashes go to a file of their own until `finish`."""

    def __init__(self, directory: Path, split: str):
        self._path = {name: directory / store.array_file(split, name) for name in (*store.ARRAYS, INDEX)}
        self._files = {name: path.open("wb", _BUFFER_BYTES) for name, path in self._path.items()}
        self.documents = self.tokens = self.text_bytes = 0
        # The last document met, which may go on: [1] of INDEX_DTYPE, or empty before the first.
        self._open = np.empty(0, INDEX_DTYPE)

    def add(self, part: Part) -> None:
        """Adds documents."""
        self._add_sentences(part)
        entries = np.empty(part.hashes.size, INDEX_DTYPE)
        entries["sentences"], entries["bytes"] = part.document_sentences, part.document_bytes
        entries["hash"] = part.hashes
        entries = np.concatenate([self._open, entries])
        self._write(INDEX, entries[:-1])
        self._open = entries[-1:]
        self.documents += part.hashes.size

    def extend(self, part: Part) -> None:
        """Adds to the last document."""
        self._add_sentences(part)
        self._open["sentences"] += part.document_sentences.sum(dtype=np.uint64)
        self._open["bytes"] += part.document_bytes.sum(dtype=np.uint64)

    def finish(self) -> int:
        """Writes what is known only at the end; returns how many documents had no sentence and are left out."""
        self._write(INDEX, self._open)
        self._write("sentences", np.array([self.tokens], store.OFFSET_DTYPE))
        self._files[INDEX].flush()
        sentences = kept = 0
        for index in _read_blocks(self._path[INDEX], INDEX_DTYPE):
            counts = index["sentences"].astype(np.int64)
            starts = sentences + np.cumsum(counts) - counts
            self._write("documents", starts[counts > 0].astype(store.OFFSET_DTYPE))
            sentences += int(counts.sum())
            self.text_bytes += int(index["bytes"].sum())
            kept += int((counts > 0).sum())
        self._write("documents", np.array([sentences], store.OFFSET_DTYPE))
        self.close()
        empty, self.documents = self.documents - kept, kept
        return empty

    def index(self) -> np.ndarray:
        """[documents] of INDEX_DTYPE: what a finished split holds."""
        index = np.fromfile(self._path[INDEX], INDEX_DTYPE)
        return index[index["sentences"] > 0]

    def clear(self) -> None:
        self._path[INDEX].unlink()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _add_sentences(self, part: Part) -> None:
        lengths = part.sentence_tokens.astype(np.int64)
        starts = self.tokens + np.cumsum(lengths) - lengths
        self._write("sentences", starts.astype(store.OFFSET_DTYPE))
        self._write("tokens", part.tokens)
        self.tokens += part.tokens.size

    def _write(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.tobytes())


def _read_blocks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while (block := np.fromfile(file, dtype, _BLOCK_ENTRIES)).size:
            yield block


class CorpusWriter:
    """Writes encoded batches, in order, as the splits of a corpus."""

    def __init__(self, directory: Path, vocabulary_size: int, heldout_share: float):
        self._directory = directory
        self._dtype = store.token_dtype(vocabulary_size)
        self._heldout_share = heldout_share
        self._splits = {split: _SplitWriter(directory, split) for split in store.SPLITS}
        self._open_split = store.SPLITS[0]

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self._splits.values())

    def add(self, encoded: Encoded) -> None:
        """Adds one batch. Raises OSError where the disk is full."""
        if encoded.head.document_bytes.any():
            self._splits[self._open_split].extend(encoded.head)
        if encoded.open_split:
            for split, part in encoded.splits.items():
                self._splits[split].add(part)
            self._open_split = encoded.open_split

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for split in self._splits.values():
            split.close()

    def finish_part(self, problems: Counter[str]) -> dict[str, dict[str, int]]:
        """Completes the files, each split's index among them, and returns each split's counts."""
        for split in self._splits.values():
            problems["documents_without_sentences"] += split.finish()
        return {split: self._statistics(split) for split in store.SPLITS}

    def index(self, split: str) -> np.ndarray:
        """[documents] of INDEX_DTYPE: what a split holds, once the files are complete and as long as they are there."""
        return self._splits[split].index()

    def finish(self, problems: Counter[str]) -> dict[str, dict[str, int]]:
        """Completes the files, sees to it that no split stays without documents, and returns each split's counts.

        Raises:
          BertjaxError: there is no document.
        """
        self.finish_part(problems)
        check_documents(self.documents, problems)
        if self._heldout_share:
            self._fill_both(problems)
        for split in self._splits.values():
            split.clear()
        return {split: self._statistics(split) for split in store.SPLITS}

    def _fill_both(self, problems: Counter[str]) -> None:
        train, held = (self._splits[split] for split in store.SPLITS)
        if min(train.documents, held.documents) <= heldout.fewest_documents(self.documents):
            index, held_index = train.index(), held.index()
            from_train, from_heldout = heldout.to_move(index["hash"], held_index["hash"])
            if from_train.size or from_heldout.size:
                heldout.rewrite(self._directory, self._dtype, from_train, from_heldout)
                moved_bytes = int(index["bytes"][from_train].sum()) - int(held_index["bytes"][from_heldout].sum())
                train.text_bytes -= moved_bytes
                held.text_bytes += moved_bytes
            problems["no_heldout_document"] += held.documents + from_train.size - from_heldout.size == 0

    def _statistics(self, split: str) -> dict[str, int]:
        arrays = store.open_split(self._directory, split, self._dtype)
        return {
            "documents": arrays.documents.size - 1,
            "sentences": arrays.sentences.size - 1,
            "tokens": arrays.tokens.size,
            "text_bytes": self._splits[split].text_bytes,
        }


def check_documents(documents: int, problems: Mapping[str, int]) -> None:
    """Refuses a corpus of no documents.

    Raises:
      BertjaxError: there is none.
    """
    if not documents:
        met = "; ".join(f"{name}: {count:,}" for name, count in sorted(problems.items()) if count)
        raise BertjaxError(f"the inputs hold no text, so no corpus was written ({met}); check the --input specs")
