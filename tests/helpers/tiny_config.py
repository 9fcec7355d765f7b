"""The config of a small model."""

from bertjax.model.config import ModelConfig

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def tiny_config(vocab_size: int = 20, dropout: float = 0.1, **fields) -> ModelConfig:
    """Returns the config of a float32 model of `SIZES`; `fields` replace sizes or set other fields."""
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ModelConfig(vocab_size=vocab_size, **{**SIZES, **rates, "dtype": "float32", **fields})
