"""Settings that every run has, whatever its task."""

import dataclasses
from typing import Any, ClassVar

from bertjax.config.cluster import ClusterConfig
from bertjax.config.fields import at_least, limited
from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.attention.dispatch import check
from bertjax.model.config import ModelConfig

_MOST_TOKENS = 2**31 - 1
# Of the released uncased models; taken where a config names no data, to describe or time a model.
DEFAULT_VOCAB_SIZE = 30522


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every run has; each task adds its own, `data` among them.

    Attributes:
      task: what the run is for: a file of `bertjax/tasks`; an experiment's, which none overrides.
      seed: of initial parameters, dropout, and the order and masks of the data.
      steps: updates of the whole run.
      log_every: steps between two lines of metrics.
      eval_every: steps between two evaluations.
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: so many are kept: the newest, and the newest of those saved every `checkpoint_every` steps.
      grad_accum_steps: micro-batches a step.
      hang_seconds: without a finished step, evaluation batch or checkpoint (compilation counts) after which the process
        ends, so that it can be started again; 0 never ends it.
      divergence_factor: a logged loss over this many times the first logged one stops the run.
      model: fields of `ModelConfig`, where a vocabulary of size 0 is that of the data.
      optimizer: see `OptimizerConfig`.
      mesh: see `MeshConfig`.
      cluster: see `ClusterConfig`.

    Raises:
      UsageError: no run can start with a value; names the field.
    """

    # Counts of which 0 stands for something else.
    zero_allowed: ClassVar[tuple[str, ...]] = ()
    least_warmup: ClassVar[int] = 0

    task: str = ""
    seed: int = limited(0, 2**32 - 1)
    steps: int = 1_000_000
    log_every: int = 100
    eval_every: int = 10_000
    checkpoint_every: int = 10_000
    keep_checkpoints: int = 3
    grad_accum_steps: int = limited(1, 1 << 20)
    divergence_factor: float = 3.0
    hang_seconds: int = 1800
    model: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(ModelConfig()))
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        counts = ("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "grad_accum_steps")
        least = {name: 0 if name in self.zero_allowed else 1 for name in counts}
        at_least(self, "config", **least, seed=0, hang_seconds=0)
        if not self.divergence_factor > 0:
            raise UsageError(f"config.divergence_factor is {self.divergence_factor}; it must be above 0")
        at_least(self.optimizer, "config.optimizer", warmup_steps=self.least_warmup)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model that the settings and a vocabulary give.

        Raises:
          UsageError: `model.vocab_size` is given and differs from the vocabulary's; or there is no such model.
        """
        given = self.model["vocab_size"]
        if given and given != vocab_size:
            raise UsageError(f"config.model.vocab_size is {given}, the vocabulary has {vocab_size} pieces")
        return ModelConfig(**{**self.model, "vocab_size": vocab_size})

    def check_rows(self, seq_len: int, several_sequences: bool = False) -> None:
        """Raises a UsageError if the model cannot take rows of `seq_len` tokens, of several sequences perhaps."""
        if seq_len > self.model["max_position_embeddings"]:
            raise UsageError(
                f"rows of {seq_len} tokens do not fit config.model.max_position_embeddings={self.model['max_position_embeddings']}"
            )
        check(self.model_config(self.model["vocab_size"] or 1), seq_len, several_sequences)

    def check_batch(self, batch_size: int, seq_len: int) -> None:
        """Raises a UsageError if a batch is too large to count, or does not split into micro-batches."""
        if batch_size * seq_len > _MOST_TOKENS:
            raise UsageError(
                f"{batch_size * seq_len:,} tokens a batch; config.data.batch_size x seq_len is at most {_MOST_TOKENS:,}"
            )
        if batch_size % self.grad_accum_steps:
            raise UsageError(
                f"a batch of {batch_size} rows does not split in config.grad_accum_steps={self.grad_accum_steps}"
            )
