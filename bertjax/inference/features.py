"""Contextual embeddings of texts, from any layer (section 5.3 of the paper), a bounded number of them at a time."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, make_examples, truncated_lengths
from bertjax.errors import UsageError
from bertjax.inference.batches import batches
from bertjax.inference.texts import PAIR
from bertjax.inference.trained_model import TrainedModel
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.partitioning import resolve_layout

# Of hidden states in memory at a time.
SHARD_BYTES = 64 << 20
# However narrow the model is.
_SHARD_TOKENS = 1 << 18
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Request:
    """Which embeddings are asked for.

    Attributes:
      trained: the model.
      layers: C of them; 0 is the embeddings, 1 to N the layers, negative ones count from the last.
      seq_len: tokens a text at most, with [CLS] and [SEP]; what is longer is cut.
    """

    trained: TrainedModel
    layers: tuple[int, ...]
    seq_len: int

    def __post_init__(self) -> None:
        count = self.model.num_hidden_layers + 1
        wrong = [layer for layer in self.layers if not -count <= layer < count]
        if wrong or not self.layers:
            raise UsageError(
                f"--layers has {wrong or 'none'}; they go from 0, the embeddings, to {self.model.num_hidden_layers}"
            )
        if not 8 <= self.seq_len <= self.model.max_position_embeddings:
            raise UsageError(
                f"--seq_len is {self.seq_len}; it must be between 8 and the model's {self.model.max_position_embeddings}"
            )

    @property
    def model(self) -> ModelConfig:
        return self.trained.config

    def about(self) -> dict[str, Any]:
        """What decides the features of a text, in a form that JSON has."""
        digest, vocabulary = hashlib.sha256(), self.trained.vocabulary
        for path, array in sorted(flatten_dict(self.trained.params["encoder"], sep="/").items()):
            digest.update(f"{path} {array.dtype} {array.shape}".encode() + np.asarray(array).tobytes())
        return {
            "layers": list(self.layers),
            "seq_len": self.seq_len,
            "architecture": vars(self.model.architecture),
            "dtype": resolve_layout(self.model).dtype,
            "parameters_sha256": digest.hexdigest(),
            "vocabulary_sha256": vocabulary.sha256,
            "lower_case": vocabulary.lower_case,
        }

    @property
    def token_bytes(self) -> int:
        """Of a token's hidden states."""
        return 4 * len(self.layers) * self.model.hidden_size


def shards(request: Request, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Hidden states of texts; a text with ` ||| ` in it is a pair. The same texts give the same shards.

    Args:
      texts: any number; those of one shard are in memory at a time.

    Yields:
      Of T texts with K tokens in all, each text with as many as it has:
        `offsets`: int64 [T + 1], where each text starts in the arrays below, then K.
        `hidden_states`: float32 [K, C, D].
        `input_ids`, `segment_ids`: int32 [K].
        `tokens`: str [K], the pieces.
        `words`: int32 [K], which word of the text a token is of: 0, 1, ..., as `text.split()` has them, those of a
          pair's second text going on after its first's; -1 for [CLS] and [SEP].
        `characters`: int32 [K, 2], the token's first character in the text and the one after its last; -1 likewise.
        `texts_sha256`: str, of the texts.

    Raises:
      UsageError: a text is a pair, and the model takes none.
    """
    tokenizer = request.trained.tokenizer
    states_of = token_states(request.trained, request.layers, request.seq_len)
    for rows, digest in _groups(request, tokenizer, texts):
        examples = make_examples(rows, {})
        tokens, offsets = examples.tokens, examples.offsets
        found = np.empty((int(offsets[-1]), len(request.layers), request.model.hidden_size), np.float32)
        for sequence, states in states_of(examples):
            found[offsets[sequence] : offsets[sequence + 1]] = states
        yield {
            "offsets": offsets,
            "hidden_states": found,
            "input_ids": tokens["input_ids"],
            "segment_ids": tokens["segment_ids"],
            "tokens": np.array(tokenizer.pieces(tokens["input_ids"])),
            "words": tokens["words"],
            "characters": np.stack([tokens["starts"], tokens["ends"]], axis=1),
            "texts_sha256": np.array(digest),
        }


def token_states(
    trained: TrainedModel, layers: Sequence[int], seq_len: int
) -> Callable[[Examples], Iterator[tuple[int, np.ndarray]]]:
    """A function of examples to each of their sequences, its number first: float32 [tokens, C, D], of C layers.

    Args:
      trained: the model.
      layers: 0 is the embeddings, 1 to N the layers, negative ones count from the last.
      seq_len: tokens of a sequence at most.
    """
    chosen = np.array(layers)

    @trained.compiled
    def states_of_batch(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        _, states = Encoder(trained.config).apply(
            {"params": params["encoder"]},
            batch["input_ids"],
            batch["segment_ids"],
            batch["input_mask"],
            collect_layers=True,
        )
        return states[chosen].transpose(1, 2, 0, 3).astype(np.float32)  # [B, L, C, D]

    def states_of(examples: Examples) -> Iterator[tuple[int, np.ndarray]]:
        lengths = np.diff(examples.offsets)
        tokens = {name: examples.tokens[name] for name in ("input_ids", "segment_ids")}
        # Choices, too, are a row each.
        for batch in batches(Examples(examples.offsets, tokens, {}), seq_len):
            for sequence, states in zip(batch.pop("example"), states_of_batch(batch), strict=True):
                if sequence >= 0:
                    yield int(sequence), states[: lengths[sequence]]

    return states_of


def _groups(
    request: Request, tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[list[dict[str, list[int]]], str]]:
    """The encoded texts of each shard, and the hash of them."""
    rows: list[dict[str, list[int]]] = []
    held, digest = 0, TextsHash()
    most = min(_SHARD_TOKENS, SHARD_BYTES // request.token_bytes)
    for text in texts:
        rows.append(_encoded(request, tokenizer, text))
        held += len(rows[-1]["input_ids"])
        digest.add(text)
        if held >= most:
            yield rows, digest.hexdigest()
            rows, held, digest = [], 0, TextsHash()
    if rows:
        yield rows, digest.hexdigest()


class TextsHash:
    """SHA-256 of texts, one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass") + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _encoded(request: Request, tokenizer: Tokenizer, text: str) -> dict[str, list[int]]:
    """Flat lists of a text's tokens; see `shards`."""
    vocabulary = tokenizer.vocabulary
    parts = text.split(PAIR, 1)
    if len(parts) > 1 and request.model.type_vocab_size < 2:
        raise UsageError(f"{text[:60]!r} is a pair, and the model has one segment")
    pieces = [tokenizer.encode_with_offsets(part) for part in parts]
    lengths = [len(ids) for ids, _ in pieces]
    if len(parts) > 1:
        kept = truncated_lengths(*lengths, request.seq_len - 3)
    else:
        kept = (min(lengths[0], request.seq_len - 2),)
    row: dict[str, list[int]] = {
        "input_ids": [vocabulary.cls_id],
        "segment_ids": [0],
        "words": [_NONE],
        "starts": [_NONE],
        "ends": [_NONE],
    }
    start, words_before = 0, 0
    for segment, (part, (ids, spans), count) in enumerate(zip(parts, pieces, kept, strict=True)):
        starts = np.array([match.start() for match in re.finditer(r"\S+", part)], np.int64)
        spans = spans[:count]
        # By its last character: a piece of SentencePiece may begin with the space before its word.
        words = np.searchsorted(starts, np.maximum(spans[:, 1] - 1, spans[:, 0]), side="right") - 1
        row["input_ids"] += [*ids[:count], vocabulary.sep_id]
        row["segment_ids"] += [segment] * (count + 1)
        row["words"] += [*(words + words_before).tolist(), _NONE]
        row["starts"] += [*(spans[:, 0] + start).tolist(), _NONE]
        row["ends"] += [*(spans[:, 1] + start).tolist(), _NONE]
        start += len(part) + len(PAIR)
        words_before += len(starts)
    return row


def texts_in(shard: dict[str, Any]) -> int:
    """How many texts a shard has."""
    return len(shard["offsets"]) - 1


def parse_layers(text: str) -> tuple[int, ...]:
    """`-1,-2` to numbers.

    Raises:
      UsageError: they are none.
    """
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError:
        raise UsageError(f"--layers is {text!r}; give numbers with commas, such as --layers=-1,-2") from None


def described(text: str, shard: dict[str, Any], index: int, layers: Sequence[int]) -> str:
    """A text's tokens, a line each, with the first numbers of the first layer that is asked for."""
    lines = [text]
    for token in range(shard["offsets"][index], shard["offsets"][index + 1]):
        numbers = " ".join(f"{value:9.5f}" for value in shard["hidden_states"][token, 0, :6])
        lines.append(f"  {shard['tokens'][token]:<16} layer {layers[0]}: {numbers} ...")
    return "\n".join(lines)
