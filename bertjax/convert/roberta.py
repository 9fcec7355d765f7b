"""RoBERTa, XLM-R and CamemBERT in Hugging Face transformers."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.bert import ABSOLUTE, BERT_FIELDS, TWO_LAYERS, bert_classes, bert_encoder
from bertjax.convert.family import POOLER, Family


def _position_offset(config: Mapping[str, Any]) -> dict[str, Any]:
    # Position ids start at `pad_token_id` + 1.
    pad_id = config.get("pad_token_id")
    return {"position_offset": (1 if pad_id is None else pad_id) + 1}


def _roberta(model_type: str, name: str) -> Family:
    return Family(
        model_type=model_type,
        tokenizer_class=f"{name}Tokenizer",
        fields=BERT_FIELDS,
        values={"hidden_act": "gelu_erf", "head_act": "gelu_erf"},
        read_fields=_position_offset,
        write_fields=lambda config: {"pad_token_id": config.position_offset - 1},
        fixed=ABSOLUTE,
        token_ids={"bos_token_id": "cls", "eos_token_id": "sep"},
        classes=bert_classes(name, (POOLER,), *TWO_LAYERS),
        prefix="roberta.",
        arrays=(
            *bert_encoder("roberta."),
            ("pooler/dense", "roberta.pooler.dense"),
            ("masked_lm/transform", "lm_head.dense"),
            ("masked_lm/norm", "lm_head.layer_norm"),
            ("masked_lm/decoder", "lm_head.decoder.weight"),
            ("masked_lm/bias", "lm_head.bias"),
        ),
    )


# These families have different tokenizers but the same architecture.
ROBERTA = _roberta("roberta", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "Camembert")
