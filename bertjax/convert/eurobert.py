"""EuroBERT as in transformers: layers like those of Llama, without a causal mask."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, TOKEN_IDS, Family, ModelClass, default_rope
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, TAGS

_LAYER = "model.layers.{layer}"
_POOLING = {"bos": "cls", "mean": "mean", "late": "late"}


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    rope, pooling = default_rope(config.get("rope_parameters")), config.get("classifier_pooling")
    pooling = pooling or config.get("clf_pooling") or "late"  # The second name is that of EuroBERT's own code.
    if pooling not in _POOLING:
        raise UsageError(f"classifier_pooling={pooling!r} is not supported; use one of {', '.join(_POOLING)}")
    head_size = config.get("head_dim") or 0
    if head_size and head_size * config["num_attention_heads"] != config["hidden_size"]:
        raise UsageError(
            f"head_dim={head_size} is not hidden_size / num_attention_heads, which bertjax does not support"
        )
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    # The decoder has a bias if the feed-forward layers have biases.
    return {
        "global_rope_theta": float(theta),
        "classifier_pooling": _POOLING[pooling],
        "decoder_bias": bool(config.get("mlp_bias")),
    }


def _write_fields(config: ModelConfig) -> dict[str, Any]:
    pooling = next(name for name, own in _POOLING.items() if own == config.classifier_pooling)
    theta = config.global_rope_theta
    return {
        "classifier_pooling": pooling,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
    }


_SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
EUROBERT = Family(
    model_type="eurobert",
    fields={
        **{name: name for name in _SAME},
        **{name: name for name in ("max_position_embeddings", "initializer_range", "attention_bias", "mlp_bias")},
        **{name: name for name in ("num_key_value_heads", "tie_word_embeddings")},
        "layer_norm_eps": "rms_norm_eps",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    values={
        "type_vocab_size": 0,
        "position_embedding_type": "rotary",
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_bias": False,
        "norm_first": True,
        "gated_mlp": True,
        "lm_head": "linear",
        "pooler_act": "gelu_erf",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    refused=(*Family.refused, "rope_scaling"),
    read_fields=_read_fields,
    write_fields=_write_fields,
    token_ids=TOKEN_IDS,
    classes={
        "EuroBertForMaskedLM": ModelClass((MASKED_LM,)),
        "EuroBertModel": ModelClass(()),
        "EuroBertForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
        "EuroBertForSequenceClassification": ModelClass((POOLER, CLASSIFIER), (CLASSES, MULTILABEL)),
    },
    base_class="EuroBertModel",
    prefix="model.",
    arrays=(
        ("encoder/embeddings/token", "model.embed_tokens.weight"),
        ("encoder/layers/attention_norm", f"{_LAYER}.input_layernorm"),
        ("encoder/layers/attention/query", f"{_LAYER}.self_attn.q_proj"),
        ("encoder/layers/attention/key", f"{_LAYER}.self_attn.k_proj"),
        ("encoder/layers/attention/value", f"{_LAYER}.self_attn.v_proj"),
        ("encoder/layers/attention/output", f"{_LAYER}.self_attn.o_proj"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        ("encoder/layers/mlp_in", f"{_LAYER}.mlp.gate_proj"),
        ("encoder/layers/mlp_gate", f"{_LAYER}.mlp.up_proj"),
        ("encoder/layers/mlp_out", f"{_LAYER}.mlp.down_proj"),
        ("encoder/final_norm", "model.norm"),
        ("masked_lm/decoder", "lm_head.weight"),
        ("masked_lm/bias", "lm_head.bias"),
        ("pooler/dense", "dense"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
