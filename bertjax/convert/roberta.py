"""RoBERTa, XLM-R and CamemBERT as in transformers. They differ in their vocabularies, not in their networks."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.bert import BERT_FIELDS, OLD_NAMES, bert_encoder
from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, Family, ModelClass
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    # Position ids start at `pad_token_id` + 1.
    pad_id = config.get("pad_token_id")
    return {"position_offset": (1 if pad_id is None else pad_id) + 1}


def _write_fields(config: ModelConfig) -> dict[str, Any]:
    return {"pad_token_id": config.position_offset - 1}


def _family(model_type: str, prefix: str) -> Family:
    return Family(
        model_type=model_type,
        tokenizer_class=f"{prefix}Tokenizer",
        fields=BERT_FIELDS,
        values={"hidden_act": "gelu_erf", "head_act": "gelu_erf"},
        read_fields=_read_fields,
        write_fields=_write_fields,
        fixed={"position_embedding_type": "absolute"},
        token_ids={"bos_token_id": "cls", "eos_token_id": "sep"},
        classes={
            f"{prefix}ForMaskedLM": ModelClass((MASKED_LM,)),
            f"{prefix}Model": ModelClass((POOLER,)),
            f"{prefix}ForQuestionAnswering": ModelClass((CLASSIFIER,), (SPANS,), "qa_outputs"),
            f"{prefix}ForTokenClassification": ModelClass((CLASSIFIER,), (TAGS,)),
            f"{prefix}ForMultipleChoice": ModelClass((POOLER, CLASSIFIER), (CHOICES,)),
            f"{prefix}ForSequenceClassification": ModelClass(
                (POOLER, CLASSIFIER), (CLASSES, MULTILABEL), "classifier.out_proj", pooler="classifier.dense"
            ),
        },
        base_class=f"{prefix}Model",
        prefix="roberta.",
        arrays=(
            *bert_encoder("roberta"),
            ("pooler/dense", "roberta.pooler.dense"),
            ("masked_lm/transform", "lm_head.dense"),
            ("masked_lm/norm", "lm_head.layer_norm"),
            ("masked_lm/decoder", "lm_head.decoder.weight"),
            ("masked_lm/bias", "lm_head.bias"),
        ),
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids"),
        old_names=OLD_NAMES,
    )


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
CAMEMBERT = _family("camembert", "Camembert")
