"""BERT and ERNIE in Hugging Face transformers, and definitions that other families share."""

from typing import Any

from bertjax.convert.family import CLASSIFIER, ENCODER, MASKED_LM, NEXT_SENTENCE, POOLER, REQUIRED, Family, ModelClass
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

# `ModelConfig` uses the field names of BertConfig and of google-research/bert.
BERT_FIELDS = {
    name: name
    for name in (
        *REQUIRED,
        *("hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "tie_word_embeddings"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
    )
}
ABSOLUTE = {"position_embedding_type": "absolute"}
# Output layer and pooler of RobertaForSequenceClassification and ElectraForSequenceClassification.
TWO_LAYERS = ("classifier.out_proj", "classifier.dense")


def bert_encoder(prefix: str) -> tuple[tuple[str, str], ...]:
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


def bert_classes(
    name: str, base: tuple[str, ...], output_layer: str = "classifier", pooler: str = ""
) -> dict[str, ModelClass]:
    """Returns the model classes of BERT-like families. `output_layer` and `pooler` are for sequence classification."""
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
        fields=BERT_FIELDS,
        values={"hidden_act": "gelu_erf"},
        fixed=ABSOLUTE,
        classes={
            f"{name}ForPreTraining": ModelClass((POOLER, MASKED_LM, NEXT_SENTENCE)),
            f"{name}ForNextSentencePrediction": ModelClass((POOLER, NEXT_SENTENCE)),
            **bert_classes(name, (POOLER,)),
        },
        prefix=prefix,
        arrays=(
            *bert_encoder(prefix),
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
# ERNIE's architecture equals BERT's (arXiv 1904.09223), except for task embeddings if `use_task_id` is true. By
# default, all tokens have task 0, so an import adds the embedding of task 0 to all position embeddings.
ERNIE = _bert(
    "ernie",
    "Ernie",
    added_rows={
        "ernie.embeddings.position_embeddings.weight": ("use_task_id", "ernie.embeddings.task_type_embeddings.weight")
    },
)
