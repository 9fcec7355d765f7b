"""Checkpoints in Python: load one, get arrays, build on it.

`CHECKPOINT` below is a bertjax workdir, a folder of Hugging Face, or a checkpoint of google-research/bert:

    >>> import bertjax
    >>> bert = bertjax.load(CHECKPOINT)
    >>> bert.architecture.num_hidden_layers, bert.architecture.hidden_size
    (2, 16)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from bertjax.convert.convert import BERTJAX, detect, read_vocabulary
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import open_vocabulary, workdir_vocabulary
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.errors import UsageError, quoted
from bertjax.inference import fill_mask
from bertjax.inference.batches import batches
from bertjax.inference.load import load_trained
from bertjax.inference.predict import answers
from bertjax.inference.texts import PAIR
from bertjax.inference.trained_model import TrainedModel
from bertjax.model.config import Architecture, ModelConfig
from bertjax.model.encoder import Encoder, Pooler, pool_cls
from bertjax.tasks.finetuning.output_layer import CHOICES
from bertjax.training.checkpoint import find_checkpoint, workdir_of


class Encoded(NamedTuple):
    """What a model makes of texts, on the host; B of them, the longest of L tokens.

    Attributes:
      last_hidden_state: float32 [B, L, D]; 0 where there is padding.
      pooled: float32 [B, D], of the token that has seen all others, in BERT [CLS]; None of a checkpoint without a
        pooler, as those of tags and spans.
      attention_mask: int32 [B, L], 1 where there is a token.
    """

    last_hidden_state: np.ndarray
    pooled: np.ndarray | None
    attention_mask: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A checkpoint that was loaded; made by `load`."""

    _trained: TrainedModel

    @property
    def architecture(self) -> Architecture:
        """What function it computes: sizes, activation and the like."""
        return self._trained.architecture

    @property
    def config(self) -> ModelConfig:
        """The architecture, and how it is computed; what `Encoder` and `Pooler` take."""
        return self._trained.config

    @property
    def params(self) -> dict[str, Any]:
        """Parameters, float32 arrays on the mesh: `encoder`, and perhaps `pooler`, `masked_lm`, `classifier`, ...

        >>> bertjax.load(CHECKPOINT).params["encoder"]["embeddings"]["position"].shape
        (40, 16)
        """
        return self._trained.params

    @property
    def model(self) -> nn.Module:
        """The Flax module that takes a batch and all of `params`: of pre-training, of a task, or of the encoder alone.

        >>> bert = bertjax.load(CHECKPOINT)
        >>> batch = {**bert.batch(["a b"]), "masked_lm_positions": np.array([[1]])}
        >>> masked_lm, next_sentence = bert.model.apply({"params": bert.params}, batch)
        >>> masked_lm.shape == (1, 1, bert.architecture.padded_vocab_size)
        True
        """
        return self._trained.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back; `encode` adds no [CLS] and [SEP].

        >>> bert = bertjax.load(CHECKPOINT)
        >>> bert.tokenizer.pieces(bert.tokenizer.encode("Bad"))
        ['b', '##a', '##d']
        """
        return self._trained.tokenizer

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, labels or tags of a fine-tuned checkpoint, in the order of its outputs."""
        return self._trained.layer.labels if self._trained.layer else ()

    def batch(self, texts: Sequence[str | tuple[str, str]], seq_len: int | None = None) -> dict[str, np.ndarray]:
        """Texts, or pairs of texts, as the modules take them: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

        Args:
          texts: B of them.
          seq_len: tokens a row, to which texts are cut and padded; None is the longest text's, which the model's
            `max_position_embeddings` cuts.

        Returns:
          `input_ids`, `input_mask` and `segment_ids`, int32 [B, L].

        Raises:
          UsageError: `seq_len` is less than 8 or more than the model takes.

        >>> bertjax.load(CHECKPOINT).batch(["a b", ("a", "b")])["segment_ids"].tolist()
        [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
        """
        most = self.config.max_position_embeddings
        if seq_len is not None and (type(seq_len) is not int or not 8 <= seq_len <= most):
            raise UsageError(f"seq_len is {quoted(seq_len)}; it must be a number from 8 to the model's {most}")
        examples = self._examples(texts, seq_len or most)
        length = seq_len or int(examples.lengths.max(initial=1))
        rows = {name: np.zeros((len(examples), length), np.int32) for name in ("input_ids", "segment_ids")}
        mask = (np.arange(length) < examples.lengths[:, None]).astype(np.int32)
        for name, array in rows.items():
            array[mask > 0] = examples.tokens[name]
        rows["input_ids"][mask == 0] = self._trained.vocabulary.pad_id
        return {**rows, "input_mask": mask}

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> Encoded:
        """The last layer's states of texts, or of pairs of texts, without dropout.

        >>> encoded = bertjax.load(CHECKPOINT).encode(["a b c", "d"])
        >>> encoded.last_hidden_state.shape, encoded.pooled.shape
        ((2, 5, 16), (2, 16))
        >>> encoded.attention_mask.tolist()
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
        """
        examples = self._examples(texts, self.config.max_position_embeddings)
        count, width, lengths = len(examples), self.config.hidden_size, examples.lengths
        longest = int(lengths.max(initial=0))
        states = np.zeros((count, longest, width), np.float32)
        pooled = np.zeros((count, width), np.float32) if "pooler" in self.params else None
        for batch in batches(examples, self.config.max_position_embeddings):
            places = batch.pop("example")
            hidden, first = self._states(batch)
            for row, place in enumerate(places):
                if place >= 0:
                    states[place, : lengths[place]] = hidden[row, : lengths[place]]
                    if pooled is not None:
                        pooled[place] = first[row]
        return Encoded(states, pooled, (np.arange(longest) < lengths[:, None]).astype(np.int32))

    def fill_mask(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """The `top` most probable pieces at each [MASK] of a text, with their probabilities.

        >>> (pieces,) = bertjax.load(CHECKPOINT).fill_mask("a [MASK] c", top=3)
        >>> len(pieces), pieces[0][1] >= pieces[1][1]
        (3, True)
        """
        if not isinstance(text, str) or not isinstance(top, int):
            raise UsageError(f"fill_mask takes a text and a whole number, given are {quoted(text)} and {quoted(top)}")
        return fill_mask.fill_mask(self._trained, text, top)

    def predict(self, texts: Sequence[str | tuple[str, ...]], context: str = "") -> list[dict[str, Any]]:
        """What a fine-tuned checkpoint says of texts: for each the `prediction` and its `probabilities` by label.

        Args:
          texts: sentences, or tuples of the parts of pairs and choices; questions on `context`.
          context: the passage that has the answers.

        >>> (said,) = bertjax.load(CLASSIFIER).predict(["a b"])
        >>> said["prediction"] in said["probabilities"], sorted(said["probabilities"])
        (True, ['bad', 'good'])
        """
        layer = self._trained.layer
        most = None if layer is None or layer.kind == CHOICES else 2
        return list(answers(self._trained, map(PAIR.join, _parts_of(texts, most)), context=context))

    def _examples(self, texts: Sequence[str | tuple[str, str]], seq_len: int) -> Examples:
        vocabulary = self._trained.vocabulary
        rows = []
        for parts in _parts_of(texts, most=2):
            first, *second = (self.tokenizer.encode(part) for part in parts)
            pair = second[0] if second else None
            rows.append(encode_pair(first, pair, seq_len, vocabulary.cls_id, vocabulary.sep_id))
        return make_examples(rows, {})

    @functools.cached_property
    def _states(self) -> Callable[[dict[str, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
        config, has_pooler = self.config, "pooler" in self.params

        def states(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            hidden, _ = Encoder(config).apply(
                {"params": params["encoder"]}, batch["input_ids"], batch["segment_ids"], batch["input_mask"]
            )
            whole = pool_cls(config.reads, hidden, batch["input_mask"])
            pooled = Pooler(config).apply({"params": params["pooler"]}, whole) if has_pooler else whole
            return hidden.astype(np.float32), pooled.astype(np.float32)

        return self._trained.compiled(states)


def _parts_of(texts: Sequence[str | tuple[str, ...]], most: int | None = None) -> list[tuple[str, ...]]:
    """The parts of each text.

    Raises:
      UsageError: they are something else than a list of texts, or of tuples of at most `most` texts.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UsageError(f"give a list of texts, such as ['a film']; given is {quoted(texts)}")
    found = [(text,) if isinstance(text, str) else text for text in texts]
    for parts in found:
        texts_alone = isinstance(parts, (tuple, list)) and all(isinstance(part, str) for part in parts)
        if not texts_alone or not parts or (most and len(parts) > most):
            raise UsageError(f"{quoted(parts)} is no text, nor a tuple of {f'at most {most} ' if most else ''}texts")
        if len(parts) > 1 and any(PAIR in part for part in parts):
            raise UsageError(f"{quoted(parts)} has {PAIR!r} in a text, which parts the texts of a line; leave it out")
    return found


def load(path: str | Path, mesh: Mesh | None = None) -> Pretrained:
    """A checkpoint of any of the three formats.

    Args:
      path: a bertjax workdir or a step in it; a folder of Hugging Face; a TensorFlow checkpoint or its folder.
      mesh: with axes `data`, `fsdp` and `tensor`, to put the parameters on; None is all devices, each with all of them.

    Raises:
      UsageError: there is none, it is no BERT, or it has no vocabulary.
      BertjaxError: it is damaged.

    >>> bertjax.load(CHECKPOINT).encode(["a"]).last_hidden_state.dtype
    dtype('float32')
    """
    if not str(path):
        raise UsageError("the path of the checkpoint is empty")
    return Pretrained(load_trained(path, mesh))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint of any format, or of a `vocab.txt` or a SentencePiece `.model`.

    >>> tokenizer = bertjax.load_tokenizer(CHECKPOINT)
    >>> tokenizer.decode(tokenizer.encode("Bad cab"))
    'bad cab'

    Raises:
      UsageError: there is none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return Tokenizer(open_vocabulary(place))
    if detect(str(path)) != BERTJAX:
        return Tokenizer(read_vocabulary(place))
    workdir = workdir_of(find_checkpoint(path))
    return Tokenizer(workdir_vocabulary(workdir))
