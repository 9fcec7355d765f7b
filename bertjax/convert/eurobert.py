"""EuroBERT in Hugging Face transformers: Llama's layers without a causal mask."""

import logging
from collections.abc import Mapping
from typing import Any

from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, REQUIRED, TOKEN_IDS, Family, ModelClass
from bertjax.convert.modernbert import default_rope
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, TAGS

logger = logging.getLogger(__name__)

_POOLING = {"bos": "cls", "mean": "mean", "late": "late"}
LLAMA_VALUES = {
    **dict.fromkeys(("norm_first", "gated_mlp"), True),
    **dict.fromkeys(("embedding_norm", "norm_bias", "tie_word_embeddings", "attention_bias", "mlp_bias"), False),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "type_vocab_size": 0,
    "norm": "rms_norm",
    "lm_head": "linear",
    "hidden_act": "silu",
}


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    # As in transformers, `rope_scaling` is the old name of `rope_parameters`, and takes precedence.
    rope = default_rope(config.get("rope_scaling") or config.get("rope_parameters"))
    pooling = config.get("classifier_pooling")
    if not pooling and config.get("clf_pooling"):
        pooling = config["clf_pooling"]
        logger.info(f"read clf_pooling={pooling} as EuroBERT's own code does; transformers ignores it and uses late")
    pooling = pooling or "late"
    if pooling not in _POOLING:
        raise UsageError(f"classifier_pooling={pooling!r} is not supported; use one of {', '.join(_POOLING)}")
    if (size := config.get("head_dim")) and size * config["num_attention_heads"] != config["hidden_size"]:
        raise UsageError(f"head_dim={size} is not supported; it must be hidden_size / num_attention_heads")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    # The decoder has a bias if the feed-forward layers have biases.
    return {
        "global_rope_theta": float(theta),
        "classifier_pooling": _POOLING[pooling],
        "decoder_bias": bool(config.get("mlp_bias")),
    }


def _write_fields(config: ModelConfig) -> dict[str, Any]:
    theta = config.global_rope_theta
    return {
        "classifier_pooling": next(name for name, own in _POOLING.items() if own == config.classifier_pooling),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
    }


EUROBERT = Family(
    model_type="eurobert",
    fields={
        **{name: name for name in (*REQUIRED, "hidden_act", "max_position_embeddings", "initializer_range")},
        **{name: name for name in ("attention_bias", "mlp_bias", "num_key_value_heads", "tie_word_embeddings")},
        "layer_norm_eps": "rms_norm_eps",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    values={
        **LLAMA_VALUES,
        "position_embedding_type": "rotary",
        "pooler_act": "gelu_erf",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    read_fields=_read_fields,
    write_fields=_write_fields,
    token_ids=TOKEN_IDS,
    classes={
        "EuroBertForMaskedLM": ModelClass((MASKED_LM,)),
        "EuroBertModel": ModelClass(()),
        "EuroBertForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
        "EuroBertForSequenceClassification": ModelClass((POOLER, CLASSIFIER), (CLASSES, MULTILABEL)),
    },
    prefix="model.",
    arrays=(
        ("encoder/embeddings/token", "model.embed_tokens.weight"),
        ("encoder/layers/attention_norm", "model.layers.{layer}.input_layernorm"),
        ("encoder/layers/attention/query", "model.layers.{layer}.self_attn.q_proj"),
        ("encoder/layers/attention/key", "model.layers.{layer}.self_attn.k_proj"),
        ("encoder/layers/attention/value", "model.layers.{layer}.self_attn.v_proj"),
        ("encoder/layers/attention/output", "model.layers.{layer}.self_attn.o_proj"),
        ("encoder/layers/mlp_norm", "model.layers.{layer}.post_attention_layernorm"),
        ("encoder/layers/mlp_in", "model.layers.{layer}.mlp.gate_proj"),
        ("encoder/layers/mlp_gate", "model.layers.{layer}.mlp.up_proj"),
        ("encoder/layers/mlp_out", "model.layers.{layer}.mlp.down_proj"),
        ("encoder/final_norm", "model.norm"),
        ("masked_lm/decoder", "lm_head.weight"),
        ("masked_lm/bias", "lm_head.bias"),
        ("pooler/dense", "dense"),
    ),
)
