"""NumPy versions of the sentence-transformers modules that turn the hidden states of a text into one vector.

Each module reads and writes named features, as in sentence-transformers. `token_embeddings`, float32 [tokens, D], are
the concatenated hidden states of n texts. `sentence_embedding` is float32 [n, D]. `Layer` also accepts JAX arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"
# Config field of each pooling mode before sentence-transformers 5.4. Vectors are concatenated in this order.
POOLING_FIELDS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Activations of `Dense`, keyed by the name of the `torch.nn` class. Arguments are the defaults of PyTorch.
ACTIVATIONS: dict[str, Callable] = {
    "Identity": lambda x: x,
    "Tanh": lambda x: x.__array_namespace__().tanh(x),
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "Sigmoid": jax.nn.sigmoid,
    "SiLU": jax.nn.silu,
}
_MIN_NORM = 1e-12
_LAYER_NORM_EPSILON = 1e-5
_MIN_DIVISOR = 1e-9


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Module that pools the hidden states of each text. The vectors of several modes are concatenated."""

    name: ClassVar[str] = "Pooling"
    config: Mapping[str, Any]  # content of the module's `config.json`
    modes: tuple[str, ...]  # pooling modes, keys of `POOLING_FIELDS`

    def __str__(self) -> str:
        return f"Pooling ({', '.join(self.modes)})"

    def __call__(self, features: dict[str, np.ndarray], lengths: np.ndarray, prompt_len: int) -> None:
        """Pools `token_embeddings` into `sentence_embedding`. See `SentenceEmbedder.__call__` for the arguments."""
        hidden = features[TOKENS]
        # Do not pool [CLS] and the prompt if `include_prompt` is false.
        skipped = 0 if self.config.get("include_prompt", True) else prompt_len
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(len(hidden)) - np.repeat(starts, lengths)
        mask = (positions >= skipped)[:, None]

        def pool(mode: str) -> np.ndarray:
            if mode == "cls":
                return hidden[starts + np.where(lengths > skipped, skipped, 0)]
            if mode == "lasttoken":
                return hidden[starts + lengths - 1] * (lengths > skipped)[:, None]
            if mode == "max":
                return np.maximum.reduceat(np.where(mask, hidden, -np.inf), starts, axis=0)
            weights = (mask * (positions + 1)[:, None] if mode == "weightedmean" else mask).astype(np.float32)
            sums = np.add.reduceat(hidden * weights, starts, axis=0)
            divisor = np.maximum(np.add.reduceat(weights, starts, axis=0), _MIN_DIVISOR)
            return sums / (np.sqrt(divisor) if mode == "mean_sqrt_len_tokens" else divisor)

        features[SENTENCE] = np.concatenate([pool(mode) for mode in self.modes], axis=1).astype(np.float32)


def _dense(x: np.ndarray, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Applies `linear.weight` [out, in], `linear.bias` [out], an activation and optionally a residual connection.

    A residual connection between different widths has `residual.weight` [out, in].
    """
    outputs = x @ arrays["linear.weight"].T + arrays.get("linear.bias", np.float32(0))
    outputs = x.__array_namespace__().asarray(ACTIVATIONS[activation_name(config)](outputs))
    if not config.get("use_residual"):
        return outputs
    residual = arrays.get("residual.weight")
    return outputs + (x if residual is None else x @ residual.T)


def _normalize(x: np.ndarray, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    xp = x.__array_namespace__()
    return x / xp.maximum(xp.linalg.norm(x, axis=-1, keepdims=True), _MIN_NORM)


def _layer_norm(x: np.ndarray, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    deviation = (x.var(axis=-1, keepdims=True) + _LAYER_NORM_EPSILON) ** 0.5
    return (x - x.mean(axis=-1, keepdims=True)) / deviation * arrays["norm.weight"] + arrays["norm.bias"]


# Layer functions, keyed by sentence-transformers class. Arguments: x [n, D], the layer's config and its arrays.
LAYERS = {"Dense": _dense, "Normalize": _normalize, "LayerNorm": _layer_norm}


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """sentence-transformers module that transforms one feature in place: `Dense`, `Normalize` or `LayerNorm`."""

    name: str  # class of the layer, a key of `LAYERS`
    config: Mapping[str, Any]  # content of the module's `config.json`
    arrays: Mapping[str, np.ndarray]  # float32 weights by name
    feature: str = SENTENCE  # name of the feature, `TOKENS` or `SENTENCE`

    def __str__(self) -> str:
        return f"Dense ({activation_name(self.config)})" if self.name == "Dense" else self.name

    def __call__(self, features: dict[str, np.ndarray], lengths: np.ndarray, prompt_len: int) -> None:
        """Replaces the feature by the output of the layer. `lengths` and `prompt_len` have no effect."""
        features[self.feature] = LAYERS[self.name](features[self.feature], self.config, self.arrays)


def activation_name(config: Mapping[str, Any]) -> str:
    """Returns a Dense module's activation: the class name if it is in `torch.nn`, else the full import path."""
    name = str(config.get("activation_function", "torch.nn.Tanh"))
    return name.rpartition(".")[2] if name.startswith("torch.nn.") else name


@dataclasses.dataclass(frozen=True, eq=False)
class SentenceEmbedder:
    """Parts of an embedder besides its encoder: input options, modules after the encoder, and prompts."""

    modules: tuple[Pooling | Layer, ...] = ()  # modules after the encoder, in their order
    width: int = 0  # vector length
    max_seq_len: int = 0  # maximum tokens per text, including [CLS] and [SEP]
    lower_case: bool = False  # whether texts are converted to lower case before tokenization
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # text prefixes, by prompt name
    default_prompt: str = ""  # name of the prompt that `encode` uses by default (default: "", no prompt)
    truncate_dim: int | None = None  # number of components to which vectors are truncated (default: None, all)
    # Name of the similarity function, such as `cosine` (default: "", not set). Only exports use it.
    similarity: str = ""
    refusal: str = ""  # why bertjax cannot compute the vectors of this model (default: "", it can)

    def prompt(self, is_query: bool) -> str | None:
        """Returns the prompt for queries or for documents, or None if the model has no such prompt.

        sentence-transformers also tries the prompts `passage` and `corpus` for documents, but only after `document`,
        which all of its models have.
        """
        return self.prompts.get("query" if is_query else "document")

    def __call__(self, hidden: np.ndarray, lengths: np.ndarray, prompt_len: int) -> np.ndarray:
        """Returns one vector per text, float32 [n, D].

        Args:
          hidden: float32 [tokens, D], the concatenated hidden states of n texts.
          lengths: int64 [n], tokens per text.
          prompt_len: number of tokens of [CLS] and the prompt at the start of each text (0: no prompt).
        """
        features = {TOKENS: hidden}
        for module in self.modules:
            module(features, lengths, prompt_len)
        return features[SENTENCE][:, : self.truncate_dim]
