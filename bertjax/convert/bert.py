"""BERT as in transformers, see `Family`."""

from bertjax.convert.family import (
    CLASSIFIER,
    ENCODER,
    MASKED_LM,
    NEXT_SENTENCE,
    POOLER,
    REQUIRED,
    Family,
    ModelClass,
)
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
# `ModelConfig` has the field names of BertConfig and of google-research/bert.
BERT_FIELDS = {
    name: name
    for name in (
        *REQUIRED,
        *("hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "tie_word_embeddings"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
    )
}


def bert_encoder(prefix: str) -> tuple[tuple[str, ...], ...]:
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
    return tuple((f"{ENCODER}/{path}", f"{prefix}.{name}") for path, name in names.items())


BERT = Family(
    model_type="bert",
    tokenizer_class="BertTokenizer",
    fields=BERT_FIELDS,
    values={"hidden_act": "gelu_erf"},
    fixed={"position_embedding_type": "absolute"},
    classes={
        "BertForPreTraining": ModelClass((POOLER, MASKED_LM, NEXT_SENTENCE)),
        "BertForMaskedLM": ModelClass((MASKED_LM,)),
        "BertForNextSentencePrediction": ModelClass((POOLER, NEXT_SENTENCE)),
        "BertModel": ModelClass((POOLER,)),
        "BertForQuestionAnswering": ModelClass((CLASSIFIER,), (SPANS,), "qa_outputs"),
        "BertForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
        "BertForMultipleChoice": ModelClass((POOLER, CLASSIFIER), (CHOICES,)),
        "BertForSequenceClassification": ModelClass((POOLER, CLASSIFIER), (CLASSES, MULTILABEL)),
    },
    base_class="BertModel",
    prefix="bert.",
    arrays=(
        *bert_encoder("bert"),
        ("pooler/dense", "bert.pooler.dense"),
        ("masked_lm/transform", "cls.predictions.transform.dense"),
        ("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        ("masked_lm/decoder", "cls.predictions.decoder.weight"),
        ("masked_lm/bias", "cls.predictions.bias"),
        ("next_sentence/dense", "cls.seq_relationship"),
    ),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    old_names=OLD_NAMES,
)
