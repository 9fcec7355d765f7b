"""Config fields that all tasks have in common."""

import dataclasses
from typing import Any, ClassVar

from bertjax.config.fields import limited
from bertjax.config.mesh import ClusterConfig, MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError, at_least
from bertjax.model.attention.dispatch import check_attention
from bertjax.model.config import AUTO, AUTO_LONG_RUN, LONG_RUN_STEPS, ModelConfig

# Fields of `config.data` that contain paths. Comparisons of configs ignore them, because data may be moved.
DATA_PATHS = ("corpus", "replay_corpus", "path", "vocabulary", "labels")
# Fields of `config.data` that contain file names, relative to `data.path` if it is set.
DATA_FILES = ("train_file", "dev_file", "test_file", "eval_file")
PATH_FIELDS = tuple(f"data.{name}" for name in (*DATA_PATHS, *DATA_FILES))
_MAX_TOKENS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Config of a run. Each task adds fields, including the section `data`.

    Attributes:
      task: name of the task, a module of `bertjax.tasks`. The experiment sets it; it cannot be overridden.
      seed: random seed for initialization, dropout, data order and masks.
      steps: number of optimizer steps.
      log_every: number of steps between logs of training metrics.
      eval_every: number of steps between evaluations.
      checkpoint_every: number of steps between checkpoints.
      keep_checkpoints: number of newest checkpoints to keep. Fine-tuning also keeps the best checkpoint.
      grad_accum_steps: number of micro-batches per optimizer step.
      hang_seconds: maximum seconds until the next step, evaluation batch or checkpoint finishes, including compilation
        (0: no limit). After this time, the process exits with code 43, so that the launcher restarts the job.
      divergence_factor: maximum ratio of a logged loss to the first logged loss. A run that exceeds it fails.
      model: fields of `ModelConfig`. If `vocab_size` is 0, the run uses the size of the data's vocabulary.
      optimizer: fields of `OptimizerConfig`.
      mesh: fields of `MeshConfig`.
      cluster: fields of `ClusterConfig`.
    """

    # Names of the integer fields whose minimum is 0 instead of 1. Subclasses may override it.
    zero_allowed: ClassVar[tuple[str, ...]] = ()
    # Minimum of `optimizer.warmup_steps`. Subclasses may override it.
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
        minimums = {name: 0 if name in self.zero_allowed else 1 for name in counts}
        at_least(self, "config.", **minimums, seed=0, hang_seconds=0)
        if not self.divergence_factor > 0:
            raise UsageError(f"config.divergence_factor is {self.divergence_factor}; it must be above 0")
        at_least(self.optimizer, "config.optimizer.", warmup_steps=self.least_warmup)

    @property
    def data(self) -> Any:
        """Config section for data and batches. Each task defines the fields of this section."""
        raise NotImplementedError

    @property
    def has_data(self) -> bool:
        """True if data is configured."""
        raise NotImplementedError

    @property
    def patience(self) -> int:
        """Number of evaluations without improvement after which the run stops (default: 0, never)."""
        return 0

    @property
    def vocab_size(self) -> int:
        """Configured vocabulary size (default: that of the released uncased models)."""
        return self.model["vocab_size"] or ModelConfig.vocab_size

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Returns the model config for a vocabulary of the given size.

        Raises a UsageError if `model.vocab_size` is set to a different size, or if a model field is unset.
        """
        config_size = self.model["vocab_size"]
        if config_size and config_size != vocab_size:
            raise UsageError(
                f"config.model.vocab_size is {config_size}, but the vocabulary has {vocab_size} pieces; leave "
                "vocab_size unset"
            )
        model = self.model | {"vocab_size": vocab_size}
        if unset := [name for name, value in model.items() if value is None]:
            raise UsageError(
                f"config.model contains unset fields: {', '.join(unset)}; set a model size, such as --config "
                "NAME:size=base, or use --init_from"
            )
        config = ModelConfig(**model)
        if config.scan_layers == AUTO and self.steps >= LONG_RUN_STEPS:
            return dataclasses.replace(config, scan_layers=AUTO_LONG_RUN)
        return config

    def check_rows(self, seq_len: int, is_packed: bool = False) -> None:
        """Raises a UsageError if the model cannot process rows of `seq_len` tokens.

        `is_packed` is True if rows contain several sequences.
        """
        model = self.model_config(self.model["vocab_size"] or 1)
        max_positions = model.max_position_embeddings
        if seq_len > max_positions:
            raise UsageError(
                f"rows of {seq_len} tokens exceed config.model.max_position_embeddings={max_positions}; reduce seq_len"
            )
        check_attention(model, seq_len, is_packed)

    def check_batch(self, batch_size: int, seq_len: int) -> None:
        """Raises a UsageError if a batch has too many tokens or is not divisible into micro-batches."""
        if batch_size * seq_len > _MAX_TOKENS:
            raise UsageError(
                f"too many tokens per batch: {batch_size * seq_len:,}; config.data.batch_size x seq_len must be at "
                f"most {_MAX_TOKENS:,}"
            )
        if batch_size % self.grad_accum_steps:
            raise UsageError(
                f"config.data.batch_size={batch_size} is not divisible by config.grad_accum_steps="
                f"{self.grad_accum_steps}; use a multiple of {self.grad_accum_steps}"
            )
