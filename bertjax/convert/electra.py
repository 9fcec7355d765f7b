"""ELECTRA in Hugging Face transformers: narrower embeddings, and a GELU before sequence-level output layers."""

from bertjax.convert.bert import ABSOLUTE, BERT_FIELDS, TWO_LAYERS, bert_classes, bert_encoder
from bertjax.convert.family import DISCRIMINATOR, Family, ModelClass

ELECTRA = Family(
    model_type="electra",
    tokenizer_class="BertTokenizer",
    fields={**BERT_FIELDS, "embedding_size": "embedding_size"},
    write_fields=lambda config: {"embedding_size": config.embedding_width},
    values={"embedding_size": 128, "hidden_act": "gelu_erf", "head_act": "gelu_erf", "pooler_act": "gelu_erf"},
    fixed={**ABSOLUTE, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    classes={"ElectraForPreTraining": ModelClass((DISCRIMINATOR,)), **bert_classes("Electra", (), *TWO_LAYERS)},
    prefix="electra.",
    arrays=(
        *bert_encoder("electra."),
        ("discriminator/dense", "discriminator_predictions.dense"),
        ("discriminator/prediction", "discriminator_predictions.dense_prediction"),
        ("pooler/dense", "sequence_summary.summary"),
        ("masked_lm/transform", "generator_predictions.dense"),
        ("masked_lm/norm", "generator_predictions.LayerNorm"),
        ("masked_lm/decoder", "generator_lm_head.weight"),
        ("masked_lm/bias", "generator_lm_head.bias"),
    ),
)
