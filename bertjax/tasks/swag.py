"""SWAG: multiple choice between four endings of a sentence (section 4.4 of the paper)."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.dataset_rows import TFDS_PREFIX, read_tfds
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row, read_table
from bertjax.data.schema import MULTI_SEQUENCE
from bertjax.model.config import ModelConfig
from bertjax.model.models import SequenceModel
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, OutputLayer
from bertjax.tasks.finetuning.rows import RowsTask
from bertjax.tasks.objectives.classification import ClassWeighting, LabelObjective
from bertjax.utils.io import write_atomic

_ENDINGS = tuple(f"ending{index}" for index in range(4))
_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


@dataclasses.dataclass(frozen=True)
class SwagConfig(FinetuningConfig):
    """Config for SWAG."""

    task: str = "swag"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reject("swag has choices, not classes", "data.class_weights")
        self.reject("examples of swag have four sequences each", "data.examples_per_row")


class SwagTask(RowsTask):
    """SWAG, read from its original files or from TFDS."""

    missing_data = "no data; set --config.data.path to the folder of SWAG's train.csv and val.csv"
    metrics = ("accuracy",)
    # The second segment consists of the second sentence and one ending.
    sequences = tuple(("sent1", "sent2", ending) for ending in _ENDINGS)
    sequences_per_example = len(_ENDINGS)
    target = Target("label", tuple("0123"))

    def make_objective(self, model: ModelConfig) -> LabelObjective:
        """Builds the objective: a linear layer scores the pooled [CLS] of each choice, with a softmax over choices."""
        weighting = ClassWeighting(smoothing=self.config.label_smoothing)
        return LabelObjective(SequenceModel(model, 1), weighting, MULTI_SEQUENCE)

    def output_layer(self) -> OutputLayer:
        return OutputLayer(CHOICES, output="swag")

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        path = self.config.data.path
        if path.startswith(TFDS_PREFIX):
            split = split.replace("dev", "validation")
            stats = ReadStats(f"{path}:{split}")
            features = {column: column for column in columns}
            return read_tfds(path.removeprefix(TFDS_PREFIX), split, features, stats, named_labels=False), stats
        file = Path(path).expanduser() / _FILES[split]
        stats = ReadStats(str(file))
        return read_table(file, columns, stats, keep_short=keep_short), stats

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the leaderboard's format: a header `pred`, then one choice per line, in file order."""
        lines = "".join(f"{choice}\n" for choice in self.predictions(self.ordered_logits(outputs)))
        return [write_atomic(folder / "predictions.csv", "pred\n" + lines)]
