"""ModernBERT in Hugging Face transformers. Ettin, mmBERT and granite-embedding have the same architecture."""

from collections.abc import Mapping
from typing import Any

from bertjax.convert.family import CLASSIFIER, MASKED_LM, POOLER, REQUIRED, TOKEN_IDS, Family, ModelClass
from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

_LAYER = "model.layers.{layer}"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETAS = {_GLOBAL: "global_rope_theta", _LOCAL: "local_rope_theta"}
_DEFAULT_THETAS = {_GLOBAL: 160_000.0, _LOCAL: 10_000.0}


def default_rope(parameters: Mapping[str, Any] | None, name: str = "rope_parameters") -> Mapping[str, Any]:
    """Returns a config's RoPE parameters ({} if unset). Raises a UsageError if they scale the positions."""
    parameters = parameters or {}
    # As in transformers, `type` is the old name of `rope_type`.
    if parameters.get("rope_type", parameters.get("type", "default")) != "default":
        raise UsageError(f"unsupported {name} {parameters}; bertjax supports only rope_type=default")
    return parameters


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the layer pattern and the thetas, in the format of transformers 4 or 5."""
    every, num_layers = config.get("global_attn_every_n_layers") or 3, config.get("num_hidden_layers") or 0
    types = config.get("layer_types")
    if types and [*types] != _layer_types(num_layers, every):
        steps = [layer for layer, kind in enumerate(types) if kind == _GLOBAL and layer]
        every = steps[0] if steps else num_layers
        if [*types] != _layer_types(num_layers, every):
            raise UsageError(
                f"layer_types={types} is not periodic; bertjax supports only {_GLOBAL} in every n-th layer"
            )
    fields: dict[str, Any] = {"global_attn_every_n_layers": every}
    if window := config.get("sliding_window"):  # transformers sets `local_attention` to twice this value.
        fields["local_attention"] = 2 * window
    if unknown := sorted({**(config.get("rope_parameters") or {})}.keys() - _THETAS.keys()):
        raise UsageError(f"rope_parameters has {listed(unknown)}; use only the keys {' and '.join(_THETAS)}")
    for kind, name in _THETAS.items():
        parameters = default_rope((config.get("rope_parameters") or {}).get(kind), f"rope_parameters of {kind}")
        # In transformers 4, a null theta of local layers means the theta of global layers.
        theta = parameters.get("rope_theta") or config.get(name, _DEFAULT_THETAS[kind]) or fields.get(_THETAS[_GLOBAL])
        fields[name] = float(theta or _DEFAULT_THETAS[kind])
    return fields


def _write_fields(config: ModelConfig) -> dict[str, Any]:
    every = config.global_attn_every_n_layers
    thetas = {kind: getattr(config, name) for kind, name in _THETAS.items()}
    return {
        "global_attn_every_n_layers": every,
        "layer_types": _layer_types(config.num_hidden_layers, every),
        **{_THETAS[kind]: theta for kind, theta in thetas.items()},
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "embedding_dropout": config.hidden_dropout_prob,
        "classifier_dropout": config.hidden_dropout_prob,
    }


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [_LOCAL if layer % every else _GLOBAL for layer in range(num_layers)]


MODERNBERT = Family(
    model_type="modernbert",
    fields={
        **{name: name for name in (*REQUIRED, "max_position_embeddings", "initializer_range", "tie_word_embeddings")},
        **{name: name for name in ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias")},
        **{name: name for name in ("local_attention", "classifier_pooling")},
        "hidden_act": "hidden_activation",
        "head_act": "classifier_activation",
        "pooler_act": "classifier_activation",
        "head_bias": "classifier_bias",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    # Defaults of fields that ModernBertConfig may omit, and fixed options of all ModernBert models.
    values={
        **dict.fromkeys(("norm_first", "gated_mlp", "pooler_norm", "token_pooler"), True),
        **dict.fromkeys(("first_attention_norm", "norm_bias", "attention_bias", "mlp_bias", "head_bias"), False),
        **dict.fromkeys(("hidden_act", "head_act", "pooler_act"), "gelu_erf"),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        "type_vocab_size": 0,
        "position_embedding_type": "rotary",
        "local_attention": 128,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    refused=(*Family.refused, "rope_scaling"),
    read_fields=_read_fields,
    write_fields=_write_fields,
    token_ids=TOKEN_IDS,
    classes={
        "ModernBertForMaskedLM": ModelClass((MASKED_LM,)),
        "ModernBertModel": ModelClass(()),
        "ModernBertForQuestionAnswering": ModelClass((POOLER, CLASSIFIER), (SPANS,)),
        "ModernBertForTokenClassification": ModelClass((POOLER, CLASSIFIER), (TAGS,)),
        "ModernBertForMultipleChoice": ModelClass((POOLER, CLASSIFIER), (CHOICES,)),
        "ModernBertForSequenceClassification": ModelClass((POOLER, CLASSIFIER), (CLASSES, MULTILABEL)),
    },
    prefix="model.",
    arrays=(
        ("encoder/embeddings/token", "model.embeddings.tok_embeddings.weight"),
        ("encoder/embeddings/norm", "model.embeddings.norm"),
        ("encoder/layers/attention_norm", f"{_LAYER}.attn_norm"),
        ("encoder/layers/attention/query", f"{_LAYER}.attn.Wqkv", "0/3"),
        ("encoder/layers/attention/key", f"{_LAYER}.attn.Wqkv", "1/3"),
        ("encoder/layers/attention/value", f"{_LAYER}.attn.Wqkv", "2/3"),
        ("encoder/layers/attention/output", f"{_LAYER}.attn.Wo"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.mlp_norm"),
        ("encoder/layers/mlp_in", f"{_LAYER}.mlp.Wi", "0/2"),
        ("encoder/layers/mlp_gate", f"{_LAYER}.mlp.Wi", "1/2"),
        ("encoder/layers/mlp_out", f"{_LAYER}.mlp.Wo"),
        ("encoder/final_norm", "model.final_norm"),
        ("masked_lm/transform", "head.dense"),
        ("masked_lm/norm", "head.norm"),
        ("masked_lm/decoder", "decoder.weight"),
        ("masked_lm/bias", "decoder.bias"),
        ("pooler/dense", "head.dense"),
        ("pooler/norm", "head.norm"),
    ),
)
