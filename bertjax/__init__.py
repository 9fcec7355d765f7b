"""Pre-training and fine-tuning of BERT and newer encoders in JAX and Flax.

`load` and `load_tokenizer` load a trained model and its tokenizer. `Encoder` and `Pooler` are Flax modules for use in
your own models. The names in `__all__` are the stable public API.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertjax.api import Encoded, Pretrained, load, load_tokenizer
    from bertjax.errors import BertjaxError, UsageError
    from bertjax.model.config import Architecture, ModelConfig
    from bertjax.model.encoder import Encoder
    from bertjax.model.heads import Pooler

__all__ = [
    "Architecture",
    "BertjaxError",
    "Encoded",
    "Encoder",
    "ModelConfig",
    "Pooler",
    "Pretrained",
    "UsageError",
    "load",
    "load_tokenizer",
]
_MODULES = {
    "Architecture": "bertjax.model.config",
    "BertjaxError": "bertjax.errors",
    "Encoder": "bertjax.model.encoder",
    "ModelConfig": "bertjax.model.config",
    "Pooler": "bertjax.model.heads",
    "UsageError": "bertjax.errors",
}


def __getattr__(name: str) -> Any:
    # Import on demand, so that `bertjax --help` does not import JAX.
    if name not in __all__:
        raise AttributeError(f"module 'bertjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "bertjax.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
