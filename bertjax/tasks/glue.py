"""The nine GLUE tasks and the diagnostic set (section 4.1 of the paper), from GLUE's original files or from TFDS."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.examples import concatenate, constant_prediction, known_labels
from bertjax.data.finetuning.tables import TFDS_PREFIX
from bertjax.errors import UsageError
from bertjax.metrics.classification import cross_entropy, scores
from bertjax.metrics.metric import Metric
from bertjax.metrics.report import ClassReport, class_report
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import SPLITS, FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.glue_data import SCORE_RANGE, SPECS, EvaluationSet, find_file, read_split
from bertjax.tasks.finetuning.output_layer import CLASSES, OutputLayer
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.classification import Classification, Regression, sequence_objective
from bertjax.tasks.records import PredictionRecords, Record, class_record, number_record
from bertjax.utils.io import write_atomic
from bertjax.utils.sections import bounded

# Suffix of the metrics of the diagnostic set.
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
            self.reject(
                f"the labels of {self.data.task} are numbers, not classes", "label_smoothing", "data.class_weights"
            )


class GlueTask(FinetuningTask):
    """One GLUE task. MNLI has two dev sets and two test sets. `ax` is predicted along with the test sets of MNLI."""

    config: GlueConfig

    def __init__(self, config: GlueConfig, train: bool = True) -> None:
        self._spec = SPECS[config.data.task]
        self.missing_data = (
            f"no data; set --config.data.path to GLUE's folder, which contains {self._spec.folder}/train.tsv"
        )
        if train and config.has_data and config.data.task == "ax":
            raise UsageError("ax has no training set; train on mnli, then use that checkpoint to predict ax")
        self.labels = self._spec.labels
        self.default_metric = self._spec.metrics[0]
        # Evaluation sets by the suffix of their metric names, such as "_mismatched".
        self._sets: dict[str, EvaluationSet] = {}
        super().__init__(config, train)

    def make_objective(self, model: ModelConfig) -> Classification | Regression:
        return sequence_objective(self.labels, model, self.class_weighting())

    def output_layer(self) -> OutputLayer:
        # The diagnostic set is predicted by a model trained on MNLI.
        name = "mnli" if self.config.data.task == "ax" else self.config.data.task
        return OutputLayer(CLASSES, self._spec.labels, f"glue/{name}", len(self._spec.texts))

    def load(self, train: bool) -> None:
        data = self.config.data
        if self.split in SPLITS:
            self._sets = {suffix: self._read(f"{self.split}{name}") for suffix, name in self._spec.eval_sets.items()}
            if data.task == "mnli" and self.split == "test" and self._has_diagnostic_set():
                self._sets[_AX_SUFFIX] = read_split(data, self.tokenizer, self.read_stats, SPECS["ax"], self.split)
        self._eval_files = [stats.file for stats in self.read_stats]
        if train or self.split == splits.HELD_OUT:
            train_set = self._read("train")
            self.train_examples, dev = splits.divide_examples(data, train_set.examples, self.read_stats)
            if dev is not None and self.split == splits.HELD_OUT:
                self._sets = {"": EvaluationSet(dev, [], train_set.read_columns)}
                self._eval_files = [self.read_stats[-1].file]
        if self._sets:
            self.eval_examples = concatenate([part.examples for part in self._sets.values()])

    def eval_data_name(self) -> str:
        return ", ".join(self._eval_files)

    def extra_metrics(self) -> list[Metric]:
        names = [f"{name}{suffix}" for suffix in self._sets for name in _LOSSES] if self._has_several_sets() else []
        return [Metric(name, lower_is_better=True) for name in names]

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        set_logits = self._logits_by_set(outputs)
        values = self._metrics({suffix: self._predictions(logits) for suffix, logits in set_logits.items()})
        if self._has_several_sets():
            for suffix, logits in set_logits.items():
                labels = self._sets[suffix].labels
                known = known_labels(labels)
                if known.any():
                    loss = cross_entropy(logits[known], labels[known])
                    values |= {f"{name}{suffix}": loss for name in _LOSSES}
        return values

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of a constant prediction per set: the most frequent class, or the mean for regression."""
        return self._metrics(
            {
                suffix: constant_prediction(part.labels)
                for suffix, part in self._sets.items()
                if known_labels(part.labels).any()
            }
        )

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        reports = {}
        for suffix, logits in self._logits_by_set(outputs).items():
            labels = self._sets[suffix].labels
            known = known_labels(labels)
            if known.any():
                reports[suffix] = class_report(self.labels, logits[known].argmax(axis=-1), labels[known])
        return reports

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes files for the GLUE server, with the columns `index` and `prediction`, sorted by index."""
        files = []
        for suffix, logits in self._logits_by_set(outputs).items():
            predictions = self._predictions(logits)
            texts = [self.labels[value] if self.labels else f"{value:.3f}" for value in predictions]
            rows = sorted(zip(_row_indices(self._sets[suffix].ids, len(texts)), texts, strict=True))
            lines = "".join(f"{index}\t{text}\n" for index, text in rows)
            files.append(write_atomic(folder / self._submission_file(suffix), "index\tprediction\n" + lines))
        return files

    def prediction_records(self) -> list[PredictionRecords]:
        def make(suffix: str, outputs: list[dict[str, np.ndarray]], include_logits: bool) -> Iterator[Record]:
            for logits in self._logits_by_set(outputs)[suffix]:
                if self.labels:
                    yield class_record(self.labels, logits, include_logits)
                else:
                    yield number_record(self._predictions(logits))

        return [
            PredictionRecords(
                f"{Path(self._submission_file(suffix)).stem}.jsonl",
                functools.partial(make, suffix),
                part.examples.lines,
                part.read_columns,
            )
            for suffix, part in self._sets.items()
        ]

    def _read(self, split: str) -> EvaluationSet:
        return read_split(self.config.data, self.tokenizer, self.read_stats, self._spec, split)

    def _has_diagnostic_set(self) -> bool:
        path = self.config.data.path
        return path.startswith(TFDS_PREFIX) or find_file(Path(path).expanduser(), SPECS["ax"], "test") is not None

    def _has_several_sets(self) -> bool:
        return len(self._sets) > 1 and bool(self.labels)

    def _logits_by_set(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Returns the logits of each evaluation set, in input order."""
        logits = self.ordered_logits(outputs)
        ends = np.cumsum([len(part) for part in self._sets.values()])[:-1]
        return dict(zip(self._sets, np.split(logits, ends), strict=True))

    def _predictions(self, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(axis=-1) if self.labels else np.clip(logits, *SCORE_RANGE)

    def _metrics(self, predictions: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the metrics of all evaluation sets. `predictions` contains one array per set, by metric suffix."""
        values = {}
        for suffix, predicted in predictions.items():
            set_scores = scores(self._spec.metrics, predicted, self._sets[suffix].labels)
            values |= {f"{name}{suffix}": value for name, value in set_scores.items()}
        return values

    def _submission_file(self, suffix: str) -> str:
        return {"": f"{self._spec.folder}.tsv", **self._spec.submission, _AX_SUFFIX: "AX.tsv"}[suffix]


def _row_indices(ids: list[str], count: int) -> list[int]:
    """Returns the numbers of the `index` column. If they are missing or not unique, returns 0 to count - 1."""
    if len(ids) == count and all(id_.isascii() and id_.isdigit() for id_ in ids) and len({*map(int, ids)}) == len(ids):
        return list(map(int, ids))
    return list(range(count))
