"""Reference BERT forward pass in float64 NumPy, written from the paper, one row and one head at a time."""

import math

import numpy as np


def layer_norm(x: np.ndarray, p: dict) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * p["scale"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def encode_row(params: dict, ids: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Returns the hidden states [L, D] of one row: output of the embeddings and of each layer."""
    p = params["encoder"]
    tables = p["embeddings"]
    x = tables["token"][ids] + tables["segment"][segments] + tables["position"][: len(ids)]
    states = [layer_norm(x, tables["norm"])]
    layers = p["layers"]
    for n in range(layers["mlp_in"]["kernel"].shape[0]):

        def param(*path: str, n: int = n) -> np.ndarray:
            node = layers
            for name in path:
                node = node[name]
            return node[n]

        x = states[-1]
        attended = np.zeros_like(x)
        for head in range(layers["attention"]["query"]["kernel"].shape[2]):
            q, k, v = (
                x @ param("attention", name, "kernel")[:, head] + param("attention", name, "bias")[head]
                for name in ("query", "key", "value")
            )
            scores = q @ k.T / math.sqrt(q.shape[-1])
            scores[:, mask == 0] = -1e30
            attended += softmax(scores) @ v @ param("attention", "output", "kernel")[head]
        attended += param("attention", "output", "bias")
        norm = {name: param("attention_norm", name) for name in ("scale", "bias")}
        x = layer_norm(x + attended, norm)
        inner = gelu(x @ param("mlp_in", "kernel") + param("mlp_in", "bias"))
        norm = {name: param("mlp_norm", name) for name in ("scale", "bias")}
        states.append(layer_norm(x + inner @ param("mlp_out", "kernel") + param("mlp_out", "bias"), norm))
    return states


def pretraining_logits(params: dict, batch: dict[str, np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns masked-LM logits [B, P, vocabulary] and next-sentence logits [B, 2]."""
    masked_lm, next_sentence = [], []
    for row in range(len(batch["input_ids"])):
        hidden = encode_row(params, batch["input_ids"][row], batch["segment_ids"][row], batch["input_mask"][row])[-1]
        head = params["masked_lm"]
        x = hidden[batch["masked_lm_positions"][row]]
        x = layer_norm(gelu(x @ head["transform"]["kernel"] + head["transform"]["bias"]), head["norm"])
        masked_lm.append(x @ params["encoder"]["embeddings"]["token"][:vocab_size].T + head["bias"][:vocab_size])
        pooled = np.tanh(hidden[0] @ params["pooler"]["dense"]["kernel"] + params["pooler"]["dense"]["bias"])
        head = params["next_sentence"]["dense"]
        next_sentence.append(pooled @ head["kernel"] + head["bias"])
    return np.array(masked_lm), np.array(next_sentence)
