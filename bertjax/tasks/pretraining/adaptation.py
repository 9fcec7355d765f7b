"""Continued pre-training of a checkpoint on another corpus, with replay of general text."""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Iterator

from bertjax.data.pretraining.config import Phase
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError
from bertjax.model.config import UNSET_ARCHITECTURE, ModelConfig
from bertjax.tasks.pretraining.config import PretrainingConfig, PretrainingData
from bertjax.tasks.pretraining.task import PretrainingTask
from bertjax.tasks.task import NumpyBatch
from bertjax.utils.sections import bounded

# Prefix of the metrics on the held-out text of the replayed corpus.
_GENERAL = "general"


@dataclasses.dataclass(frozen=True)
class AdaptationData(PretrainingData):
    """Corpora and batches of continued pre-training.

    Attributes:
      objective: pre-training objective (default: `none`, masked LM on rows of contiguous text). With `none`, rows have
        no padding, and the checkpoint needs no next-sentence head. Most published encoders have no such head.
      replay_corpus: folder of a general corpus with the same vocabulary (default: no corpus). Metrics on the held-out
        text of this corpus have the prefix `general_`.
      replay_share: fraction of the training batches that come from `replay_corpus`.
    """

    objective: str = "none"
    replay_corpus: str = ""
    replay_share: float = bounded(0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay_share and not self.replay_corpus:
            raise UsageError(
                f"config.data.replay_share={self.replay_share} needs a general corpus; set config.data.replay_corpus"
            )


@dataclasses.dataclass(frozen=True)
class AdaptationConfig(PretrainingConfig):
    """Config for continued pre-training.

    Attributes:
      data: see `AdaptationData`.
    """

    task: str = "adaptation"
    model: ModelConfig = UNSET_ARCHITECTURE
    data: AdaptationData = AdaptationData()


class AdaptationTask(PretrainingTask):
    """Pre-training whose batches come from two corpora.

    Replayed batches are spread evenly: among any n consecutive steps, `replay_share * n` steps are replayed, rounded up
    or down. The seed determines the first replayed step. Each corpus has its own step counter, so its batches are the
    same as in a shorter run on this corpus alone.
    """

    config: AdaptationConfig
    _general: PretrainingTask | None = None

    def __init__(self, config: AdaptationConfig, train: bool = True) -> None:
        """Opens the corpora. Training requires a corpus."""
        super().__init__(config, train)
        # Draw an offset, so that runs with different seeds replay at different steps.
        self._offset = random.Random(config.seed).random()
        data = config.data
        if not (data.corpus and data.replay_corpus):
            return
        general = PretrainingTask(
            dataclasses.replace(config, data=dataclasses.replace(data, corpus=data.replay_corpus)), train
        )
        if general.workdir_files != self.workdir_files:
            raise UsageError(
                f"the corpora {data.replay_corpus} and {data.corpus} have different vocabularies; prepare "
                f"{data.replay_corpus} with --vocab {self.corpus.vocabulary().path}"
            )
        self._general = general
        self.other_tasks[_GENERAL] = general
        self.evaluation_problem = self.evaluation_problem or general.evaluation_problem
        self.data_hash = hashlib.sha256(f"{self.data_hash} {general.data_hash}".encode()).hexdigest()
        self.notes += (f"{data.replay_share:.0%} of the batches come from {data.replay_corpus}",)

    def phase_batches(self, phase: Phase, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        if not self._general:
            yield from super().phase_batches(phase, start_step, shard)
            return
        domain = super().phase_batches(
            *_corpus_steps(phase, start_step, lambda step: step - self._num_replayed(step)), shard
        )
        general = self._general.phase_batches(*_corpus_steps(phase, start_step, self._num_replayed), shard)
        for step in range(start_step, phase.stop_step):
            yield next(general if self._num_replayed(step + 1) > self._num_replayed(step) else domain)

    def check_data_files(self, wait: bool) -> None:
        super().check_data_files(wait)
        if self._general:
            self._general.check_data_files(wait)

    def _num_replayed(self, step: int) -> int:
        """Returns the number of replayed batches before `step`."""
        return math.floor(step * self.config.data.replay_share + self._offset)


def _corpus_steps(phase: Phase, step: int, count: Callable[[int], int]) -> tuple[Phase, int]:
    """Converts `step`, and the start and stop of `phase`, from the run's step counter to the counter of one corpus.

    `count(step)` is the number of batches that come from this corpus before `step`.
    """
    return dataclasses.replace(phase, start_step=count(phase.start_step), stop_step=count(phase.stop_step)), count(step)
