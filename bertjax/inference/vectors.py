"""One vector per text, for any number of texts, in memory or in an `.npy` file."""

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.errors import UsageError, quoted
from bertjax.inference.encode import MEAN, POOLINGS, encode_batches, pool
from bertjax.inference.features import METADATA, num_texts, texts_sha256, write_shards
from bertjax.inference.inputs import Text, TruncationCount, as_tuples, tokenize
from bertjax.inference.loaded_model import LoadedModel
from bertjax.model.config import AUTO
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.utils.io import atomic_file, check_free_space
from bertjax.utils.json_files import read_object
from bertjax.utils.terminal import progress_bar

# Texts per shard, which are packed together. This limits memory, and the work that a resumed call repeats. More texts
# would not reduce the padding, which is 2 % of the positions.
_BLOCK_TEXTS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class VectorEncoder:
    """Encoder of texts or pairs of texts into one vector each.

    Attributes:
      model: model that computes the hidden states.
      pooling: `cls`, `mean`, or `auto` for the modules of the sentence-transformers model.
      prompt: prefix of each text; see `resolve_prompt`.
      num_texts: number of texts, for the progress bar (default: None, unknown).
    """

    model: LoadedModel
    pooling: str
    prompt: str = ""
    num_texts: int | None = None

    def __post_init__(self) -> None:
        poolings = " or ".join(map(repr, POOLINGS))
        if self.pooling not in POOLINGS and self._embedder is None:
            raise UsageError(f"{self.model.path} has no module that pools the states; set pooling to {poolings}")
        if self._embedder is not None and self._embedder.refusal:
            raise UsageError(
                f"{self._embedder.refusal}; to encode without the modules of sentence-transformers, set pooling to "
                f"None, {poolings}"
            )

    @property
    def _embedder(self) -> SentenceEmbedder | None:
        return self.model.embedder if self.pooling == AUTO else None

    @property
    def width(self) -> int:
        """Vector length, D."""
        return self._embedder.width if self._embedder else self.model.config.hidden_size

    def metadata(self) -> dict[str, Any]:
        """Returns a JSON object of all settings that determine the vectors, except the texts."""
        settings = {"pooling": self.pooling, "prompt": self.prompt, "embedder": repr(self._embedder)}
        return settings | self.model.metadata()

    def shards(self, texts: Iterable[Text], done: int = 0) -> Iterator[dict[str, Any]]:
        """Yields shards of T texts: `vectors`, float32 [T, D], and `offsets` and `texts_sha256` as in `features`.

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
        """Writes the vectors of N texts to an `.npy` file, and returns its memory map, float32 [N, D].

        Until the file is complete, the vectors are in shards in the folder `PATH.part`. After an interruption, the same
        call resumes after the last complete shard.
        """
        folder = path.with_name(f"{path.name}.part")
        if path.exists():
            raise UsageError(f"{path} exists; remove it, or choose another output")
        for _ in write_shards(folder, self, as_tuples(texts)):
            pass
        shape = (read_object(folder / METADATA).get("texts", 0), self.width)
        check_free_space(path.parent, 4 * shape[0] * shape[1], str(path))
        with atomic_file(path) as temporary:
            vectors, end = np.lib.format.open_memmap(temporary, "w+", np.float32, shape=shape), 0
            for file in sorted(folder.glob("*.npz")):
                with np.load(file) as shard:
                    start, end = end, end + num_texts(shard)
                    vectors[start:end] = shard["vectors"]
            vectors.flush()
        shutil.rmtree(folder)
        return np.load(path, mmap_mode="r")


def encode_texts(model: LoadedModel, texts: Sequence[str], is_query: bool) -> np.ndarray:
    """Returns the vectors of N texts, float32 [N, D], with the model's query or document prompt, else its default.

    Vectors of models that are not sentence embedders are means over all tokens.
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
