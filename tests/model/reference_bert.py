"""Reference BERT forward pass in float64 NumPy, written from the paper."""

import math

import jax
import numpy as np


def layer_norm(x: np.ndarray, p: dict) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * p["scale"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dense(x: np.ndarray, p: dict) -> np.ndarray:
    return x @ p["kernel"] + p["bias"]


def hidden_states(params: dict, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the hidden states [B, L, D]: output of the embeddings and of each layer."""
    tables, layers = params["encoder"]["embeddings"], params["encoder"]["layers"]
    ids, segments, mask = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    x = tables["token"][ids] + tables["segment"][segments] + tables["position"][: ids.shape[1]]
    states = [layer_norm(x, tables["norm"])]
    for n in range(len(layers["mlp_in"]["kernel"])):
        layer = jax.tree.map(lambda stack, n=n: stack[n], layers)
        x, attention = states[-1], layer["attention"]
        context = attention["output"]["bias"]
        for head in range(attention["query"]["kernel"].shape[1]):
            projections = (attention[name] for name in ("query", "key", "value"))
            q, k, v = (x @ p["kernel"][:, head] + p["bias"][head] for p in projections)
            scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
            attended = softmax(np.where(mask[:, None] == 0, -1e30, scores)) @ v
            context = context + attended @ attention["output"]["kernel"][head]
        x = layer_norm(x + context, layer["attention_norm"])
        states.append(layer_norm(x + dense(gelu(dense(x, layer["mlp_in"])), layer["mlp_out"]), layer["mlp_norm"]))
    return states


def pretraining_logits(params: dict, batch: dict[str, np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns masked-LM logits [B, P, vocabulary] and next-sentence logits [B, 2]."""
    hidden, head = hidden_states(params, batch)[-1], params["masked_lm"]
    masked = np.take_along_axis(hidden, batch["masked_lm_positions"][..., None], axis=1)
    x = layer_norm(gelu(dense(masked, head["transform"])), head["norm"])
    masked_lm = x @ params["encoder"]["embeddings"]["token"][:vocab_size].T + head["bias"][:vocab_size]
    pooled = np.tanh(dense(hidden[:, 0], params["pooler"]["dense"]))
    return masked_lm, dense(pooled, params["next_sentence"]["dense"])
