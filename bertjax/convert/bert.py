"""BERT and the families of transformers with BERT's layers, see `Family`."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.family import (
    CLASSIFIER,
    DISCRIMINATOR,
    ENCODER,
    MASKED_LM,
    NEXT_SENTENCE,
    POOLER,
    REQUIRED,
    Family,
    ModelClass,
)
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

# `ModelConfig` has the field names of BertConfig and of google-research/bert.
_FIELDS = {
    name: name
    for name in (
        *REQUIRED,
        *("hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "tie_word_embeddings"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
    )
}
_ABSOLUTE = {"position_embedding_type": "absolute"}
# Output layer and pooler of RobertaForSequenceClassification and ElectraForSequenceClassification.
_TWO_LAYERS = ("classifier.out_proj", "classifier.dense")


def _encoder(prefix: str) -> tuple[tuple[str, str], ...]:
    """Returns the entries of `Family.arrays` for an encoder with BERT's array names after `prefix`."""
    names = {
        "embeddings/token": "embeddings.word_embeddings.weight",
        "embeddings/position": "embeddings.position_embeddings.weight",
        "embeddings/segment": "embeddings.token_type_embeddings.weight",
        "embeddings/norm": "embeddings.LayerNorm",
        "embeddings/projection": "embeddings_project",
        "layers/attention/query": "encoder.layer.{layer}.attention.self.query",
        "layers/attention/key": "encoder.layer.{layer}.attention.self.key",
        "layers/attention/value": "encoder.layer.{layer}.attention.self.value",
        "layers/attention/output": "encoder.layer.{layer}.attention.output.dense",
        "layers/attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
        "layers/mlp_in": "encoder.layer.{layer}.intermediate.dense",
        "layers/mlp_out": "encoder.layer.{layer}.output.dense",
        "layers/mlp_norm": "encoder.layer.{layer}.output.LayerNorm",
    }
    return tuple((f"{ENCODER}/{path}", f"{prefix}{name}") for path, name in names.items())


def _classes(name: str, base: tuple[str, ...], output_layer: str = "classifier", pooler: str = "") -> dict[str, Any]:
    """Returns the classes that all families have. `output_layer` and `pooler` are those of sequence classification."""
    return {
        f"{name}ForMaskedLM": ModelClass((MASKED_LM,)),
        f"{name}Model": ModelClass(base),
        f"{name}ForQuestionAnswering": ModelClass((CLASSIFIER,), (SPANS,), "qa_outputs"),
        f"{name}ForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
        f"{name}ForMultipleChoice": ModelClass((POOLER, CLASSIFIER), (CHOICES,)),
        f"{name}ForSequenceClassification": ModelClass(
            (POOLER, CLASSIFIER), (CLASSES, MULTILABEL), output_layer, pooler
        ),
    }


def _bert(model_type: str, name: str, **options: Any) -> Family:
    prefix = f"{model_type}."
    return Family(
        model_type=model_type,
        tokenizer_class="BertTokenizer",
        fields=_FIELDS,
        values={"hidden_act": "gelu_erf"},
        fixed=_ABSOLUTE,
        classes={
            f"{name}ForPreTraining": ModelClass((POOLER, MASKED_LM, NEXT_SENTENCE)),
            f"{name}ForNextSentencePrediction": ModelClass((POOLER, NEXT_SENTENCE)),
            **_classes(name, (POOLER,)),
        },
        prefix=prefix,
        arrays=(
            *_encoder(prefix),
            ("pooler/dense", f"{prefix}pooler.dense"),
            ("masked_lm/transform", "cls.predictions.transform.dense"),
            ("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
            ("masked_lm/decoder", "cls.predictions.decoder.weight"),
            ("masked_lm/bias", "cls.predictions.bias"),
            ("next_sentence/dense", "cls.seq_relationship"),
        ),
        **options,
    )


BERT = _bert("bert", "Bert")
# Without embeddings of task types, the network is that of BERT (arXiv 1904.09223).
ERNIE = _bert("ernie", "Ernie", refused=(*Family.refused, "use_task_id"))


def _position_offset(config: Mapping[str, Any]) -> dict[str, Any]:
    # Position ids start at `pad_token_id` + 1.
    pad_id = config.get("pad_token_id")
    return {"position_offset": (1 if pad_id is None else pad_id) + 1}


def _pad_token_id(config: ModelConfig) -> dict[str, Any]:
    return {"pad_token_id": config.position_offset - 1}


def _roberta(model_type: str, name: str) -> Family:
    return Family(
        model_type=model_type,
        tokenizer_class=f"{name}Tokenizer",
        fields=_FIELDS,
        values={"hidden_act": "gelu_erf", "head_act": "gelu_erf"},
        read_fields=_position_offset,
        write_fields=_pad_token_id,
        fixed=_ABSOLUTE,
        token_ids={"bos_token_id": "cls", "eos_token_id": "sep"},
        classes=_classes(name, (POOLER,), *_TWO_LAYERS),
        prefix="roberta.",
        arrays=(
            *_encoder("roberta."),
            ("pooler/dense", "roberta.pooler.dense"),
            ("masked_lm/transform", "lm_head.dense"),
            ("masked_lm/norm", "lm_head.layer_norm"),
            ("masked_lm/decoder", "lm_head.decoder.weight"),
            ("masked_lm/bias", "lm_head.bias"),
        ),
    )


# They differ in their vocabularies, not in their networks.
ROBERTA = _roberta("roberta", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "Camembert")

# Without segments, and with a ReLU before output layers for sequences.
_EMBEDDINGS, _LAYER = "distilbert.embeddings", "distilbert.transformer.layer.{layer}"
DISTILBERT = Family(
    model_type="distilbert",
    tokenizer_class="BertTokenizer",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    values={"hidden_act": "gelu_erf", "type_vocab_size": 0, "layer_norm_eps": 1e-12, "pooler_act": "relu"},
    classes=_classes("DistilBert", ()),
    prefix="distilbert.",
    arrays=(
        ("encoder/embeddings/token", f"{_EMBEDDINGS}.word_embeddings.weight"),
        ("encoder/embeddings/position", f"{_EMBEDDINGS}.position_embeddings.weight"),
        ("encoder/embeddings/norm", f"{_EMBEDDINGS}.LayerNorm"),
        ("encoder/layers/attention/query", f"{_LAYER}.attention.q_lin"),
        ("encoder/layers/attention/key", f"{_LAYER}.attention.k_lin"),
        ("encoder/layers/attention/value", f"{_LAYER}.attention.v_lin"),
        ("encoder/layers/attention/output", f"{_LAYER}.attention.out_lin"),
        ("encoder/layers/attention_norm", f"{_LAYER}.sa_layer_norm"),
        ("encoder/layers/mlp_in", f"{_LAYER}.ffn.lin1"),
        ("encoder/layers/mlp_out", f"{_LAYER}.ffn.lin2"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.output_layer_norm"),
        ("pooler/dense", "pre_classifier"),
        ("masked_lm/transform", "vocab_transform"),
        ("masked_lm/norm", "vocab_layer_norm"),
        ("masked_lm/decoder", "vocab_projector.weight"),
        ("masked_lm/bias", "vocab_projector.bias"),
    ),
)

# With narrower embeddings, and a GELU before output layers for sequences.
ELECTRA = Family(
    model_type="electra",
    tokenizer_class="BertTokenizer",
    fields={**_FIELDS, "embedding_size": "embedding_size"},
    write_fields=lambda config: {"embedding_size": config.embedding_width},
    values={"hidden_act": "gelu_erf", "head_act": "gelu_erf", "pooler_act": "gelu_erf"},
    fixed={**_ABSOLUTE, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    classes={"ElectraForPreTraining": ModelClass((DISCRIMINATOR,)), **_classes("Electra", (), *_TWO_LAYERS)},
    prefix="electra.",
    arrays=(
        *_encoder("electra."),
        ("discriminator/dense", "discriminator_predictions.dense"),
        ("discriminator/prediction", "discriminator_predictions.dense_prediction"),
        ("pooler/dense", "sequence_summary.summary"),
        ("masked_lm/transform", "generator_predictions.dense"),
        ("masked_lm/norm", "generator_predictions.LayerNorm"),
        ("masked_lm/decoder", "generator_lm_head.weight"),
        ("masked_lm/bias", "generator_lm_head.bias"),
    ),
)
