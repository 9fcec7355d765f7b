"""NeoBERT (arXiv 2502.19587). Folders of models contain code, which bertjax does not run."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, Family, ModelClass
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL

_LAYER = "model.transformer_encoder.{layer}"
# The width of the gated feed-forward layers is two thirds of `intermediate_size`, rounded up to a multiple of 8.
_MULTIPLE = 8


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    width = int(2 * config["intermediate_size"] / 3)
    return {"intermediate_size": -(-width // _MULTIPLE) * _MULTIPLE}


def _write_fields(config: ModelConfig) -> dict[str, Any]:
    return {"intermediate_size": config.intermediate_size * 3 // 2, "hidden_act": "swiglu"}


NEOBERT = Family(
    model_type="neobert",
    tokenizer_class="BertTokenizer",
    fields={
        **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "max_position_embeddings": "max_length",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "decoder_init_range",
    },
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    values={
        "type_vocab_size": 0,
        "position_embedding_type": "rotary_pairs",
        "global_rope_theta": 10_000.0,
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_bias": False,
        "norm_first": True,
        "gated_mlp": True,
        "lm_head": "linear",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "pooler_act": "tanh",
        "layer_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    fixed={"hidden_act": "swiglu"},
    read_fields=_read_fields,
    write_fields=_write_fields,
    has_own_code=True,
    classes={
        "NeoBERTLMHead": ModelClass((MASKED_LM,)),
        "NeoBERT": ModelClass(()),
        "NeoBERTForSequenceClassification": ModelClass((POOLER, CLASSIFIER), (CLASSES, MULTILABEL)),
    },
    base_class="NeoBERT",
    prefix="model.",
    arrays=(
        ("encoder/embeddings/token", "model.encoder.weight"),
        ("encoder/layers/attention_norm", f"{_LAYER}.attention_norm"),
        ("encoder/layers/attention/query", f"{_LAYER}.qkv", "heads 0/3"),
        ("encoder/layers/attention/key", f"{_LAYER}.qkv", "heads 1/3"),
        ("encoder/layers/attention/value", f"{_LAYER}.qkv", "heads 2/3"),
        ("encoder/layers/attention/output", f"{_LAYER}.wo"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.ffn_norm"),
        ("encoder/layers/mlp_in", f"{_LAYER}.ffn.w12", "0/2"),
        ("encoder/layers/mlp_gate", f"{_LAYER}.ffn.w12", "1/2"),
        ("encoder/layers/mlp_out", f"{_LAYER}.ffn.w3"),
        ("encoder/final_norm", "model.layer_norm"),
        ("masked_lm/decoder", "decoder.weight"),
        ("masked_lm/bias", "decoder.bias"),
        ("pooler/dense", "dense"),
    ),
)
