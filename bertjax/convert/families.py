"""Supported model families of transformers, keyed by `model_type`."""

from bertjax.convert.bert import BERT, ERNIE
from bertjax.convert.distilbert import DISTILBERT
from bertjax.convert.electra import ELECTRA
from bertjax.convert.eurobert import EUROBERT
from bertjax.convert.family import Family
from bertjax.convert.modernbert import MODERNBERT
from bertjax.convert.neobert import NEOBERT
from bertjax.convert.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (BERT, ERNIE, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, MODERNBERT, EUROBERT, NEOBERT)
}
