"""SWAG: multiple choice between four endings of a sentence (section 4.4 of the paper)."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.examples import Examples, constant_prediction, encode_pair, make_examples
from bertjax.data.finetuning.tables import TFDS_PREFIX, ReadStats, Row, read_table, read_tfds
from bertjax.data.schema import MULTI_SEQUENCE
from bertjax.errors import UsageError
from bertjax.metrics.classification import scores
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, OutputLayer
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.classification import Classification, ClassWeighting
from bertjax.tasks.records import RECORDS_FILE, PredictionRecords, Record, choice_record
from bertjax.utils.io import write_atomic

_NUM_CHOICES = 4
_ENDINGS = tuple(f"ending{index}" for index in range(_NUM_CHOICES))
_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


@dataclasses.dataclass(frozen=True)
class SwagConfig(FinetuningConfig):
    """Config of SWAG."""

    task: str = "swag"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reject("swag has choices, not classes", "data.class_weights")
        self.reject("examples of swag have four sequences each", "data.examples_per_row")


class SwagTask(FinetuningTask):
    """SWAG, read from its original files or from TFDS."""

    missing_data = "no data; set --config.data.path to the folder of SWAG's train.csv and val.csv"
    default_metric = "accuracy"
    sequences_per_example = _NUM_CHOICES

    def make_objective(self, model: ModelConfig) -> Classification:
        """Builds the objective: a linear layer scores the pooled [CLS] of each choice, with a softmax over choices."""
        weighting = ClassWeighting(smoothing=self.config.label_smoothing)
        return Classification(SequenceModel(model, 1), weighting, MULTI_SEQUENCE)

    def output_layer(self) -> OutputLayer:
        return OutputLayer(CHOICES, output="swag")

    def read_examples(self, split: str) -> Examples:
        has_labels = split != "test"
        columns = ("sent1", "sent2", *_ENDINGS, *(("label",) if has_labels else ()))
        stats, rows = self._read_rows(split, columns, keep_short=split != "train")
        self.read_stats.append(stats)
        vocabulary, seq_len = self.vocabulary, self.config.data.seq_len
        sequences, labels, lines = [], [], []
        for row in rows:
            encode = self.tokenizer.encode_with_special
            context = encode(row.fields["sent1"])
            # The second segment consists of the second sentence and one ending.
            endings = [encode(f"{row.fields['sent2']} {row.fields[ending]}") for ending in _ENDINGS]
            if not context or not all(row.fields[ending].strip() for ending in _ENDINGS):
                stats.count_irregular("with an empty text", row.line)
            if len(context) + max(map(len, endings)) + 3 > seq_len:
                stats.count_irregular(f"truncated to {seq_len} tokens", row.line)
            sequences += [encode_pair(context, end, seq_len, vocabulary) for end in endings]
            lines.append(row.line)
            label = row.fields["label"].strip() if has_labels and not row.is_short else ""
            if has_labels and not label and not row.is_short and split != "train":
                stats.count_irregular("with an empty label, predicted but not scored", row.line)
            labels.append(-1 if not label and split != "train" else _parse_label(label, stats.file, row.line))
        stats.used = len(labels) - (labels.count(-1) if has_labels else 0)
        if not labels:
            raise UsageError(f"no usable rows in {stats.file}; use a file in SWAG's format")
        return make_examples(sequences, {"labels": np.array(labels, np.int32)}, _NUM_CHOICES, lines)

    def _read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[ReadStats, Iterator[Row]]:
        path = self.config.data.path
        if path.startswith(TFDS_PREFIX):
            name, tfds_split = path.removeprefix(TFDS_PREFIX), {"dev": "validation"}.get(split, split)
            stats = ReadStats(f"{path}:{tfds_split}")
            features = {column: column for column in columns}
            return stats, read_tfds(name, tfds_split, features, stats, named_labels=False)
        file = Path(path).expanduser() / _FILES[split]
        stats = ReadStats(str(file))
        return stats, read_table(file, columns, stats, file_format="csv", keep_short=keep_short)

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return scores(["accuracy"], self._predictions(outputs), self.evaluated_examples.rows["labels"])

    def baseline(self) -> dict[str, float]:
        labels = self.evaluated_examples.rows["labels"]
        return scores(["accuracy"], constant_prediction(labels), labels)

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the leaderboard's format: a header `pred`, then one choice per line, in file order."""
        lines = "".join(f"{choice}\n" for choice in self._predictions(outputs))
        return [write_atomic(folder / "predictions.csv", "pred\n" + lines)]

    def prediction_records(self) -> list[PredictionRecords]:
        def make(outputs: list[dict[str, np.ndarray]], include_logits: bool) -> Iterator[Record]:
            for logits in self.ordered_logits(outputs):
                yield choice_record(logits, include_logits)

        def read_columns(columns: Sequence[str]) -> Iterator[Row]:
            split = "train" if self.split == splits.HELD_OUT else self.split
            return self._read_rows(split, columns, keep_short=True)[1]

        return [PredictionRecords(RECORDS_FILE, make, self.evaluated_examples.lines, read_columns)]

    def _predictions(self, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
        return self.ordered_logits(outputs).argmax(axis=-1)


def _parse_label(value: str, file: str, line: int) -> int:
    if value not in {str(index) for index in range(_NUM_CHOICES)}:
        raise UsageError(f"{file} line {line}: label is {value!r}; use 0, 1, 2 or 3")
    return int(value)
