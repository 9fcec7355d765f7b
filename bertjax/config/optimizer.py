"""Config of the optimizer."""

import dataclasses

from bertjax.errors import UsageError
from bertjax.utils.sections import Section, bounded

NAMES = ("bert_adam", "adamw", "stable_adamw", "lamb", "muon")
# Learning-rate schedules, with descriptions of their decay.
SCHEDULES = {
    "bert": "linear decay",
    "cosine": "cosine decay",
    "warmup_stable_decay": "constant rate and 1 - sqrt decay",
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section, prefix="config.optimizer."):
    """Optimizer and its hyperparameters.

    Attributes:
      name: optimizer, one of `bert_adam`, `adamw`, `stable_adamw` (arXiv 2304.13013, Algorithm 2), `lamb` and `muon`.
        `muon` applies Muon with momentum 0.95 and updates as large as Adam's (arXiv 2502.16982) to the kernels of
        encoder layers, and AdamW to all other parameters.
      learning_rate: peak learning rate, at which linear warm-up ends.
      schedule: learning-rate schedule after warm-up. `bert` is `learning_rate * (1 - s / steps)` at step s, as in
        google-research/bert. `cosine` is a half cosine from `learning_rate` to 0. `warmup_stable_decay` is constant,
        then `learning_rate * (1 - sqrt(f))`, where f is the completed fraction of the last `decay_steps` steps.
      warmup_steps: number of linear warm-up steps (-1: a tenth of all steps).
      decay_steps: number of decay steps of `warmup_stable_decay` (-1: a tenth of the steps after the head steps).
      weight_decay: decoupled weight decay, which does not apply to LayerNorm parameters and biases.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: constant added to the denominator of the update.
      clip_norm: maximum global norm of the gradient of trained parameters (0: no clipping).
      layer_decay: factor that multiplies the learning rate once per layer below the output layer (1: no decay).
      freeze_layers: number of lowest layers of the encoder, and of ELECTRA's generator, that are not trained (default:
        0).
      freeze: paths of parameters or modules that are not trained, such as `encoder/embeddings`.
      head_steps: number of initial steps that train only the parameters outside the encoder (default: 0), so that the
        gradients of a random head do not change a trained encoder (arXiv 2202.10054). The remaining steps have their
        own warm-up. -1 means a third of the steps if `--init_from` lacks a language-model head, else 0.
      head_learning_rate: peak learning rate of the head steps; warm-up over their first tenth, then linear decay to 0.
    """

    name: str = bounded("bert_adam", choices=NAMES)
    learning_rate: float = bounded(1e-4, at_least=0)
    schedule: str = bounded("bert", choices=SCHEDULES)
    warmup_steps: int = bounded(10_000, at_least=-1)
    decay_steps: int = bounded(-1, at_least=-1)
    weight_decay: float = bounded(0.01, at_least=0)
    b1: float = bounded(0.9, at_least=0, below=1)
    b2: float = bounded(0.999, at_least=0, below=1)
    eps: float = bounded(1e-6, above=0)
    clip_norm: float = bounded(1.0, at_least=0)
    layer_decay: float = bounded(1.0, above=0, at_most=1)
    freeze_layers: int = bounded(0, at_least=0)
    freeze: tuple[str, ...] = ()
    head_steps: int = bounded(0, at_least=-1)
    head_learning_rate: float = bounded(1e-3, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_steps >= 0 and self.schedule != "warmup_stable_decay":
            raise UsageError("config.optimizer.decay_steps needs config.optimizer.schedule=warmup_stable_decay")
        if "" in self.freeze or "encoder/layers" in self.freeze:
            problem = f"config.optimizer.freeze={self.freeze} contains an empty path or encoder/layers"
            fix = "use a path such as encoder/embeddings, or config.optimizer.freeze_layers to freeze layers"
            raise UsageError(f"{problem}; {fix}")
        if "encoder" in self.freeze and (self.head_steps or self.freeze_layers):
            raise UsageError("config.optimizer.freeze contains encoder; unset head_steps and freeze_layers")

    def warmup(self, total_steps: int) -> int:
        """Returns the number of warm-up steps of a run: `warmup_steps`, or a tenth of all steps if it is -1."""
        return total_steps // 10 if self.warmup_steps < 0 else self.warmup_steps
