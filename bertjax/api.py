"""Python API for loading and using checkpoints, and for building models on them.

`CHECKPOINT` below is a bertjax workdir, a Hugging Face folder, or a checkpoint of google-research/bert:

    >>> import bertjax
    >>> bert = bertjax.load(CHECKPOINT)
    >>> bert.architecture.num_hidden_layers, bert.architecture.hidden_size
    (2, 16)
"""

import dataclasses
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from jax.sharding import Mesh

from bertjax.convert.convert import BERTJAX, read_vocabulary, save
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.batches import make_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError, quoted
from bertjax.inference.encode import POOLINGS, VectorEncoder, encode_batches, pooler_states, resolve_prompt
from bertjax.inference.inputs import Text, TruncationCount, as_tuples, tokenize
from bertjax.inference.load import LoadedModel, load_model, to_portable, with_params_and_output_layer
from bertjax.inference.predict import fill_mask, predict_texts
from bertjax.model.config import AUTO, Architecture, ModelConfig
from bertjax.tasks.finetuning.output_layer import TAGS
from bertjax.utils.devices import skip_missing_tpu


class Encoded(NamedTuple):
    """Result of `Pretrained.encode` for B texts of at most L tokens, as NumPy arrays.

    Attributes:
      last_hidden_state: float32 [B, L, D], hidden states of the last layer; 0 at padding. None if `encode` pools them.
      pooled: float32 [B, D], one vector per text. If `encode` pools the hidden states, the result of this pooling.
        Otherwise, the output of BERT's pooler for [CLS], or None if the checkpoint has no pooler.
      attention_mask: int32 [B, L], 1 for tokens and 0 for padding. None if `encode` pools the hidden states.
    """

    last_hidden_state: np.ndarray | None
    pooled: np.ndarray | None
    attention_mask: np.ndarray | None

    def __repr__(self) -> str:
        shapes = {name: None if array is None else array.shape for name, array in self._asdict().items()}
        return f"<bertjax.Encoded {', '.join(f'{name} {shape}' for name, shape in shapes.items())}>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pretrained:
    """Loaded checkpoint, as returned by `load`."""

    _loaded: LoadedModel

    def __repr__(self) -> str:
        size = f"L{self.config.num_hidden_layers}_H{self.config.hidden_size}_A{self.config.num_attention_heads}"
        return f"<bertjax.Pretrained {type(self.model).__name__} {size} from {self._loaded.path}>"

    @property
    def architecture(self) -> Architecture:
        """Fields of the model architecture, such as sizes and activation."""
        return self.config.architecture

    @property
    def config(self) -> ModelConfig:
        """Model config to pass to `Encoder` and `Pooler`: architecture, and other fields such as `dtype`."""
        return self._loaded.config

    @property
    def params(self) -> dict[str, Any]:
        """Nested dictionary of the parameters, float32 arrays on the mesh. Top-level keys are `encoder` and the heads.

        Examples:
          >>> bertjax.load(CHECKPOINT).params["encoder"]["embeddings"]["position"].shape
          (40, 16)
        """
        return self._loaded.nested_params

    @property
    def model(self) -> nn.Module:
        """Flax module of the checkpoint, or only encoder and pooler if bertjax does not know the kind of model.

        Examples:
          >>> bert = bertjax.load(CHECKPOINT)
          >>> batch = {**bert.batch(["a b"]), "masked_lm_positions": np.array([[1]])}
          >>> masked_lm, next_sentence = bert.model.apply({"params": bert.params}, batch)
          >>> masked_lm.shape == (1, 1, bert.architecture.padded_vocab_size)
          True
        """
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the checkpoint. The method `encode` does not add [CLS] and [SEP].

        Examples:
          >>> bert = bertjax.load(CHECKPOINT)
          >>> bert.tokenizer.pieces(bert.tokenizer.encode("Bad"))
          ['b', '##a', '##d']
        """
        return self._loaded.tokenizer

    @property
    def labels(self) -> tuple[str, ...]:
        """Class, label or tag names of a fine-tuned checkpoint, in the order of its outputs."""
        return self._loaded.labels

    def replace(self, params: Any, output_kind: str | None = None, labels: Sequence[str] | None = None) -> "Pretrained":
        """Returns a copy of this model with new parameters and, optionally, a different output layer or labels.

        Args:
          params: nested dictionary of arrays, structured like the property `params`. If the model has an output
            layer, `params` must contain the module `classifier`.
          output_kind: kind of output layer: `classes` (one class per text; regression if there are no labels),
            `multilabel`, `choices`, `tags` or `spans` (default: unchanged).
          labels: names of classes, labels or tags in the order of the outputs (default: unchanged).

        Raises:
          UsageError: a parameter is missing, unknown or has the wrong shape, `labels` does not match the outputs, or
            the model has a feature head.

        Examples:
          >>> bert = bertjax.load(CLASSIFIER)
          >>> bert.replace(bert.params, labels=["no", "yes"]).labels
          ('no', 'yes')
        """
        kind = self._loaded.output_kind if output_kind is None else output_kind
        names = self._loaded.labels if labels is None else labels
        return Pretrained(with_params_and_output_layer(self._loaded, params, kind, names))

    def save(self, path: str | Path, format: str = BERTJAX, overwrite: bool = False) -> None:
        """Saves the model as a folder in the format of bertjax, Hugging Face or sentence-transformers.

        Args:
          path: folder to write; it appears only when it is complete.
          format: `bertjax` (a workdir, for example for `--init_from`), `huggingface`, or `sentence_transformers`, which
            adds mean pooling to a model without sentence-transformers modules.
          overwrite: whether to replace a checkpoint at `path`.

        Raises:
          UsageError: `path` exists (unless it is a checkpoint and `overwrite` is True), or the format does not support
            the model.
        """
        save(to_portable(self._loaded), path, format, overwrite)

    def batch(self, texts: Sequence[str | tuple[str, str]], seq_len: int | None = None) -> dict[str, np.ndarray]:
        """Tokenizes texts or pairs into a batch of rows [CLS] A [SEP] or [CLS] A [SEP] B [SEP].

        [MASK] and other special tokens in a text are kept as single tokens. The number of truncated texts is logged.

        Args:
          texts: B texts or pairs of texts.
          seq_len: number of tokens to which rows are truncated or padded (default: length of the longest text, at most
            `config.max_row_tokens`).

        Returns:
          `input_ids`, `input_mask` and `segment_ids`, int32 [B, L].

        Raises:
          UsageError: `seq_len` is below 8 or above `config.max_row_tokens`.

        Examples:
          >>> bertjax.load(CHECKPOINT).batch(["a b", ("a", "b")])["segment_ids"].tolist()
          [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
        """
        max_len = self._loaded.row_len(seq_len)
        examples = self._tokenize(texts, max_len)
        length = max_len if seq_len else int(examples.lengths.max(initial=1))
        batch = make_batch(examples, np.arange(len(examples)), length, SINGLE_SHARD)
        batch["input_ids"][batch["input_mask"] == 0] = self._loaded.vocabulary.pad_id
        return {name: batch[name] for name in ("input_ids", "input_mask", "segment_ids")}

    def encode(
        self,
        texts: Iterable[Text],
        pooling: str | None = AUTO,
        prompt: str | None = None,
        prompt_name: str | None = None,
        output: str | Path | None = None,
    ) -> Encoded:
        """Computes hidden states of the last layer, or one vector per text, without dropout.

        Args:
          texts: B texts or pairs of texts. With one vector per text, texts are tokenized block by block, so a generator
            may stream them from a file. The progress bar shows the remaining time only if `texts` has a length.
          pooling: `cls` (hidden state of [CLS]) or `mean` (mean over all tokens) for one vector per text, not
            normalized. None returns the hidden states of all tokens. The default, `auto`, is the same as None, except
            for a sentence-transformers model: its modules compute the vector, with the model's token limit,
            lower-casing and default prompt.
          prompt: text to prepend to each text, or to the first text of a pair (default: the model's default prompt if
            `pooling` is the default, else none).
          prompt_name: name of one of the model's prompts, such as `query`, to use if `prompt` is not set.
          output: `.npy` file for the vectors, float32 [B, D], which are then returned as a memory map. After an
            interruption, the same call resumes.

        Returns:
          With pooling, the vectors in `pooled`. Without pooling, the hidden states in `last_hidden_state`, their mask
          in `attention_mask`, and the output of the pooler in `pooled`.

        Raises:
          UsageError: with the default `pooling`, bertjax does not support a module of the sentence-transformers model;
            the prompt is unknown; or `output` exists, or contains vectors of other texts or settings.

        Examples:
          >>> bert = bertjax.load(CHECKPOINT)
          >>> encoded = bert.encode(["a b c", "d"])
          >>> encoded.last_hidden_state.shape, encoded.pooled.shape
          ((2, 5, 16), (2, 16))
          >>> encoded.attention_mask.tolist()
          [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
          >>> bert.encode(["a b c", "d"], pooling="mean").pooled.shape
          (2, 16)
        """
        if pooling not in (AUTO, None, *POOLINGS):
            raise UsageError(f"pooling={quoted(pooling)} is unknown; use one of {', '.join(POOLINGS)}, or None")
        loaded, width = self._loaded, self.config.hidden_size
        prompt = resolve_prompt(loaded, pooling, prompt, prompt_name)
        if output is not None or pooling in POOLINGS or (pooling == AUTO and loaded.embedder is not None):
            encoder = VectorEncoder(loaded, pooling or "", prompt, len(texts) if isinstance(texts, Sized) else None)
            vectors = encoder.encode(texts) if output is None else encoder.write(Path(output), texts)
            return Encoded(None, vectors, None)
        examples = self._tokenize(texts, self.config.max_row_tokens, prompt)
        lengths = examples.lengths
        mask = (np.arange(lengths.max(initial=0)) < lengths[:, None]).astype(np.int32)
        hidden_states = np.zeros((*mask.shape, width), np.float32)
        pooled = np.zeros((len(examples), width), np.float32) if "pooler" in self.params else None
        for indices, hidden in encode_batches(loaded, examples):
            for index, states in zip(indices, np.split(hidden, np.cumsum(lengths[indices])[:-1]), strict=True):
                hidden_states[index, : len(states)] = states
            if pooled is not None:
                pooled[indices] = pooler_states(loaded, hidden, lengths[indices])
        return Encoded(hidden_states, pooled, mask)

    def fill_mask(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """Predicts the `top` most probable tokens and their probabilities at each mask token of a text.

        Write the mask token as [MASK], even if the vocabulary has a different name for it.

        Examples:
          >>> (predictions,) = bertjax.load(CHECKPOINT).fill_mask("a [MASK] c", top=3)
          >>> len(predictions), predictions[0][1] >= predictions[1][1]
          (3, True)
        """
        return fill_mask(self._loaded, text, top)

    def predict(self, texts: Sequence[str | tuple[str, ...]], context: str = "") -> list[dict[str, Any]]:
        """Returns one record per text with the `prediction` and, for classes, the `probabilities` of the labels.

        Args:
          texts: texts or tuples of texts: (first, second) for pairs, (context, ending, ...) for multiple choice, or the
            words of a text for tagging. For tagging, a string is split into words at whitespace and punctuation;
            special and added tokens are one word each. For question answering, the texts are questions.
          context: passage that contains the answers, for question answering.

        Tagging records have `words` and their `spans` (start and end character offsets). If the tags follow IOB, BIOES,
        BILOU or BMES, the records also have `entities` with label, start, end and text. Question-answering records
        have `start` and `end`, character offsets in the passage.

        Examples:
          >>> (record,) = bertjax.load(CLASSIFIER).predict(["a b"])
          >>> record["prediction"] in record["probabilities"], sorted(record["probabilities"])
          (True, ['bad', 'good'])
        """
        inputs = list(as_tuples(texts))
        is_tagger = self._loaded.output_kind == TAGS
        return list(predict_texts(self._loaded, texts if is_tagger else inputs, context=context))

    def _tokenize(self, texts: Iterable[Text], seq_len: int, prompt: str = "") -> Examples:
        truncation = TruncationCount(seq_len)
        examples = tokenize(self._loaded, texts, truncation, prompt)
        truncation.log()
        return examples


def load(
    path: str | Path, mesh: Mesh | None = None, lower_case: bool | None = None, dtype: str | None = None
) -> Pretrained:
    """Loads a checkpoint of bertjax, Hugging Face or google-research/bert.

    Args:
      path: bertjax workdir, checkpoint in a workdir, Hugging Face folder, TensorFlow checkpoint or its folder, or
        `hf:ORG/NAME[@REVISION]` for a model on the Hugging Face Hub.
      mesh: device mesh with the axes `data`, `fsdp` and `tensor` (default: all devices, with replicated parameters).
      lower_case: whether to lower-case text (default: None, the tokenizer's setting); must be None for a workdir.
      dtype: dtype of the computation, `float32` or `bfloat16` (default: `model.dtype` of a workdir, else float32).

    Raises:
      UsageError: `path` contains no checkpoint or no vocabulary, or the architecture is unsupported.
      BertjaxError: the checkpoint is damaged.

    Examples:
      >>> bertjax.load(CHECKPOINT).encode(["a"]).last_hidden_state.dtype
      dtype('float32')
    """
    if not str(path):  # An empty path, as from an unset shell variable, would mean the current folder.
        raise UsageError("path is empty; pass the path of a checkpoint")
    skip_missing_tpu()
    return Pretrained(load_model(path, mesh, lower_case, dtype))


def load_tokenizer(path: str | Path, lower_case: bool | None = None) -> Tokenizer:
    """Loads a tokenizer from a checkpoint (any `path` of `load`) or a `vocab.txt`, `.model` or `tokenizer.json` file.

    Args:
      path: path of the file, or path or Hub address of the checkpoint.
      lower_case: whether to lower-case text (default: as the checkpoint does; detected for a `vocab.txt`).

    Examples:
      >>> tokenizer = bertjax.load_tokenizer(CHECKPOINT)
      >>> tokenizer.decode(tokenizer.encode("Bad cab"))
      'bad cab'

    Raises:
      UsageError: `path` contains no tokenizer.
    """
    return Tokenizer(read_vocabulary(path, lower_case))
