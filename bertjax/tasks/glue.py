"""The nine GLUE tasks and the diagnostic set (section 4.1 of the paper), from GLUE's original files or from TFDS."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.examples import Examples, known_labels
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError
from bertjax.metrics.classification import cross_entropy
from bertjax.metrics.metric import Metric
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.glue_data import DIAGNOSTIC, INDEX, SCORE_RANGE, SPECS, has_diagnostic, read_rows
from bertjax.tasks.finetuning.output_layer import CLASSES, OutputLayer
from bertjax.tasks.finetuning.rows import RowsTask
from bertjax.tasks.objectives.classification import Classification, Regression, sequence_objective
from bertjax.utils.io import write_atomic
from bertjax.utils.sections import bounded

# Suffix of the diagnostic set's metrics.
_AX_SUFFIX = "_ax"
# Losses that a task with several evaluation sets also reports for each set separately.
_LOSSES = ("cross_entropy", "loss")


@dataclasses.dataclass(frozen=True)
class GlueData(FinetuningData):
    """Data and batches of a GLUE task.

    Attributes:
      task: GLUE task: `cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte`, `wnli` or `ax`.
    """

    task: str = bounded("mrpc", choices=tuple(SPECS))


@dataclasses.dataclass(frozen=True)
class GlueConfig(FinetuningConfig):
    """Config of a GLUE task."""

    task: str = "glue"
    data: GlueData = GlueData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not SPECS[self.data.task].labels:
            reason = f"the labels of {self.data.task} are numbers, not classes"
            self.reject(reason, "label_smoothing", "data.class_weights")


class GlueTask(RowsTask):
    """One GLUE task. MNLI has two dev sets and two test sets. `ax` is predicted along with the test sets of MNLI."""

    config: GlueConfig

    def __init__(self, config: GlueConfig, train: bool = True) -> None:
        self._spec = spec = SPECS[config.data.task]
        self.missing_data = f"no data; set --config.data.path to GLUE's folder, which contains {spec.folder}/train.tsv"
        if train and config.has_data and config.data.task == "ax":
            raise UsageError("ax has no training set; train on mnli, then use that checkpoint to predict ax")
        self.labels, self.metrics, self.sequences = spec.labels, spec.metrics, (spec.texts,)
        self.target = Target(spec.label, spec.labels)
        super().__init__(config, train)

    def make_objective(self, model: ModelConfig) -> Classification | Regression:
        return sequence_objective(self.labels, model, self.class_weighting())

    def output_layer(self) -> OutputLayer:
        # The diagnostic set is predicted by a model trained on MNLI.
        name = "mnli" if self.config.data.task == "ax" else self.config.data.task
        return OutputLayer(CLASSES, self._spec.labels, f"glue/{name}", len(self._spec.texts))

    def eval_splits(self) -> dict[str, str]:
        if self.split == splits.HELD_OUT:
            return super().eval_splits()
        if self.config.data.task == "ax":
            return {"": DIAGNOSTIC}
        names = {suffix: f"{self.split}{name}" for suffix, name in self._spec.eval_sets.items()}
        if self.config.data.task == "mnli" and self.split == "test" and has_diagnostic(self.config.data.path):
            names[_AX_SUFFIX] = DIAGNOSTIC
        return names

    def has_labels(self, split: str) -> bool:
        return split != DIAGNOSTIC and super().has_labels(split)

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        spec = SPECS["ax"] if split == DIAGNOSTIC else self._spec
        return read_rows(self.config.data.path, spec, split, columns, keep_short)

    def read_set(self, split: str) -> Examples:
        examples, (low, high) = super().read_set(split), SCORE_RANGE
        if not self.labels:
            scores = examples.rows["labels"]
            for index in np.flatnonzero((scores < low) | (scores > high)):
                problem = f"with a score outside {low:g} to {high:g}"
                self.read_stats[-1].count_irregular(problem, examples.lines[index])
        return examples

    def extra_metrics(self) -> list[Metric]:
        names = [f"{name}{suffix}" for suffix in self.sets for name in _LOSSES] if self._has_several_sets() else []
        return [Metric(name, lower_is_better=True) for name in names]

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        values = super().score(outputs)
        if self._has_several_sets():
            for suffix, logits in self.logits_by_set(outputs).items():
                labels = self.sets[suffix].rows["labels"]
                known = known_labels(labels)
                if known.any():
                    loss = cross_entropy(logits[known], labels[known])
                    values |= {f"{name}{suffix}": loss for name in _LOSSES}
        return values

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes files for the GLUE server, with the columns `index` and `prediction`, sorted by index."""
        files = []
        for suffix, logits in self.logits_by_set(outputs).items():
            predictions = self.predictions(logits)
            texts = [self.labels[value] if self.labels else f"{value:.3f}" for value in predictions]
            rows = sorted(zip(self._row_indices(suffix, len(texts)), texts, strict=True))
            lines = "".join(f"{index}\t{text}\n" for index, text in rows)
            files.append(write_atomic(folder / self._submission_file(suffix), "index\tprediction\n" + lines))
        return files

    def records_file(self, suffix: str) -> str:
        return f"{Path(self._submission_file(suffix)).stem}.jsonl"

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        return super().predictions(logits) if self.labels else np.clip(logits, *SCORE_RANGE)

    def _has_several_sets(self) -> bool:
        return len(self.sets) > 1 and bool(self.labels)

    def _submission_file(self, suffix: str) -> str:
        return {"": f"{self._spec.folder}.tsv", **self._spec.submission, _AX_SUFFIX: "AX.tsv"}[suffix]

    def _row_indices(self, suffix: str, count: int) -> list[int]:
        """Returns a test set's column `index`, or 0 to count - 1 if it is missing or not unique."""
        split = self.eval_splits()[suffix]
        if not self.has_labels(split):
            with contextlib.suppress(UsageError):
                ids = [row.fields[INDEX] for row in self.read_rows(split, (INDEX,), keep_short=True)[0]]
                if all(id_.isascii() and id_.isdigit() for id_ in ids) and len({*map(int, ids)}) == count:
                    return list(map(int, ids))
        return list(range(count))
