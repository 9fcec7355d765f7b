"""DistilBERT in Hugging Face transformers: no segment embeddings, and a ReLU before sequence-level output layers."""

from bertjax.convert.bert import bert_classes
from bertjax.convert.family import Family

_EMBEDDINGS, _LAYER = "distilbert.embeddings", "distilbert.transformer.layer.{layer}"
DISTILBERT = Family(
    model_type="distilbert",
    tokenizer_class="BertTokenizer",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    values={"hidden_act": "gelu_erf", "type_vocab_size": 0, "layer_norm_eps": 1e-12, "pooler_act": "relu"},
    classes=bert_classes("DistilBert", ()),
    write_fields=lambda config: dict.fromkeys(("seq_classif_dropout", "qa_dropout"), config.hidden_dropout_prob),
    prefix="distilbert.",
    arrays=(
        ("encoder/embeddings/token", f"{_EMBEDDINGS}.word_embeddings.weight"),
        ("encoder/embeddings/position", f"{_EMBEDDINGS}.position_embeddings.weight"),
        ("encoder/embeddings/norm", f"{_EMBEDDINGS}.LayerNorm"),
        ("encoder/layers/attention/query", f"{_LAYER}.attention.q_lin"),
        ("encoder/layers/attention/key", f"{_LAYER}.attention.k_lin"),
        ("encoder/layers/attention/value", f"{_LAYER}.attention.v_lin"),
        ("encoder/layers/attention/output", f"{_LAYER}.attention.out_lin"),
        ("encoder/layers/attention_norm", f"{_LAYER}.sa_layer_norm"),
        ("encoder/layers/mlp_in", f"{_LAYER}.ffn.lin1"),
        ("encoder/layers/mlp_out", f"{_LAYER}.ffn.lin2"),
        ("encoder/layers/mlp_norm", f"{_LAYER}.output_layer_norm"),
        ("pooler/dense", "pre_classifier"),
        ("masked_lm/transform", "vocab_transform"),
        ("masked_lm/norm", "vocab_layer_norm"),
        ("masked_lm/decoder", "vocab_projector.weight"),
        ("masked_lm/bias", "vocab_projector.bias"),
    ),
)
