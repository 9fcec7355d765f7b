"""Which optimizer, and its hyper-parameters."""

import dataclasses
import math

from bertjax.errors import UsageError

NAMES = ("bert_adam", "adamw", "lamb")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its hyper-parameters.

    Attributes:
      name: `bert_adam`, `adamw` or `lamb`.
      learning_rate: the peak, reached at the end of warm-up.
      warmup_steps: updates of linear warm-up; -1 leaves it to the task.
      weight_decay: decoupled; not applied to LayerNorm and biases.
      b1, b2, eps: of the moments.
      clip_norm: global norm that the gradient of the trained parameters is clipped to; 0 does not clip.
      layer_decay: what rates are multiplied by for each step down from the output layer: once in the highest layer,
        once more in each below it; see `scale_by_layer`.
      freeze_layers: so many of the lowest layers are not trained.
      freeze: paths of parameters that are not trained, or of modules with all that is in them: `encoder/embeddings`.
    """

    name: str = "bert_adam"
    learning_rate: float = 1e-4
    warmup_steps: int = 10_000
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    clip_norm: float = 1.0
    layer_decay: float = 1.0
    freeze_layers: int = 0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists alone.
        object.__setattr__(self, "freeze", tuple(self.freeze))
        if self.name not in NAMES:
            raise UsageError(f"optimizer.name is {self.name!r}; known: {', '.join(NAMES)}")
        for field in ("learning_rate", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, field) < math.inf:
                raise UsageError(f"optimizer.{field} is {getattr(self, field)}; it must be a number of at least 0")
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise UsageError(f"optimizer.{field} is {getattr(self, field)}; it must be in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise UsageError(f"optimizer.eps is {self.eps}; it must be above 0")
        if not 0 < self.layer_decay <= 1:
            raise UsageError(f"optimizer.layer_decay is {self.layer_decay}; it must be above 0 and at most 1 (off)")
        if self.freeze_layers < 0:
            raise UsageError(f"optimizer.freeze_layers is {self.freeze_layers}; it must be at least 0")
        if not all(isinstance(name, str) and name for name in self.freeze):
            raise UsageError(f"optimizer.freeze is {self.freeze}; it must be names, such as 'encoder/embeddings'")
        if "encoder/layers" in self.freeze:
            raise UsageError("optimizer.freeze has all layers; say how many: optimizer.freeze_layers, or give encoder")
        if "encoder" in self.freeze and self.freeze_layers:
            raise UsageError(
                f"optimizer.freeze has the whole encoder, and freeze_layers={self.freeze_layers} some of its layers; "
                "leave one of them out"
            )
