"""BERT as in transformers, see `Family`."""

from bertjax.convert.family import CLASSIFIER, MASKED_LM, NEXT_SENTENCE, POOLER, Family, ModelClass
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# `ModelConfig` uses the names of BertConfig, which google-research/bert uses as well.
_FIELDS = (
    *_REQUIRED,
    *("max_position_embeddings", "type_vocab_size", "layer_norm_eps"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
)
_LAYER = "bert.encoder.layer.{layer}"

BERT = Family(
    model_type="bert",
    fields={name: name for name in _FIELDS},
    required=_REQUIRED,
    # `gelu` is the exact erf form, unlike in google-research/bert.
    activations={"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"},
    fixed={"position_embedding_type": "absolute"},
    refused=("is_decoder", "add_cross_attention", "quantization_config"),
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
        ("encoder/embeddings/token", "bert.embeddings.word_embeddings.weight", "V D"),
        ("encoder/embeddings/position", "bert.embeddings.position_embeddings.weight", "P D"),
        ("encoder/embeddings/segment", "bert.embeddings.token_type_embeddings.weight", "S D"),
        ("encoder/embeddings/norm", "bert.embeddings.LayerNorm", "D"),
        ("encoder/layers/attention/query", f"{_LAYER}.attention.self.query", "D -> H K"),
        ("encoder/layers/attention/key", f"{_LAYER}.attention.self.key", "D -> H K"),
        ("encoder/layers/attention/value", f"{_LAYER}.attention.self.value", "D -> H K"),
        ("encoder/layers/attention/output", f"{_LAYER}.attention.output.dense", "H K -> D"),
        ("encoder/layers/attention_norm", f"{_LAYER}.attention.output.LayerNorm", "D"),
        ("encoder/layers/mlp_in", f"{_LAYER}.intermediate.dense", "D -> M"),
        ("encoder/layers/mlp_out", f"{_LAYER}.output.dense", "M -> D"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.output.LayerNorm", "D"),
        ("pooler/dense", "bert.pooler.dense", "D -> D"),
        ("masked_lm/transform", "cls.predictions.transform.dense", "D -> D"),
        ("masked_lm/norm", "cls.predictions.transform.LayerNorm", "D"),
        ("masked_lm/bias", "cls.predictions.bias", "V"),
        ("next_sentence/dense", "cls.seq_relationship", "D -> 2"),
    ),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    old_names={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
)
