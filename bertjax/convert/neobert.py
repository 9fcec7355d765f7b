"""NeoBERT family (arXiv 2502.19587). Its checkpoints contain custom code, which bertjax does not run."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.eurobert import LLAMA_VALUES
from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, Family, ModelClass
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    # The width of NeoBERT's feed-forward layers is two thirds of `intermediate_size`, rounded up to a multiple of 8.
    return {"intermediate_size": -(-int(2 * config["intermediate_size"] / 3) // 8) * 8}


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
    values={
        **LLAMA_VALUES,
        "position_embedding_type": "rotary_pairs",
        "global_rope_theta": 10_000.0,
        "pooler_act": "tanh",
        "layer_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
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
    prefix="model.",
    arrays=(
        ("encoder/embeddings/token", "model.encoder.weight"),
        ("encoder/layers/attention_norm", "model.transformer_encoder.{layer}.attention_norm"),
        ("encoder/layers/attention/query", "model.transformer_encoder.{layer}.qkv", "heads 0/3"),
        ("encoder/layers/attention/key", "model.transformer_encoder.{layer}.qkv", "heads 1/3"),
        ("encoder/layers/attention/value", "model.transformer_encoder.{layer}.qkv", "heads 2/3"),
        ("encoder/layers/attention/output", "model.transformer_encoder.{layer}.wo"),
        ("encoder/layers/mlp_norm", "model.transformer_encoder.{layer}.ffn_norm"),
        ("encoder/layers/mlp_in", "model.transformer_encoder.{layer}.ffn.w12", "0/2"),
        ("encoder/layers/mlp_gate", "model.transformer_encoder.{layer}.ffn.w12", "1/2"),
        ("encoder/layers/mlp_out", "model.transformer_encoder.{layer}.ffn.w3"),
        ("encoder/final_norm", "model.layer_norm"),
        ("masked_lm/decoder", "decoder.weight"),
        ("masked_lm/bias", "decoder.bias"),
        ("pooler/dense", "dense"),
    ),
)
