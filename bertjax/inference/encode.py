"""Hidden states of texts, and one vector per text, in memory or in an `.npy` file.

Each row of a batch may contain several texts (packing).
"""

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, make_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError, quoted
from bertjax.inference.features import METADATA, num_texts, texts_sha256, write_shards
from bertjax.inference.inputs import Text, TruncationCount, as_tuples, tokenize
from bertjax.inference.load import LoadedModel, load_model
from bertjax.model.config import AUTO, LEFT, ModelConfig
from bertjax.model.heads import Pooler
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.task import Task
from bertjax.utils.io import atomic_file, check_free_space, reserve_blocks
from bertjax.utils.json_files import read_object
from bertjax.utils.terminal import progress_bar

CLS, MEAN = POOLINGS = ("cls", "mean")
# Row lengths are `_ROW_LEN` times powers of two, up to the model's maximum. Compiling the encoder for a new row length
# takes as long as encoding thousands of tokens. So a row length is used only if its texts have at least `_MIN_TOKENS`
# tokens. Otherwise, its texts go to rows of the next larger length.
_ROW_LEN, _MIN_ROW_LEN = 64, 32
# Tokens per batch, small enough that activations fit into a CPU's cache. With 4,096 tokens per batch, a model of six
# layers takes 1.7 times as long per token.
_BATCH_TOKENS = 2048
_MIN_TOKENS = 4 * _BATCH_TOKENS
# Number of texts per shard. Only texts of the same shard are packed together. The number limits memory, and the work
# that an interrupted call loses. Larger shards would not reduce the padding, which is 2 % of the positions.
_BLOCK_TEXTS = 10_000


def encode_batches(model: LoadedModel, examples: Examples) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, per batch, the indices of n examples, int64 [n], and the hidden states of their tokens.

    The hidden states are those of the last layer, concatenated, float32 [tokens, D]. Examples are not in input order.
    All batches of a row length have the same shape, so the encoder compiles once per row length.
    """
    for indices, row_len in pack_batches(examples.lengths, model.config.max_row_tokens):
        batch = make_batch(examples, indices, row_len, SINGLE_SHARD)
        inputs = {name: batch[name] for name in ("input_ids", "segment_ids", "sequence_ids", "position_ids")}
        hidden = model.packed_hidden_states(inputs)
        yield indices[indices != NO_EXAMPLE], hidden[batch["sequence_ids"] > 0]


def pool(model: LoadedModel, hidden: np.ndarray, lengths: np.ndarray, pooling: str) -> np.ndarray:
    """Returns one vector per text, float32 [n, D]: the hidden state of [CLS], or the mean over all tokens.

    `hidden` is float32 [tokens, D], the hidden states of all texts, and `lengths` is int64 [n]. `pooling` is
    `cls` or `mean`. For hidden states that use left context only, `cls` selects the last token, [SEP], because the
    hidden state of [CLS] does not depend on the text.
    """
    starts = np.cumsum(lengths) - lengths
    if pooling == MEAN:
        return np.add.reduceat(hidden, starts, axis=0) / lengths[:, None].astype(np.float32)
    slices = zip(np.split(hidden, len(model.config.context_sides), axis=1), model.config.context_sides, strict=True)
    ends = starts + lengths - 1
    return np.concatenate([states[ends if side == LEFT else starts] for states, side in slices], axis=1)


def pooler_states(model: LoadedModel, hidden: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Pools hidden states and applies the model's pooler. Returns float32 [n, D]. Arguments are as in `pool`."""
    config = dataclasses.replace(model.config, dtype="float32")
    pooling = CLS if config.classifier_pooling == "cls" else MEAN
    is_late = config.classifier_pooling == "late"
    states = hidden if is_late else pool(model, hidden, lengths, pooling)
    # Pad to powers of two, because each shape is compiled once.
    padding = (1 << (len(states) - 1).bit_length()) - len(states)
    padded = np.pad(states, ((0, padding), (0, 0)))
    pooled = np.asarray(_compiled_pooler(config)({"params": model.nested_params["pooler"]}, padded))[: len(states)]
    return pool(model, pooled, lengths, pooling) if is_late else pooled


@functools.cache
def _compiled_pooler(config: ModelConfig) -> Callable[..., jax.Array]:
    return jax.jit(Pooler(config).apply)


def pack_batches(lengths: np.ndarray, max_len: int) -> Iterator[tuple[np.ndarray, int]]:
    """Packs n texts, with `lengths` int64 [n], into batches with few distinct row lengths of at most `max_len` tokens.

    Yields the text indices of each batch, int64 [rows, K] with `NO_EXAMPLE` in unused entries, and its row length.
    """
    for row_len, rows in _pack(lengths, _row_lens(lengths, max_len)).items():
        num_rows = max(1, _BATCH_TOKENS // row_len)
        if len(rows) < num_rows:
            num_rows = 1 << (len(rows) - 1).bit_length()
        for start in range(0, len(rows), num_rows):
            batch = rows[start : start + num_rows]
            indices = np.full((num_rows, max(map(len, batch))), NO_EXAMPLE)
            for row, texts in enumerate(batch):
                indices[row, : len(texts)] = texts
            yield indices, row_len


def _row_lens(lengths: np.ndarray, max_len: int) -> list[int]:
    """Returns the row lengths for texts of `lengths` tokens, in increasing order."""
    if not len(lengths):
        return []
    if lengths.sum() <= _MIN_ROW_LEN:
        return [min(max_len, _MIN_ROW_LEN)]
    row_lens: list[int] = []
    row_len, longest = _ROW_LEN, int(lengths.max())
    while row_len < min(longest, max_len):
        shorter = row_lens[-1] if row_lens else 0
        if lengths[(lengths > shorter) & (lengths <= row_len)].sum() >= _MIN_TOKENS:
            row_lens.append(row_len)
        row_len *= 2
    return [*row_lens, min(row_len, max_len)]


def _pack(lengths: np.ndarray, row_lens: list[int]) -> dict[int, list[list[int]]]:
    """Assigns texts to rows, longest first, each to the fullest row with enough space or to a new row.

    Returns the text indices of each row, keyed by row length.
    """
    rows: dict[int, list[list[int]]] = {row_len: [] for row_len in row_lens}
    # `free[n]` lists the rows with n free tokens.
    free: list[list[list[int]]] = [[] for _ in range(row_lens[-1] + 1)] if row_lens else []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = min(int(lengths[index]), row_lens[-1])
        space = next((space for space in range(length, len(free)) if free[space]), None)
        if space is None:
            space = next(row_len for row_len in row_lens if row_len >= length)
            free[space].append([])
            rows[space].append(free[space][-1])
        row = free[space].pop()
        row.append(index)
        free[space - length].append(row)
    return rows


@dataclasses.dataclass(frozen=True, eq=False)
class VectorEncoder:
    """Encoder of texts or pairs of texts into one vector each."""

    model: LoadedModel  # model that computes the hidden states
    pooling: str  # `cls`, `mean`, or `auto` for the modules of the sentence-transformers model
    prompt: str = ""  # prefix of each text; see `resolve_prompt`
    num_texts: int | None = None  # number of texts, for the progress bar (default: None, unknown)

    def __post_init__(self) -> None:
        poolings = " or ".join(map(repr, POOLINGS))
        if self.pooling not in POOLINGS and self._embedder is None:
            raise UsageError(f"{self.model.path} has no pooling module; set pooling to {poolings}")
        if self._embedder is not None and self._embedder.refusal:
            raise UsageError(f"{self._embedder.refusal}; to encode without its modules, set pooling to {poolings}")

    @property
    def _embedder(self) -> SentenceEmbedder | None:
        return self.model.embedder if self.pooling == AUTO else None

    @property
    def width(self) -> int:
        """Vector size, D."""
        return self._embedder.width if self._embedder else self.model.config.hidden_size

    def metadata(self) -> dict[str, Any]:
        """Returns all settings that determine the vectors, except the texts, as a JSON object."""
        settings = {"pooling": self.pooling, "prompt": self.prompt, "embedder": repr(self._embedder)}
        return settings | self.model.metadata()

    def shards(self, texts: Iterable[Text], done: int = 0) -> Iterator[dict[str, Any]]:
        """Yields shards of T texts: `vectors`, float32 [T, D], `offsets` and `texts_sha256` (see `FeatureExtractor`).

        `done` is the number of texts in earlier shards, for the progress bar.
        """
        embedder, remaining = self._embedder, as_tuples(texts)
        truncation = TruncationCount(embedder.max_seq_len if embedder else self.model.config.max_row_tokens)
        if embedder:
            # Exclude the [SEP] after the prompt.
            prompt_tokens = tokenize(self.model, [self.prompt], TruncationCount(truncation.seq_len), embedder=embedder)
            prompt_len = len(prompt_tokens.tokens["input_ids"]) - self.model.vocabulary.end_separators
            pooling: Any = functools.partial(embedder, prompt_len=prompt_len if self.prompt else 0)
        else:
            pooling = functools.partial(pool, self.model, pooling=self.pooling)
        with progress_bar("encode", self.num_texts, " texts", after_seconds=5, done=done) as bar:
            while block := list(itertools.islice(remaining, _BLOCK_TEXTS)):
                examples = tokenize(self.model, block, truncation, self.prompt, embedder)
                vectors = np.empty((len(block), self.width), np.float32)
                for indices, hidden in encode_batches(self.model, examples):
                    vectors[indices] = pooling(hidden, examples.lengths[indices])
                    bar.update(len(indices))
                sha256 = np.array(texts_sha256(block))
                yield {"offsets": examples.offsets, "vectors": vectors, "texts_sha256": sha256}
        truncation.log()

    def encode(self, texts: Iterable[Text]) -> np.ndarray:
        """Returns the vectors of N texts, float32 [N, D]."""
        vectors = [shard["vectors"] for shard in self.shards(texts)]
        return np.concatenate(vectors or [np.empty((0, self.width), np.float32)])

    def write(self, path: Path, texts: Iterable[Text]) -> np.ndarray:
        """Writes the vectors of N texts to an `.npy` file, and returns them as a memory map, float32 [N, D].

        Until the file is complete, the vectors are in shards in the folder `PATH.part`. After an interruption, the same
        call resumes after the last complete shard.
        """
        folder = path.with_name(f"{path.name}.part")
        if path.exists():
            raise UsageError(f"{path} exists; remove it, or choose another output")
        for _ in write_shards(folder, self, as_tuples(texts)):
            pass
        metadata = read_object(folder / METADATA)
        shape = (metadata.get("texts", 0), self.width)
        check_free_space(path.parent, 4 * shape[0] * shape[1], str(path))
        with atomic_file(path) as temporary:
            vectors, end = np.lib.format.open_memmap(temporary, "w+", np.float32, shape=shape), 0
            reserve_blocks(temporary)
            for number in range(metadata.get("shards", 0)):
                with np.load(folder / f"{number:05}.npz") as shard:
                    start, end = end, end + num_texts(shard)
                    vectors[start:end] = shard["vectors"]
            vectors.flush()
        shutil.rmtree(folder)
        return np.load(path, mmap_mode="r")


def encode_texts(model: LoadedModel, texts: Sequence[str], is_query: bool) -> np.ndarray:
    """Encodes N texts to float32 [N, D], with the model's query or document prompt, else its default prompt.

    If the model is not a sentence embedder, the vectors are means over all tokens.
    """
    pooling, prompt = (AUTO, model.embedder.prompt(is_query)) if model.embedder else (MEAN, None)
    return VectorEncoder(model, pooling, resolve_prompt(model, pooling, prompt, None), len(texts)).encode(texts)


def resolve_prompt(model: LoadedModel, pooling: str | None, prompt: str | None, prompt_name: str | None) -> str:
    """Returns `prompt`, else the model's prompt named `prompt_name`, else (for `auto`) the model's default prompt."""
    prompts, default = (model.embedder.prompts, model.embedder.default_prompt) if model.embedder else ({}, "")
    if prompt_name is not None and prompt_name not in prompts:
        names = ", ".join(map(quoted, prompts)) or "none"
        raise UsageError(f"prompt_name={quoted(prompt_name)} is unknown; {model.path} has the prompts: {names}")
    name = (default if pooling == AUTO else "") if prompt_name is None else prompt_name
    return prompts.get(name, "") if prompt is None else prompt


def add_guide_vectors(task: Task) -> None:
    """Adds the guide model's vectors to an embedding task whose loss needs them. Call this before training."""
    if not isinstance(task, EmbedTask) or not task.config.loss.needs_guide:
        return
    model, vectors = load_model(task.config.data.guide), []
    for file in task.files:
        columns = range(file.num_columns)
        arrays = [encode_texts(model, file.strings[i :: file.num_columns], is_query=i == 0) for i in columns]
        vectors.append(np.stack(arrays, axis=1))
    width, expected = vectors[0].shape[-1], task.objective.model.width
    if task.config.embed.loss == "distill_vectors" and width != expected:
        raise UsageError(f"{task.config.data.guide} has {width} components; set --config.embed.dense={width}")
    settings = {**model.metadata(), "dtype": ""}  # The dtype changes vectors only by rounding.
    task.add_guide(vectors, repr((settings, model.embedder)))
