"""Config fields shared by all tasks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bertjax.config.mesh import ClusterConfig, MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError, listed
from bertjax.model.attention.dispatch import check_attention
from bertjax.model.config import AUTO, LONG_RUN_STEPS, ModelConfig
from bertjax.utils.io import AnyPath
from bertjax.utils.sections import Section, bounded

# Fields of `config.data` that contain paths. Comparisons of configs ignore them, because data may be moved.
DATA_PATHS = ("corpus", "replay_corpus", "path", "vocabulary", "labels", "retrieval", "guide")
# Fields of `config.data` that contain file names, relative to `data.path` if it is set.
DATA_FILES = ("train_file", "dev_file", "test_file", "eval_file")
PATH_FIELDS = tuple(f"data.{name}" for name in (*DATA_PATHS, *DATA_FILES))


def set_paths(data: Any, names: Sequence[str]) -> dict[str, str]:
    """Returns the values of those fields in `names` that are set in the section `data`.

    A field with its default, such as `eng.train` in NER, counts as unset: it names a file of the folder `data.path`.
    """
    paths = {name: getattr(data, name, "") for name in names}
    return {name: path for name, path in paths.items() if path not in ("", getattr(type(data), name, ""))}


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
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
      divergence_factor: maximum ratio of a logged loss to the first logged loss, or to 0.1 if that is larger. A run
        that exceeds it fails.
      model: fields of `ModelConfig`. Unset fields come from the `--init_from` checkpoint. An unset `vocab_size` is the
        size of the data's vocabulary.
      optimizer: fields of `OptimizerConfig`.
      mesh: fields of `MeshConfig`.
      cluster: fields of `ClusterConfig`.
    """

    task: str = ""
    seed: int = bounded(0, at_least=0, at_most=2**32 - 1)
    steps: int = bounded(1_000_000, at_least=1)
    log_every: int = bounded(100, at_least=1)
    eval_every: int = bounded(10_000, at_least=1)
    checkpoint_every: int = bounded(1_000, at_least=1)
    keep_checkpoints: int = bounded(3, at_least=1)
    grad_accum_steps: int = bounded(1, at_least=1, at_most=1 << 20)
    divergence_factor: float = bounded(3.0, above=0)
    hang_seconds: int = bounded(1800, at_least=0)
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def data(self) -> Any:
        """Config section for data and batches. Each task defines the fields of this section."""
        raise NotImplementedError

    @property
    def has_data(self) -> bool:
        """True if data is configured."""
        return self.data.has_files

    @property
    def patience(self) -> int:
        """Number of evaluations without improvement after which the run stops (default: 0, never)."""
        return 0

    @property
    def vocab_size(self) -> int:
        """Configured vocabulary size (default: the size of BERT's uncased vocabulary)."""
        return self.model.vocab_size or ModelConfig.vocab_size

    @property
    def has_model(self) -> bool:
        """True if all fields of the model are set, except perhaps `vocab_size`, which the data's vocabulary sets."""
        return not {*self.model.unset} - {"vocab_size"}

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Returns the model config for a vocabulary of the given size.

        Raises a UsageError if `model.vocab_size` is set to a different size, or if another model field is unset.
        """
        if self.model.vocab_size not in (None, vocab_size):
            raise UsageError(
                f"config.model.vocab_size={self.model.vocab_size}, but the vocabulary has {vocab_size}; unset it"
            )
        model = dataclasses.replace(self.model, vocab_size=vocab_size)
        if model.unset:
            fix = "use --init_from CKPT or --config NAME:size=base"
            raise UsageError(f"no initial checkpoint; {fix} (unset fields of config.model: {listed(model.unset, 3)})")
        multiple, default = model.pad_vocab_to_multiple_of, ModelConfig.pad_vocab_to_multiple_of
        if default < multiple < vocab_size < 2 * multiple:
            # The multiple is the row count of a published token table. Do not double the table for a few added pieces.
            model = dataclasses.replace(model, pad_vocab_to_multiple_of=default)
        if model.scan_layers == AUTO and self.steps >= LONG_RUN_STEPS:
            return dataclasses.replace(model, scan_layers="false")
        return model

    def with_checkpoint(self, workdir: AnyPath) -> "RunConfig":
        """Returns the config with settings from the initial checkpoint's workdir (none in this base class)."""
        return self

    def check_rows(self, seq_len: int, is_packed: bool) -> None:
        """Raises a UsageError if the model cannot process rows of `seq_len` tokens.

        `is_packed` is True if rows contain several sequences.
        """
        model = self.model_config(self.model.vocab_size or 1)
        if seq_len > model.max_row_tokens:
            raise UsageError(
                f"rows of {seq_len} tokens exceed the {model.max_row_tokens} tokens of "
                f"config.model.max_position_embeddings={model.max_position_embeddings}; reduce seq_len"
            )
        check_attention(model, seq_len, is_packed)

    def check_micro_batches(self, batch_size: int) -> None:
        """Raises a UsageError if a batch is not divisible into micro-batches."""
        if batch_size % self.grad_accum_steps:
            raise UsageError(
                f"batch_size={batch_size} is not divisible by grad_accum_steps={self.grad_accum_steps}; change one"
            )
