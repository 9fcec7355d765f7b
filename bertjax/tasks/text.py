"""Classification, regression and token tagging of your own texts, from TSV, CSV or JSON Lines files."""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.cells import is_number, label_key, missing_class_problem, sort_labels, spelling_problem
from bertjax.data.finetuning.labeled_text import Target, is_multi_hot
from bertjax.data.finetuning.tables import LINE_ESCAPES, ReadStats, Row, read_table
from bertjax.data.finetuning.tagged import TaggedText, read_tagged_rows
from bertjax.errors import UsageError, listed, quoted
from bertjax.metrics.classification import METRICS_OF_KIND
from bertjax.model.config import ModelConfig
from bertjax.model.models import SequenceModel
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, OutputLayer, saved_labels
from bertjax.tasks.finetuning.rows import RowsTask
from bertjax.tasks.finetuning.tagging import TaggingTask
from bertjax.tasks.objectives.classification import MultiLabel, sequence_objective
from bertjax.tasks.records import Record, multilabel_record, reaches_threshold
from bertjax.tasks.task import Objective
from bertjax.utils.io import write_atomic
from bertjax.utils.sections import bounded

logger = logging.getLogger(__name__)

_MISSING_DATA = "no data; set --config.data.train_file=FILE and --config.data.dev_file=FILE"
# Labels that occur only once may be text from another column. Warn if at least half of the rows have such labels, in
# files of at least `_MIN_ROWS` rows, or if such a label has more than `_MAX_WORDS` words.
_MIN_ROWS, _MAX_WORDS = 4, 8


@dataclasses.dataclass(frozen=True)
class TableData(FinetuningData):
    """Data in files with named columns.

    Attributes:
      train_file, dev_file, test_file: .tsv (without quoting), .csv or .jsonl files, relative to `path` if it is set.
      text: name of the text column.
      label: name of the label column.
    """

    train_file: str = ""
    dev_file: str = ""
    test_file: str = ""
    text: str = "text"
    label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text == self.label:
            raise UsageError(f"config.data.text and config.data.label are both {self.text!r}; set different columns")
        if self.dev_share and self.dev_file:
            raise UsageError("config.data.dev_share and config.data.dev_file both define a dev set; use only one")

    @property
    def has_files(self) -> bool:
        """True if a training, dev or test file is set."""
        return bool(self.train_file or self.dev_file or self.test_file)

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        """Reads columns of "train", "dev" or "test" with `read_table`. The statistics are updated as rows are read."""
        file = getattr(self, f"{split}_file")
        if not file:
            raise UsageError(f"no file for the {split} set; set --config.data.{split}_file=FILE")
        path = Path(self.path).expanduser() / file
        stats = ReadStats(str(path))
        return read_table(path, columns, stats, keep_short=keep_short), stats


@dataclasses.dataclass(frozen=True)
class TextData(TableData):
    """Data and batches for classification or regression of your own texts.

    Attributes:
      second_text: name of the column with the second text of a pair (default: none).
      kind: kind of label: `classes` (one class per row), `number` (regression) or `multilabel` (any number of labels
        per row).
      label_separator: for `multilabel`, separator of the labels of a row.
      threshold: for `multilabel`, minimum probability of a predicted label.
    """

    second_text: str = ""
    kind: str = bounded("classes", choices=tuple(METRICS_OF_KIND))
    label_separator: str = ","
    threshold: float = bounded(0.5, above=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_text in (self.text, self.label):
            raise UsageError(
                f"config.data.second_text={self.second_text!r} is also config.data.text or config.data.label; choose "
                "another column"
            )
        options = (self.label_separator, self.threshold)
        if self.kind != "multilabel" and options != (TextData.label_separator, TextData.threshold):
            fix = "set config.data.kind=multilabel, or leave them unset"
            raise UsageError(f"config.data.label_separator and config.data.threshold have no effect; {fix}")
        if not self.label_separator.strip() and self.label_separator != " ":
            raise UsageError(f"config.data.label_separator={self.label_separator!r} is not valid; use a space or ','")


@dataclasses.dataclass(frozen=True)
class TextConfig(FinetuningConfig):
    """Config for text classification or regression on your own data."""

    task: str = "text"
    data: TextData = TextData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.kind != "classes":
            self.reject(f"kind={self.data.kind} has no classes", "label_smoothing", "data.class_weights")


@dataclasses.dataclass(frozen=True)
class TextTagsConfig(FinetuningConfig):
    """Config for token tagging on your own data."""

    task: str = "text_tags"
    data: TableData = TableData()


class TextTask(RowsTask):
    """Classification, multi-label classification or regression of one or two texts per row."""

    missing_data = _MISSING_DATA
    config: TextConfig

    def __init__(self, config: TextConfig, train: bool = True) -> None:
        data = config.data
        self.metrics, self.sequences = METRICS_OF_KIND[data.kind], [[data.text, *filter(None, [data.second_text])]]
        self.labels = () if data.kind == "number" else ("0", "1")
        if data.kind == "number":
            self.baseline_metrics = (*self.metrics, "squared_error")
        super().__init__(config, train)

    def make_objective(self, model: ModelConfig) -> Objective:
        if self.config.data.kind == "multilabel":
            return MultiLabel(SequenceModel(model, len(self.labels)))
        return sequence_objective(self.labels, model, self.class_weighting())

    def output_layer(self) -> OutputLayer:
        kind, second = self.config.data.kind, self.config.data.second_text
        name = f"text/{kind}{'/pair' if second else ''}"
        return OutputLayer(MULTILABEL if kind == "multilabel" else CLASSES, tuple(self.labels), name, 1 + bool(second))

    def load(self, train: bool) -> None:
        data = self.config.data
        separator = data.label_separator if data.kind == "multilabel" else ""
        if data.kind != "number":
            self.labels = saved_labels(data.labels, CLASSES, MULTILABEL) or _read_labels(data, separator)
            if len(self.labels) == 1 and data.kind == "classes":
                raise UsageError(f"{data.labels} has one label; write all classes, or set kind=number for regression")
        self.target = Target(data.label, self.labels, separator)
        super().load(train)

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        return self.config.data.read_rows(split, columns, keep_short)

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        if self.config.data.kind == "multilabel":
            return reaches_threshold(logits, self.config.data.threshold).astype(np.int64)
        return super().predictions(logits) if self.labels else logits

    def record(self, logits: np.ndarray) -> Record:
        if self.config.data.kind == "multilabel":
            return multilabel_record(self.labels, logits, self.config.data.threshold)
        return super().record(logits)

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes a file with the header `prediction`, then one prediction per row of the input file."""
        predictions, data = self.predictions(self.ordered_logits(outputs)), self.config.data
        if data.kind == "multilabel":
            texts = [data.label_separator.join(itertools.compress(self.labels, row)) for row in predictions]
        else:
            texts = [self.labels[value] if self.labels else f"{value:.6g}" for value in predictions]
        lines = "".join(f"{text.translate(LINE_ESCAPES)}\n" for text in texts)
        return [write_atomic(folder / "predictions.tsv", "prediction\n" + lines)]


class TextTagsTask(TaggingTask):
    """Token tagging of files with one sentence per row. Two columns contain the words and the tags."""

    missing_data = _MISSING_DATA
    labels = ("O", "B-X")
    output_name = "text/tags"
    config: TextTagsConfig

    def read_words(self, split: str) -> TaggedText:
        data = self.config.data
        label = data.label if split != "test" else None
        columns = [data.text, *([label] if label else [])]
        rows, stats = data.read_rows(split, columns, keep_short=split != "train")
        self.read_stats.append(stats)
        return read_tagged_rows(rows, data.text, label, stats, keep_untagged=split != "train")

    def read_columns(self, columns: Sequence[str]) -> Iterator[Row]:
        split = "train" if self.split == splits.HELD_OUT else self.split
        return self.config.data.read_rows(split, columns, keep_short=True)[0]


def _read_labels(data: TextData, separator: str) -> list[str]:
    """Returns the distinct labels of the training file, sorted by `sort_labels`."""
    target = Target(data.label, (), separator)
    rows, stats = data.read_rows("train", [data.label], keep_short=False)
    spellings: dict[str, Counter[str]] = {}
    multi_hot, max_names = "", 0
    for row in rows:
        names = target.names(row, stats) or []
        max_names = max(max_names, len(names))
        if is_multi_hot(names):
            multi_hot = multi_hot or f"line {row.line}: {data.label} is {quoted(row.fields[data.label])}"
        for name in names:
            spellings.setdefault(label_key(name), Counter())[name] += 1
    # A label's name is its shortest spelling, preferably in lower case: 1 for 1 and 1.0, true for True and true.
    labels = {key: min(sorted(names)[::-1], key=len) for key, names in spellings.items()}
    if multi_hot and is_multi_hot(["0", *labels]):
        raise UsageError(
            f"{data.train_file} {multi_hot}, multi-hot labels without names; list the names in order in a JSON file "
            'such as {"labels": ["neg", "pos"]}, and set --config.data.labels to this file'
        )
    minimum = 2 if data.kind == "classes" else 1
    if len(labels) < minimum:
        noted = "".join(f" ({entry['rows']:,} {reason})" for reason, entry in stats.noted.items())
        raise UsageError(
            f"column {data.label!r} of {data.train_file} contains {len(labels)} different labels in {stats.read:,} "
            f"rows{noted}, but needs at least {minimum}; set config.data.label, or kind=number for regression"
        )
    problem = f"no row of {data.train_file} has several labels" if separator and max_names < 2 else ""
    if separator == TextData.label_separator:
        for other in ";|":
            if sum(other in name for name in labels.values()) > 1:
                problem = f"labels of {data.train_file} contain {other!r}"
    if problem:
        fix = f"if labels are separated by a character other than {separator!r}, set config.data.label_separator"
        logger.warning(f"{problem}; {fix}")
    if data.kind == "classes" and any("." in name for name in labels) and all(map(is_number, labels)):
        logger.warning(f"{data.train_file}: the classes are numbers with decimals; for regression, set kind=number")
    for problem in filter(None, (missing_class_problem(labels), spelling_problem(labels.values()))):
        logger.warning(f"{data.train_file}: {problem}")
    rare = [name for key, name in labels.items() if spellings[key].total() == 1]
    is_mostly_rare = data.kind == "classes" and stats.read >= _MIN_ROWS and 2 * len(rare) >= stats.read
    if suspicious := rare if is_mostly_rare else [name for name in rare if len(name.split()) > _MAX_WORDS]:
        logger.warning(
            f"{len(suspicious):,} of {len(labels):,} labels of {data.train_file} may be texts or parts of other "
            f"fields, such as {listed(map(quoted, suspicious), 3)}; check that the labels are in {data.label!r}"
        )
    return sort_labels(labels.values())
