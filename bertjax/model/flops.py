"""Model FLOPs and the peaks they are held against, for model-FLOPs utilisation (MFU)."""

import dataclasses
import functools
import time

import jax
import numpy as np

from bertjax.model.architecture import LSTM
from bertjax.model.config import ModelConfig
from bertjax.model.feature_head import FeatureHead

# Dense bf16 peaks in FLOP/s of what JAX calls a device, from the makers' data sheets, by what its `device_kind`
# contains. That is a chip but on v2 and v3, whose 45 and 123 TFLOP/s a chip are those of two devices.
PEAK_FLOPS = (
    ("A100", 312e12),
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

_NOTHING = FeatureHead()


def flops_per_token(
    config: ModelConfig, seq_len: int, predictions: int = 0, feature_head: FeatureHead = _NOTHING
) -> float:
    """FLOPs of one training step a token, forwards and backwards, matrix products only.

    6 * (parameters of the layers' matrices) for the body, 12 N L D for bidirectional attention, and the heads on the
    positions that are predicted. Recomputation is not counted, nor the vocabulary's padding, nor that attention in one
    direction could do with half.

    Args:
      config: sizes.
      seq_len: L, tokens a row, padding included.
      predictions: predicted positions a row; 0 for a model without a masked-LM or language-model head.
      feature_head: what is between encoder and output; with features the encoder counts nothing.
    """
    return (0 if feature_head.features else _of_encoder(config, seq_len, predictions)) + _of_lstms(config, feature_head)


def attention_flops_per_token(config: ModelConfig, context: float, feature_head: FeatureHead = _NOTHING) -> float:
    """The part of `flops_per_token` that is attention's, of a token that attends to `context` others."""
    if feature_head.features or config.encoder == LSTM:
        return 0.0
    return 12 * config.num_hidden_layers * config.hidden_size * context


def _of_lstms(config: ModelConfig, feature_head: FeatureHead) -> float:
    size, flops = feature_head.lstm_size, 0.0
    inputs = dataclasses.replace(feature_head, lstm_layers=0).width(config)
    for _ in range(feature_head.lstm_layers):
        flops += 6 * 2 * 4 * size * (inputs + size)
        inputs = 2 * size
    return flops


def _of_encoder(config: ModelConfig, seq_len: int, predictions: int) -> float:
    width = config.hidden_size
    if config.encoder == LSTM:
        # Two directions of half the width; each has a matrix to four gates for its input and one for its state.
        part = width // 2
        return (
            2
            * 6
            * (config.num_hidden_layers * 8 * part**2 + predictions / seq_len * (part**2 + part * config.vocab_size))
        )
    body = 6 * config.num_hidden_layers * (4 * width**2 + 2 * width * config.intermediate_size)
    attention = attention_flops_per_token(config, seq_len)
    head = 6 * predictions / seq_len * (width**2 + width * config.vocab_size)
    return body + attention + head


@functools.cache
def matmul_flops_per_second(size: int = 2048, repeats: int = 5) -> float:
    """What this machine's CPUs reach in a float32 NumPy matrix product: the best of some repeats, measured once."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def peak_flops_per_second(devices: list[jax.Device]) -> tuple[float, str]:
    """Peak of all `devices` together, and where the figure comes from; (0, reason) where none is known.

    Fake CPU devices share one machine, so they count once.
    """
    if devices[0].platform == "cpu":
        return matmul_flops_per_second(), "measured NumPy float32 matrix product"
    kind = devices[0].device_kind
    for name, peak in PEAK_FLOPS:
        if name in kind:
            return peak * len(devices), f"{len(devices)} x {kind}, {peak / 1e12:g} TFLOP/s bf16"
    return 0.0, f"no peak known for {kind}"
