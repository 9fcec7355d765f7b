"""Model FLOPs of training and peak FLOP/s of devices, which determine model-FLOPs utilization (MFU)."""

import dataclasses
import functools
import timeit

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.config import LSTM, ModelConfig
from bertjax.model.feature_head import FeatureHead
from bertjax.utils.devices import has_bfloat16_units

# Peak dense bfloat16 FLOP/s per JAX device, from the vendors' data sheets, by the first matching substring of
# `device_kind`. A device is a chip, except on TPU v2 and v3, where a chip (45 and 123 TFLOP/s) is two devices.
PEAK_FLOPS = (
    ("A100", 312e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
    ("TPU v3", 61.5e12),
    ("TPU v2", 22.5e12),
)

# A training step costs as many FLOPs as three forward passes, since the backward pass costs as many as two.
TRAINING_FACTOR = 3
_NO_HEAD = FeatureHead()


def flops_per_position(
    config: ModelConfig, seq_len: int, num_predictions: int = 0, feature_head: FeatureHead = _NO_HEAD
) -> float:
    """Returns the matmul FLOPs of one training step, per position.

    The count includes 6 FLOPs per parameter of the layers' matrices, 12 L D per layer for attention, and the output
    layer at predicted positions. L is the row length or, in layers with local attention, at most the window. D is the
    hidden size. The count excludes recomputation, vocabulary padding and, if `feature_head` uses frozen features, the
    encoder. Unidirectional attention counts like bidirectional attention.

    `seq_len` is the row length in tokens, including padding. `num_predictions` is the number of predicted positions per
    row (default: 0, no masked-LM or language-model head).
    """
    flops: float = _feature_head_flops(config, feature_head)
    if not feature_head.features:
        flops += _encoder_flops(config, seq_len) + num_predictions / seq_len * _output_flops(config)
    return float(TRAINING_FACTOR * flops)


def attention_flops_per_position(config: ModelConfig, context: float, feature_head: FeatureHead = _NO_HEAD) -> float:
    """Returns the training FLOPs per position for attention to `context` tokens: scores and weighted sums of values."""
    if feature_head.features or config.encoder == LSTM:
        return 0.0
    return TRAINING_FACTOR * _attention_flops(config, context)


def _attention_flops(config: ModelConfig, context: float) -> float:
    num_local = sum(config.local_layers)
    contexts = (config.num_hidden_layers - num_local) * context + num_local * min(context, config.local_attention + 1)
    return 2 * 2 * config.hidden_size * contexts


def _encoder_flops(config: ModelConfig, seq_len: int) -> float:
    width = config.hidden_size
    if config.encoder == LSTM:
        return 2 * config.num_hidden_layers * _lstm_flops(width // 2, width // 2)
    # Query, output, key and value projections, then two or three feed-forward matrices.
    key_value_width = config.head_size * (config.num_key_value_heads or config.num_attention_heads)
    matrices = 2 * width + 2 * key_value_width + (3 if config.gated_mlp else 2) * config.intermediate_size
    return 2 * width * (config.num_hidden_layers * matrices + config.embedding_size) + _attention_flops(config, seq_len)


def _output_flops(config: ModelConfig) -> int:
    """Returns the forward FLOPs of the language-model heads per predicted position."""
    width = config.hidden_size // len(config.context_sides)
    decoder_width = (config.embedding_size or width) if config.lm_head == "transform" else width
    transform = width * decoder_width if config.lm_head == "transform" else 0
    return len(config.context_sides) * 2 * (transform + decoder_width * config.vocab_size)


def _feature_head_flops(config: ModelConfig, feature_head: FeatureHead) -> int:
    flops = 0
    input_size = dataclasses.replace(feature_head, lstm_layers=0).width(config)
    for _ in range(feature_head.lstm_layers):
        flops += 2 * _lstm_flops(input_size, feature_head.lstm_size)
        input_size = 2 * feature_head.lstm_size
    return flops


def _lstm_flops(input_size: int, size: int) -> int:
    return 2 * 4 * size * (input_size + size)


@functools.cache
def matmul_flops_per_second() -> tuple[float, str]:
    """Returns the measured FLOP/s of a matrix product on this machine's CPUs (best of 6 runs), and its description.

    The product is bfloat16 in XLA if the CPU has bfloat16 units, else float32 in NumPy.
    """
    size = 2048
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    multiply, name = (lambda: a @ a), "measured NumPy float32 matrix product"
    if has_bfloat16_units():
        half = jnp.asarray(a, jnp.bfloat16)
        product = jax.jit(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32))
        multiply, name = (lambda: product(half).block_until_ready()), "measured bfloat16 matrix product"
    # Repeat, because the first run may include compilation.
    return 2 * size**3 / min(timeit.repeat(multiply, repeat=6, number=1)), name


def peak_flops_per_second(devices: list[jax.Device]) -> tuple[float, str]:
    """Returns the total peak FLOP/s of devices and its source. Returns (0, reason) for an unknown device.

    Simulated CPU devices share one machine, so they count as one device.
    """
    if devices[0].platform == "cpu":
        return matmul_flops_per_second()
    kind = devices[0].device_kind
    for name, peak in PEAK_FLOPS:
        if name in kind:
            return peak * len(devices), f"{len(devices)} x {kind}, {peak / 1e12:g} TFLOP/s bf16"
    return 0.0, f"no peak known for {kind}"
