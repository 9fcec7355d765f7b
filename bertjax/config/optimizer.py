"""Config of the optimizer."""

import dataclasses
import math

from bertjax.errors import UsageError, at_least, one_of

NAMES = ("bert_adam", "adamw", "lamb")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and its hyperparameters.

    Attributes:
      name: optimizer: `bert_adam`, `adamw` or `lamb`.
      learning_rate: rate at which linear warm-up ends. The rate of a later step s is `learning_rate * (1 - s / steps)`,
        as in google-research/bert.
      warmup_steps: number of steps of linear warm-up. In fine-tuning, -1 means a tenth of all steps.
      weight_decay: decoupled weight decay, which does not apply to LayerNorm parameters and biases.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: constant added to the denominator of the update.
      clip_norm: maximum global norm of the gradient of trained parameters (0: no clipping).
      layer_decay: factor that multiplies the learning rate once per layer below the output layer (1: no decay).
      freeze_layers: number of lowest encoder layers that are not trained (default: 0).
      freeze: paths of parameters or modules that are not trained, such as `encoder/embeddings`.
      head_steps: number of first steps that train only the parameters outside the encoder (default: 0), so that the
        gradients of a random head do not change a trained encoder (arXiv 2202.10054). The other steps have a warm-up
        of their own.
      head_learning_rate: learning rate of these steps after a warm-up over a tenth of them. It decays linearly to 0.
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
    head_steps: int = 0
    head_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        # Convert to a tuple, because configs from JSON contain a list.
        object.__setattr__(self, "freeze", tuple(self.freeze))
        one_of(self, "config.optimizer.", name=NAMES)
        for field in ("learning_rate", "weight_decay", "clip_norm", "head_learning_rate"):
            if not 0 <= getattr(self, field) < math.inf:
                raise UsageError(f"config.optimizer.{field} is {getattr(self, field)}; it must be at least 0")
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise UsageError(f"config.optimizer.{field} is {getattr(self, field)}; it must be in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise UsageError(f"config.optimizer.eps is {self.eps}; it must be above 0")
        if not 0 < self.layer_decay <= 1:
            raise UsageError(f"config.optimizer.layer_decay is {self.layer_decay}; it must be in (0, 1]")
        at_least(self, "config.optimizer.", freeze_layers=0, head_steps=0)
        if not all(isinstance(name, str) and name for name in self.freeze):
            raise UsageError(f"config.optimizer.freeze is {self.freeze}; use paths such as 'encoder/embeddings'")
        if "encoder/layers" in self.freeze:
            raise UsageError(
                "config.optimizer.freeze cannot contain encoder/layers; set config.optimizer.freeze_layers, or freeze "
                "encoder"
            )
        if "encoder" in self.freeze and self.head_steps:
            raise UsageError(
                f"config.optimizer.freeze contains encoder and head_steps is {self.head_steps}; set "
                "config.optimizer.head_steps=0, or freeze other parameters"
            )
        if "encoder" in self.freeze and self.freeze_layers:
            raise UsageError(
                f"config.optimizer.freeze contains encoder and freeze_layers is {self.freeze_layers}; set one of them"
            )
