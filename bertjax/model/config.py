"""Model configuration. Checkpoints store the `Architecture` fields. A run may change all other fields."""

import dataclasses
import re
from typing import Any

from bertjax.errors import UsageError
from bertjax.utils.devices import has_bfloat16_units
from bertjax.utils.sections import Section, bounded

AUTO = "auto"
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "silu", "tanh")
TRANSFORMER, LSTM = ENCODERS = ("transformer", "lstm")
LEFT, RIGHT = SIDES = ("left", "right")
DIRECTIONS = ("both", *SIDES)
LAYER_NORM, RMS_NORM = NORMS = ("layer_norm", "rms_norm")
# Position types: learned embeddings (`absolute`), or rotations of queries and keys. In a head of size K, `rotary` pairs
# elements i and i + K / 2, and `rotary_pairs` pairs elements 2 i and 2 i + 1.
ABSOLUTE, ROTARY, ROTARY_PAIRS = POSITIONS = ("absolute", "rotary", "rotary_pairs")
# RoPE fields. Unlike other architecture fields, they may differ between the phases of a run.
ROPE_THETAS = ("global_rope_theta", "local_rope_theta")
# Minimum number of training steps for which `scan_layers=auto` unrolls the layers on TPU too.
LONG_RUN_STEPS = 10_000
REMAT_POLICIES = ("none", "attention", "elementwise", "projections", "full")
# Maximum dropout rate. `dropout` rounds rates to multiples of 2^-16, and would round rates close to 1 to 1.
_MAX_DROPOUT = 0.9999
_HEAD_SIZE = 64
_NAMED_SIZES = {
    "tiny": "L2_H128",
    "mini": "L4_H256",
    "small": "L4_H512",
    "medium": "L8_H512",
    "base": "L12_H768",
    "large": "L24_H1024",
}


@dataclasses.dataclass(frozen=True)
class Architecture(Section, prefix="config.model.", may_be_unset=True):
    """Fields that define the network. Every checkpoint stores them next to the parameters.

    Attributes:
      encoder: `transformer` or `lstm`. An LSTM encoder concatenates the states of two independent stacks of layers, one
        per direction, as in ELMo (Figure 3 of the paper). It ignores positions, segments and attention heads.
      vocab_size: number of word pieces in the vocabulary.
      hidden_size: width of the hidden states, D (for LSTMs, the sum over both directions).
      num_hidden_layers: number of Transformer layers, or of LSTM layers per direction.
      num_attention_heads: number of attention heads, H; must divide `hidden_size`.
      intermediate_size: width of the feed-forward layer, F; 4 D in the paper.
      max_position_embeddings: number of learned position embeddings, which is the maximum row length in tokens plus
        `position_offset`. With RoPE, the maximum row length.
      type_vocab_size: number of segment embeddings. With 0 or 1, the texts of a pair have the same segment.
      pair_segments: whether the second text of a pair has segment 1. If false, all tokens have segment 0, as in RoBERTa
        checkpoints with two segment embeddings, whose tokenizers return no segments.
      hidden_act: activation of the feed-forward layer: `gelu_tanh` (as in google-research/bert), `gelu_erf`, `relu`,
        `silu` or `tanh`.
      layer_norm_eps: epsilon added to the variance in LayerNorm.
      attention_direction: side of the context that a token attends to: `both` (as in BERT), `left` or `right`. Every
        token also attends to itself.
      pad_vocab_to_multiple_of: the vocabulary size is padded to a multiple of this number, for faster matmuls. The
        added tokens get probability 0.
      model_type: transformers model family for exported checkpoints, such as `modernbert`. It has no other effect.
      embedding_size: width of the embeddings (default: 0, `hidden_size`). Another width is projected to `hidden_size`.
      embedding_norm: whether a norm follows the embeddings.
      norm: type of all norms: `layer_norm` or `rms_norm`.
      norm_bias: whether LayerNorms have a bias.
      norm_first: whether norms precede the sub-layers, with one more norm after the last layer, as in ModernBERT. If
        false, a norm follows each residual connection, as in BERT.
      first_attention_norm: whether a norm precedes the attention of the lowest layer. ModernBERT has no such norm.
      position_embedding_type: `absolute` (learned embeddings), `rotary` (rotations of the two halves of each head) or
        `rotary_pairs` (rotations of adjacent pairs).
      position_offset: position of the first token in the table of learned embeddings (default: 0; 2 in RoBERTa).
      global_rope_theta: RoPE theta (base of the rotary wavelengths).
      local_rope_theta: RoPE theta of layers with local attention.
      local_attention: number of tokens in the window of local attention, half of them on each side (default: 0, all
        layers attend to the whole sequence).
      global_attn_every_n_layers: with local attention, every n-th layer, starting with the lowest, attends to the whole
        sequence.
      num_key_value_heads: number of key and value heads (default: 0, `num_attention_heads`).
      attention_bias: whether the projections of attention have biases.
      mlp_bias: whether the feed-forward layers have biases.
      gated_mlp: whether the activations are multiplied by a second projection, as in GeGLU.
      lm_head: layers of the masked-LM head: `transform` (dense layer, activation, norm and decoder) or `linear`
        (decoder only).
      tie_word_embeddings: whether the decoder uses the token embedding table instead of a matrix of its own.
      decoder_bias: whether the decoder has a bias.
      head_act: activation of the dense layer of the masked-LM head (default: empty, `hidden_act`).
      head_bias: whether the masked-LM head's dense layer and the pooler have biases.
      pooler_act: activation of the pooler, the dense layer before a sequence-level output layer (default: `tanh`;
        empty: no dense layer).
      pooler_norm: whether a norm follows the pooler's activation.
      classifier_pooling: pooling of token states into one state per sequence: `cls` (state of the first token), `mean`
        (mean over the tokens, then the pooler) or `late` (the pooler, then the mean).
      token_pooler: whether the pooler also precedes token-level output layers, as in ModernBERT.
    """

    # The maximum sizes are larger than those of any trained model. They make a mistyped size fail at once, not minutes
    # later inside a library.
    encoder: str = bounded(TRANSFORMER, choices=ENCODERS)
    vocab_size: int = bounded(30522, at_least=1, at_most=1 << 24)
    hidden_size: int = bounded(768, at_least=1, at_most=1 << 17)
    num_hidden_layers: int = bounded(12, at_least=1, at_most=1 << 12)
    num_attention_heads: int = bounded(12, at_least=1, at_most=1 << 12)
    intermediate_size: int = bounded(3072, at_least=1, at_most=1 << 19)
    max_position_embeddings: int = bounded(512, at_least=1, at_most=1 << 20)
    type_vocab_size: int = bounded(2, at_least=0, at_most=1 << 16)
    pair_segments: bool = True
    hidden_act: str = bounded("gelu_tanh", choices=ACTIVATIONS)
    layer_norm_eps: float = bounded(1e-12, at_least=0)
    attention_direction: str = bounded("both", choices=DIRECTIONS)
    pad_vocab_to_multiple_of: int = bounded(128, at_least=1, at_most=1 << 24)
    model_type: str = "bert"
    embedding_size: int = bounded(0, at_least=0, at_most=1 << 17)
    embedding_norm: bool = True
    norm: str = bounded(LAYER_NORM, choices=NORMS)
    norm_bias: bool = True
    norm_first: bool = False
    first_attention_norm: bool = True
    position_embedding_type: str = bounded(ABSOLUTE, choices=POSITIONS)
    position_offset: int = bounded(0, at_least=0, at_most=1 << 16)
    global_rope_theta: float = bounded(160_000.0, above=0)
    local_rope_theta: float = bounded(10_000.0, above=0)
    local_attention: int = bounded(0, at_least=0, at_most=1 << 20)
    global_attn_every_n_layers: int = bounded(3, at_least=1, at_most=1 << 12)
    num_key_value_heads: int = bounded(0, at_least=0, at_most=1 << 12)
    attention_bias: bool = True
    mlp_bias: bool = True
    gated_mlp: bool = False
    lm_head: str = bounded("transform", choices=("transform", "linear"))
    tie_word_embeddings: bool = True
    decoder_bias: bool = True
    head_act: str = bounded("", choices=("", *ACTIVATIONS))
    head_bias: bool = True
    pooler_act: str = bounded("tanh", choices=("", *ACTIVATIONS))
    pooler_norm: bool = False
    classifier_pooling: str = bounded("cls", choices=("cls", "mean", "late"))
    token_pooler: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_size and self.embedding_size == self.hidden_size:
            object.__setattr__(self, "embedding_size", 0)  # Both values mean the same network; store only the default.
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        is_lstm, is_rotary = self.encoder == LSTM, self.position_embedding_type in (ROTARY, ROTARY_PAIRS)
        is_linear = self.lm_head == "linear" and self.tie_word_embeddings
        is_one_sided = self.attention_direction in ("left", "right")
        has_first_norm = self.norm_first or self.first_attention_norm is not False
        unused = [
            (name, f"{name} does not apply to {switch}={value}; leave it unset")
            for (switch, value), names in _UNUSED_FIELDS.items()
            for name in names
            if getattr(self, switch) == value and getattr(self, name) not in (None, getattr(Architecture, name))
        ]
        # Pairs of (condition, error message). Fields may be unset (None).
        conflicts: list[tuple[Any, str]] = [
            *unused,
            (
                width and heads and width % heads,
                f"hidden_size={width} is not divisible by num_attention_heads={heads}; use a multiple of {heads}",
            ),
            (is_lstm and width and width % 2, f"hidden_size is {width}; encoder={LSTM} needs an even number"),
            (heads and kv_heads and heads % kv_heads, "num_key_value_heads must divide num_attention_heads"),
            (self.norm == RMS_NORM and self.norm_bias, f"norm={RMS_NORM} has no bias; set norm_bias=false"),
            (not has_first_norm, "first_attention_norm=false needs norm_first=true"),
            (is_rotary and width and heads and width // heads % 2, "RoPE needs an even head size"),
            (self.local_attention == 1, "local_attention must be at least 2, a token on each side"),
            (self.local_attention and is_one_sided, "local_attention needs attention_direction=both"),
            (is_linear and self.embedding_size, "lm_head=linear with tied embeddings needs embedding_size=0"),
        ]
        for conflict, reason in conflicts:
            if conflict:
                raise UsageError(f"config.model: {reason}")

    @property
    def context_sides(self) -> tuple[str, ...]:
        """Context direction of each part of the hidden state. LSTMs have two parts, a `left` and a `right` half."""
        return ("left", "right") if self.encoder == LSTM else (self.attention_direction,)

    @property
    def num_segments(self) -> int:
        """Number of segment embeddings (0 for LSTMs)."""
        return 0 if self.encoder == LSTM else self.type_vocab_size

    @property
    def has_pair_segments(self) -> bool:
        """Whether the two texts of a pair have different segments."""
        return self.type_vocab_size > 1 and self.pair_segments

    @property
    def has_position_embeddings(self) -> bool:
        return self.encoder != LSTM and self.position_embedding_type == ABSOLUTE

    @property
    def embedding_width(self) -> int:
        """Width of the token embeddings, E."""
        return self.embedding_size or self.hidden_size

    @property
    def has_lm_head_params(self) -> bool:
        """Whether the masked-LM head has its own parameters."""
        return self.lm_head != "linear" or not self.tie_word_embeddings or self.decoder_bias

    @property
    def max_row_tokens(self) -> int:
        """Maximum row length in tokens."""
        return self.max_position_embeddings - self.position_offset

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer has local attention. Empty if all layers have global attention."""
        every = self.global_attn_every_n_layers
        return tuple(layer % every != 0 for layer in range(self.num_hidden_layers)) if self.local_attention else ()

    @property
    def head_size(self) -> int:
        """Width of an attention head, K."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Number of token embeddings, V: `vocab_size` rounded up to a multiple of `pad_vocab_to_multiple_of`."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of


# Maps (field, value) to other fields, which have no effect if the field has this value.
_UNUSED_FIELDS: dict[tuple[str, Any], tuple[str, ...]] = {
    ("encoder", LSTM): (
        *("attention_direction", "embedding_size", "embedding_norm", "norm", "norm_bias", "norm_first", "gated_mlp"),
        *("first_attention_norm", "position_embedding_type", "position_offset", "local_attention", "attention_bias"),
        *("num_key_value_heads", "mlp_bias", "lm_head", "tie_word_embeddings", "classifier_pooling", "token_pooler"),
        "pair_segments",
    ),
    ("position_embedding_type", ABSOLUTE): ROPE_THETAS,
    ("position_embedding_type", ROTARY): ("position_offset",),
    ("position_embedding_type", ROTARY_PAIRS): ("position_offset",),
    ("local_attention", 0): ("global_attn_every_n_layers", "local_rope_theta"),
    ("lm_head", "linear"): ("head_act",),
    ("pooler_act", ""): ("pooler_norm", "token_pooler"),
}
ARCHITECTURE_FIELDS = tuple(field.name for field in dataclasses.fields(Architecture))


@dataclasses.dataclass(frozen=True)
class ModelConfig(Architecture):
    """Config section `model`: architecture, and fields that a run may set independently of its checkpoint.

    Attributes:
      dtype: dtype of the computation: `float32`, `bfloat16` or `auto`. `auto` is bfloat16 on TPU and GPU. On CPU, it is
        bfloat16 in training if the CPU has bfloat16 units (AMX, AVX-512 BF16), otherwise float32. Parameters, softmax,
        LayerNorm statistics and losses are always float32.
      scan_layers: whether to scan over the layers. `true` compiles one layer, and `false` unrolls all layers. `auto`
        unrolls on CPU and GPU, where unrolled layers are faster. On TPU, it unrolls in runs of at least 10,000 steps,
        where less memory traffic outweighs longer compilation. In shorter runs, it scans. Checkpoints do not depend on
        this field.
      remat: recomputation in the backward pass, to save memory. `none` recomputes only cheap elementwise operations.
        `attention` also recomputes attention scores. `elementwise` recomputes everything except large matrix products.
        `projections` also recomputes the queries, keys and values. `full` recomputes whole layers.
      attention: attention implementation. `xla` uses JAX operations only. `fused` is a TPU kernel for rows of up to 512
        tokens, with dropout. `splash` is JAX's TPU kernel, without dropout. It pads rows to a multiple of 512 tokens,
        unless their length is a multiple of 128. `flash` is a GPU kernel for bfloat16 on Ampere or newer GPUs, with
        dropout. `cudnn` is for bfloat16 on Ampere or newer GPUs, without dropout, packed rows, local attention or
        `attention_direction=right`. `package.module.function` is your own `AttentionFn`. `auto` selects the first of
        `fused`, `splash`, `flash` (on A100, H100 and H200) and `xla` that supports the model and the devices. The order
        is based on the memory use and memory traffic of compiled steps; it was not timed on a TPU. All built-in
        implementations compute the same values, and those with dropout use the same dropout masks.
      hidden_dropout_prob: dropout rate after the embeddings and each sub-layer.
      attention_probs_dropout_prob: dropout rate of the attention probabilities.
      initializer_range: standard deviation of the truncated normal that initializes all matrices.
    """

    dtype: str = bounded(AUTO, choices=(AUTO, "float32", "bfloat16"))
    scan_layers: str = bounded(AUTO, choices=(AUTO, "true", "false"))
    remat: str = bounded("none", choices=REMAT_POLICIES)
    attention: str = AUTO
    hidden_dropout_prob: float = bounded(0.1, at_least=0, at_most=_MAX_DROPOUT)
    attention_probs_dropout_prob: float = bounded(0.1, at_least=0, at_most=_MAX_DROPOUT)
    initializer_range: float = bounded(0.02, at_least=0)

    @property
    def unset(self) -> tuple[str, ...]:
        """Names of the fields without a value. A model can be built only if this is empty."""
        return tuple(name for name, value in vars(self).items() if value is None)

    @property
    def architecture(self) -> Architecture:
        return Architecture(**{name: getattr(self, name) for name in ARCHITECTURE_FIELDS})

    def resolve(self, platform: str) -> "ModelConfig":
        """Replaces `auto` in `dtype` and `scan_layers` with the value for a platform: `cpu`, `gpu` or `tpu`."""
        dtype, scan_layers = self.dtype, self.scan_layers
        if dtype == AUTO:
            dtype = "float32" if platform == "cpu" and not has_bfloat16_units() else "bfloat16"
        if scan_layers == AUTO:
            scan_layers = "true" if platform == "tpu" else "false"
        return dataclasses.replace(self, dtype=dtype, scan_layers=scan_layers)


_UNSET: Any = None
# Model config without architecture. A run with this config takes its architecture from the `--init_from` checkpoint.
UNSET_ARCHITECTURE = ModelConfig(**dict.fromkeys(ARCHITECTURE_FIELDS, _UNSET))


def size_fields(size: str) -> dict[str, Any]:
    """Returns the config fields of a model size.

    Args:
      size: `tiny`, `mini`, `small`, `medium`, `base` or `large`, or a custom size such as `L6_H768_A3` (6 layers,
        hidden size 768, 3 heads). Without `_A3`, the head size is 64, as in the small models of google-research/bert.
    """
    match = re.fullmatch(r"L(\d+)_H(\d+)(?:_A(\d+))?", _NAMED_SIZES.get(size, size))
    if not match:
        raise UsageError(
            f"unknown size {size!r}; use one of {', '.join(_NAMED_SIZES)}, or a custom size such as L4_H512 (4 layers, "
            "hidden size 512) or L6_H768_A3 (3 attention heads)"
        )
    hidden_size = int(match[2])
    return {
        "num_hidden_layers": int(match[1]),
        "hidden_size": hidden_size,
        "num_attention_heads": int(match[3]) if match[3] else max(1, hidden_size // _HEAD_SIZE),
        "intermediate_size": 4 * hidden_size,
    }
