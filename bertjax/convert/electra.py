"""ELECTRA as in transformers: narrower embeddings, and a GELU before output layers for sequences."""

from bertjax.convert.bert import BERT_FIELDS, OLD_NAMES, bert_encoder
from bertjax.convert.family import CLASSIFIER, DISCRIMINATOR, MASKED_LM, POOLER, Family, ModelClass
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

_DENSE = "classifier.dense"

ELECTRA = Family(
    model_type="electra",
    tokenizer_class="BertTokenizer",
    fields={**BERT_FIELDS, "embedding_size": "embedding_size"},
    write_fields=lambda config: {"embedding_size": config.embedding_width},
    values={"hidden_act": "gelu_erf", "head_act": "gelu_erf", "pooler_act": "gelu_erf"},
    fixed={
        "position_embedding_type": "absolute",
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    },
    classes={
        "ElectraForPreTraining": ModelClass((DISCRIMINATOR,)),
        "ElectraForMaskedLM": ModelClass((MASKED_LM,)),
        "ElectraModel": ModelClass(()),
        "ElectraForQuestionAnswering": ModelClass((CLASSIFIER,), (SPANS,), "qa_outputs"),
        "ElectraForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
        "ElectraForMultipleChoice": ModelClass((POOLER, CLASSIFIER), (CHOICES,)),
        "ElectraForSequenceClassification": ModelClass(
            (POOLER, CLASSIFIER), (CLASSES, MULTILABEL), "classifier.out_proj", pooler=_DENSE
        ),
    },
    base_class="ElectraModel",
    prefix="electra.",
    arrays=(
        *bert_encoder("electra"),
        ("discriminator/dense", "discriminator_predictions.dense"),
        ("discriminator/prediction", "discriminator_predictions.dense_prediction"),
        ("pooler/dense", "sequence_summary.summary"),
        ("masked_lm/transform", "generator_predictions.dense"),
        ("masked_lm/norm", "generator_predictions.LayerNorm"),
        ("masked_lm/decoder", "generator_lm_head.weight"),
        ("masked_lm/bias", "generator_lm_head.bias"),
    ),
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    ignored=("electra.embeddings.position_ids", "electra.embeddings.token_type_ids"),
    old_names=OLD_NAMES,
)
