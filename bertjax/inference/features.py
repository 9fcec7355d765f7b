"""Contextual embeddings of texts from any layer (section 5.3 of the paper), in a folder of shards (.npz files).

An interrupted command resumes after the last complete shard.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.finetuning.examples import make_examples
from bertjax.errors import BertjaxError, UsageError
from bertjax.inference.inputs import PAIR_SEPARATOR, Text, TruncationCount, encode_row
from bertjax.inference.load import LoadedModel
from bertjax.model.encoder import ENCODER
from bertjax.training.cached_features import make_hidden_states_fn
from bertjax.utils.io import remove_temporaries, write_npz
from bertjax.utils.json_files import read_object, write_json

logger = logging.getLogger(__name__)

# Metadata file of a shards folder: the settings and, once all shards are complete, the numbers of texts and shards.
METADATA = "features.json"

# Approximate size of a shard's hidden states in bytes. It limits the memory of the process.
SHARD_BYTES = 64 << 20
# Approximate maximum tokens per shard. Models with a small hidden size reach this limit before `SHARD_BYTES`.
_MAX_SHARD_TOKENS = 1 << 18


@dataclasses.dataclass(frozen=True)
class FeatureExtractor:
    """Extractor of the hidden states of C layers, for texts truncated to `seq_len` tokens.

    Layer 0 is the output of the embeddings, and layer N the last of N layers. Negative indices count from the end.
    """

    model: LoadedModel
    layers: tuple[int, ...]
    seq_len: int

    def __post_init__(self) -> None:
        num_layers = self.model.config.num_hidden_layers
        if wrong := [layer for layer in self.layers if not -num_layers - 1 <= layer <= num_layers]:
            raise UsageError(f"unknown layers: {wrong}; use 0 (embeddings) to {num_layers}, or negative indices")

    def metadata(self) -> dict[str, Any]:
        """Returns all settings that determine the features, except the texts, as a JSON object."""
        return {"layers": list(self.layers), "seq_len": self.seq_len, **self.model.metadata()}

    def shards(self, texts: Iterable[str], done: int = 0) -> Iterator[dict[str, Any]]:
        """Yields the hidden states of `texts` in shards. The same texts always give the same shards. `done` is unused.

        A text can be a pair, written as `FIRST ||| SECOND`. A shard with K tokens of T texts has the arrays:
          `offsets`: int64 [T + 1]; the tokens of text i are in rows offsets[i]:offsets[i + 1] of the other arrays.
          `hidden_states`: float32 [K, C, D].
          `input_ids`, `segment_ids`: int32 [K].
          `tokens`: str [K].
          `words`: int32 [K], index of the token's word in `text.split()`, or in `FIRST.split() + SECOND.split()` for
            a pair; -1 for [CLS] and [SEP].
          `characters`: int32 [K, 2], start and end character offsets of the token in the text; -1 for [CLS] and
            [SEP].
          `texts_sha256`: str, hash of the texts.
        """
        config, truncation = self.model.config, TruncationCount(self.seq_len)
        encoder = self.model.nested_params[ENCODER]
        hidden_states_of = make_hidden_states_fn(config, encoder, self.model.mesh, self.layers, self.seq_len)
        max_tokens = min(_MAX_SHARD_TOKENS, SHARD_BYTES // (4 * len(self.layers) * config.hidden_size))
        remaining = iter(texts)
        while rows := list(self._next_rows(remaining, max_tokens, truncation)):
            examples = make_examples([row for _, row in rows], {})
            tokens, offsets = examples.tokens, examples.offsets
            hidden_states = np.empty((int(offsets[-1]), len(self.layers), config.hidden_size), np.float32)
            for index, states in hidden_states_of(examples):
                hidden_states[offsets[index] : offsets[index + 1]] = states
            yield {
                "offsets": offsets,
                "hidden_states": hidden_states,
                "tokens": np.array(self.model.tokenizer.pieces(tokens["input_ids"])),
                **tokens,
                "texts_sha256": np.array(texts_sha256(text for text, _ in rows)),
            }
        truncation.log()

    def _next_rows(
        self, texts: Iterator[str], max_tokens: int, truncation: TruncationCount
    ) -> Iterator[tuple[str, dict[str, list[Any]]]]:
        num_tokens = 0
        while num_tokens < max_tokens and (text := next(texts, None)) is not None:
            row = self._encode(text, truncation)
            num_tokens += len(row["input_ids"])
            yield text, row

    def _encode(self, text: str, truncation: TruncationCount) -> dict[str, list[Any]]:
        parts, vocabulary = text.split(PAIR_SEPARATOR, 1), self.model.vocabulary
        encoded = [self.model.tokenizer.encode_with_offsets(part) for part in parts]
        row: dict[str, list[Any]] = encode_row([ids for ids, _ in encoded], vocabulary, truncation)
        row |= {"words": [-1], "characters": [[-1, -1]]}
        first_char, first_word = 0, 0
        for segment, (part, (_, spans)) in enumerate(zip(parts, encoded, strict=True)):
            word_starts = np.array([match.start() for match in re.finditer(r"\S+", part)], np.int64)
            # Drop the spans of truncated pieces. A segment ends with [SEP], and the first segment starts with [CLS].
            is_last = segment == len(parts) - 1
            separators = vocabulary.end_separators if is_last else vocabulary.pair_separators
            spans = spans[: row["segment_ids"].count(segment) - separators - (1 if segment == 0 else 0)]
            # Assign each token to the word of its last character, since a SentencePiece token may start with a space.
            words = np.searchsorted(word_starts, np.maximum(spans[:, 1] - 1, spans[:, 0]), side="right") - 1
            row["words"] += [*(words + first_word).tolist(), *[-1] * separators]
            row["characters"] += [*(spans + first_char).tolist(), *[[-1, -1]] * separators]
            first_char += len(part) + len(PAIR_SEPARATOR)
            first_word += len(word_starts)
        return row


def texts_sha256(texts: Iterable[Text]) -> str:
    """Returns the SHA-256 of texts or pairs of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(str(text).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def num_texts(shard: dict[str, Any]) -> int:
    """Returns the number of texts in a shard."""
    return len(shard["offsets"]) - 1


def format_features(text: str, shard: dict[str, Any], index: int, layers: Sequence[int]) -> str:
    """Formats the first six features of each token of a text, one line per token and layer."""
    lines = [text]
    for token in range(shard["offsets"][index], shard["offsets"][index + 1]):
        for layer, states in zip(layers, shard["hidden_states"][token], strict=True):
            numbers = " ".join(f"{value:9.5f}" for value in states[:6])
            lines.append(f"  {shard['tokens'][token]:<16} layer {layer}: {numbers} ...")
    return "\n".join(lines)


def write_shards(folder: Path, extractor: Any, texts: Iterable[Text]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Writes shards to `00000.npz`, `00001.npz`, ..., and finally the numbers of texts and shards to `features.json`.

    Resumes an interrupted command. Raises a UsageError if the folder contains other metadata, or shards of other texts.
    Yields the number of texts before each new shard, and the shard. `extractor` has the methods `metadata` and `shards`
    of `FeatureExtractor`.
    """
    metadata = extractor.metadata()
    with _locked(folder):
        remove_temporaries(folder)
        saved = read_object(folder / METADATA, optional=True)
        if not saved and any(folder.iterdir()):
            raise UsageError(f"{folder} contains files other than features; choose another --output")
        if changed := [name for name in metadata if saved and saved.get(name) != metadata[name]]:
            raise UsageError(f"{folder} contains features with different {changed[0]}; remove it or use another output")
        remaining = iter(texts)
        num_shards, num_done = 0, 0
        while (file := folder / f"{num_shards:05}.npz").exists():
            num_done += _skip_texts_of(file, remaining)
            num_shards += 1
        if num_shards:
            logger.info(f"resuming {folder} after {num_done:,} texts in {num_shards:,} shards")
        for shard in extractor.shards(remaining, num_done):
            if not num_shards:
                write_json(folder / METADATA, metadata)
            write_npz(folder / f"{num_shards:05}.npz", shard)
            yield num_done, shard
            num_done += num_texts(shard)
            num_shards += 1
        metadata |= {"texts": num_done, "shards": num_shards}
        write_json(folder / METADATA, metadata)


def _skip_texts_of(file: Path, texts: Iterator[Text]) -> int:
    """Consumes the texts of a shard, checks their hash, and returns their number."""
    try:
        with np.load(file) as shard:
            count, expected_hash = num_texts(shard), str(shard["texts_sha256"])
            if array := shard.zip.testzip():
                raise ValueError(f"wrong checksum of {array}")
    except Exception as error:  # Catch all exceptions, because zlib, zipfile and NumPy each raise different types.
        raise BertjaxError(f"{file} is damaged; remove it and run the same command again") from error
    if texts_sha256(itertools.islice(texts, count)) != expected_hash:
        raise UsageError(f"{file} was created from different texts; remove its folder, or choose another output")
    return count


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates and locks a folder. Removes a new folder that is still empty at the end."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"another command is writing to {folder}; wait, or choose another --output") from None
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()
        os.close(lock)
