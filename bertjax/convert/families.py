"""Families of models in transformers by `model_type`."""

from bertjax.convert.bert import BERT, CAMEMBERT, DISTILBERT, ELECTRA, ERNIE, ROBERTA, XLM_ROBERTA
from bertjax.convert.family import Family
from bertjax.convert.llama import EUROBERT, NEOBERT
from bertjax.convert.modernbert import MODERNBERT

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ERNIE, MODERNBERT, EUROBERT, NEOBERT)
}
