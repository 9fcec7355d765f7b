"""Base class of fine-tuning tasks with one label per row of a table: GLUE, SWAG, and your own texts."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bertjax.data.finetuning.examples import Examples, concatenate, constant_prediction, known_labels
from bertjax.data.finetuning.labeled_text import Target, encode_rows
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.metrics.classification import scores
from bertjax.metrics.report import ClassReport, class_report, multilabel_report
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.records import RECORDS_FILE, PredictionRecords, Record, class_record, round_digits


class RowsTask(FinetuningTask):
    """Base class of tasks whose table rows have one class, number or choice, or several labels.

    Subclasses define `read_rows` and `write_predictions`, and set the attributes before they call `__init__`.

    Attributes:
      metrics: names in `bertjax.metrics.classification.METRICS`; the first one selects the best checkpoint.
      baseline_metrics: metrics of the baseline (default: `metrics`).
      sequences: text columns of each sequence of an example, see `encode_rows`.
      target: label column.
      sets: examples of each evaluation set, keyed by the suffix of its metric names (usually only "").
    """

    metrics: Sequence[str]
    baseline_metrics: Sequence[str] = ()
    sequences: Sequence[Sequence[str]]
    target: Target

    def __init__(self, config: FinetuningConfig, train: bool = True) -> None:
        self.default_metric = self.metrics[0]
        self.baseline_metrics = self.baseline_metrics or self.metrics
        self.sets: dict[str, Examples] = {}
        super().__init__(config, train)

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        """Reads columns of a split (arguments: see `read_table`). The statistics are updated as rows are read."""
        raise NotImplementedError

    def eval_splits(self) -> dict[str, str]:
        """Returns the splits to evaluate, keyed by the suffix of their metric names."""
        return {"": "train" if self.split == splits.HELD_OUT else self.split}

    def has_labels(self, split: str) -> bool:
        """Returns whether the file of a split has a label column (default: True except for test files)."""
        return not split.startswith("test")

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        """Converts logits to predictions: ids, int64 [N] (default), 0/1 labels [N, K], or numbers [N]."""
        return logits.argmax(axis=-1)

    def record(self, logits: np.ndarray) -> Record:
        """Returns the prediction record of one example: a class or choice, or a number if `logits` is a scalar."""
        if logits.ndim:
            return class_record(self.labels, logits)
        return {"prediction": round_digits(self.predictions(logits))}

    def records_file(self, suffix: str) -> str:
        """Returns the file name for an evaluation set's prediction records."""
        return RECORDS_FILE

    def encode(self, source: Examples, stats: ReadStats, training: bool) -> Examples:
        if self.split == splits.HELD_OUT and not training:
            self.sets = {"": source}
        return source

    def read_examples(self, split: str) -> Examples:
        if split == "train":
            return self.read_set(split)
        self.sets = {suffix: self.read_set(name) for suffix, name in self.eval_splits().items()}
        return concatenate([*self.sets.values()])

    def read_set(self, split: str) -> Examples:
        """Reads and encodes "train" or a split of `eval_splits`. Appends row counts to `read_stats`."""
        training, labeled = split == "train", self.has_labels(split)
        columns = [*dict.fromkeys(itertools.chain(*self.sequences)), *([self.target.column] if labeled else [])]
        rows, stats = self.read_rows(split, columns, keep_short=not training)
        self.read_stats.append(stats)
        seq_len = self.config.data.seq_len
        return encode_rows(
            rows, self.sequences, self.target, self.tokenizer, seq_len, stats, labeled=labeled, training=training
        )

    def eval_data_name(self) -> str:
        return ", ".join(stats.file for stats in self.read_stats[-len(self.sets) :])

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        logits = self.logits_by_set(outputs)
        return self._scores(self.metrics, {suffix: self.predictions(logits[suffix]) for suffix in logits})

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of a constant baseline: the most frequent class, or the mean."""
        labels = {suffix: examples.rows["labels"] for suffix, examples in self.sets.items()}
        known = [suffix for suffix in labels if known_labels(labels[suffix]).any()]
        return self._scores(self.baseline_metrics, {suffix: constant_prediction(labels[suffix]) for suffix in known})

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        reports = {}
        for suffix, logits in self.logits_by_set(outputs).items():
            labels = self.sets[suffix].rows["labels"]
            known = known_labels(labels)
            if self.labels and known.any():
                make_report = multilabel_report if labels.ndim > 1 else class_report
                reports[suffix] = make_report(self.labels, self.predictions(logits)[known], labels[known])
        return reports

    def prediction_records(self) -> list[PredictionRecords]:
        return [self._set_records(suffix) for suffix in self.sets]

    def _set_records(self, suffix: str) -> PredictionRecords:
        def make(outputs: list[dict[str, np.ndarray]]) -> Iterator[Record]:
            return map(self.record, self.logits_by_set(outputs)[suffix])

        def read_columns(columns: Sequence[str]) -> Iterator[Row]:
            return self.read_rows(self.eval_splits()[suffix], columns, keep_short=True)[0]

        return PredictionRecords(self.records_file(suffix), make, self.sets[suffix].lines, read_columns)

    def logits_by_set(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Returns the logits of each evaluation set, in input order."""
        ends = np.cumsum([len(examples) for examples in self.sets.values()])[:-1]
        return dict(zip(self.sets, np.split(self.ordered_logits(outputs), ends), strict=True))

    def _scores(self, metrics: Sequence[str], predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = {}
        for suffix, predicted in predictions.items():
            set_scores = scores(metrics, predicted, self.sets[suffix].rows["labels"])
            values |= {f"{name}{suffix}": value for name, value in set_scores.items()}
        return values
