"""Tests that a model can be rebuilt from its JSON description."""

import json

import pytest

from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.feature_head import FeatureHead
from bertjax.model.models import (
    EncoderModel,
    LanguageModel,
    PretrainingModel,
    ReplacedTokenModel,
    SequenceModel,
    TokenModel,
    build_model,
    model_description,
)

CONFIG = ModelConfig(hidden_size=8, num_attention_heads=2)
BILSTM = FeatureHead(features="last", lstm_layers=2, lstm_size=4)


@pytest.mark.parametrize(
    ("model", "kind", "num_outputs"),
    [
        (EncoderModel(CONFIG), "encoder", None),
        (PretrainingModel(CONFIG), "pretraining", None),
        (ReplacedTokenModel(CONFIG, 0.5), "replaced_tokens", None),
        (LanguageModel(CONFIG), "language_model", None),
        (SequenceModel(CONFIG, 3), "sequence", 3),
        (SequenceModel(CONFIG, 1, BILSTM), "sequence", 1),
        (TokenModel(CONFIG, 2, head_dropout=False), "tokens", 2),
        (TokenModel(CONFIG, 9, head_dropout=True, feature_head=BILSTM), "tokens", 9),
    ],
)
def test_build_model_inverts_model_description(model, kind, num_outputs):
    description = json.loads(json.dumps(model_description(model)))
    assert description["kind"] == kind
    assert description["num_outputs"] == num_outputs
    assert build_model(description, CONFIG) == model


def test_unknown_kind_of_model_is_refused():
    with pytest.raises(UsageError, match="unknown kind of model: 'pairs'; use one of encoder, pretraining"):
        build_model({"kind": "pairs"}, CONFIG)
