"""A user's own sentences, pairs of them or words, with a class, labels, a number or tags, from TSV, CSV, JSON Lines."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.config.fields import one_of
from bertjax.data.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.data.finetuning.examples import Examples, in_input_order
from bertjax.data.finetuning.labelled_text import Target, encode_rows, label_of, labels_of
from bertjax.data.finetuning.tables import FORMATS, ReadStats, Row, one_line, read_table
from bertjax.data.finetuning.tagged import Tagged, tagged_rows
from bertjax.errors import UsageError
from bertjax.metrics import classification as metrics
from bertjax.metrics import report
from bertjax.metrics.report import ClassReport
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits, tagging
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, OutputLayer, saved_labels
from bertjax.tasks.finetuning.records import RECORDS, FileRecords, Record, are_given, of_class, of_labels, of_number
from bertjax.tasks.finetuning.settings import SPLITS, FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.finetuning.weighting import PLAIN, Weighting, weighting_of
from bertjax.tasks.objectives import classes as objectives
from bertjax.tasks.task import Objective, Task
from bertjax.utils.io import write_atomic

KINDS = ("classes", "number", "tags", "multilabel")
_BEST_BY = {"classes": "accuracy", "number": "pearson", "multilabel": "micro_f1"}


@dataclasses.dataclass(frozen=True)
class TextData(FinetuningData):
    """What is read, and in which batches.

    Attributes:
      train_file, dev_file, test_file: .tsv (quotes are text), .csv or .jsonl, in `path` where there is one.
      text: column of the text.
      second_text: column of the second text of a pair; empty where there is none.
      label: column of the label.
      kind: `classes`, `number`, `tags` or `multilabel`.
      label_separator: of `multilabel`, between two labels of a row.
      threshold: of `multilabel`, the probability from which on a label is given.
    """

    train_file: str = ""
    dev_file: str = ""
    test_file: str = ""
    text: str = "text"
    second_text: str = ""
    label: str = "label"
    kind: str = "classes"
    label_separator: str = ","
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [name for name in (self.text, self.second_text, self.label) if name]
        if len({*named}) < len(named):
            raise UsageError(f"text, second and label name one column twice: {', '.join(named)}")
        one_of(self, "config.data", kind=KINDS)
        if self.kind == "tags" and self.second_text:
            raise UsageError("kind=tags takes one text a row; leave second out")
        usual = (TextData.threshold, TextData.label_separator)
        if self.kind != "multilabel" and (self.threshold, self.label_separator) != usual:
            raise UsageError(f"config.data.threshold and label_separator are for kind=multilabel, kind is {self.kind}")
        if not 0 < self.threshold < 1:
            raise UsageError(f"config.data.threshold is {self.threshold}; it must be above 0 and below 1")
        if not self.label_separator.strip() and self.label_separator != " " or self.label_separator in "\t\r\n":
            raise UsageError(
                f"config.data.label_separator is {self.label_separator!r}; give what is between two labels"
            )
        if self.dev_share and self.dev_file:
            raise UsageError(
                f"config.data.dev_share is {self.dev_share}, and config.data.dev_file names a dev set; leave one of "
                "them out"
            )


@dataclasses.dataclass(frozen=True)
class Config(FinetuningConfig):
    """Settings of the task."""

    task: str = "text"
    data: TextData = TextData()

    def __post_init__(self) -> None:
        super().__post_init__()
        why = {
            "number": "kind=number has no classes",
            "multilabel": "with kind=multilabel each label is told by itself",
        }
        if self.data.kind in why:
            self.refuse(why[self.data.kind], "label_smoothing", "data.class_weights")

    @property
    def has_data(self) -> bool:
        """Whether they name any file."""
        return bool(self.data.train_file or self.data.dev_file or self.data.test_file)


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on the files they name; without any, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files without the columns that are named.
    """
    data = settings.data
    if train and not data.train_file or not settings.has_data:
        if train:
            raise UsageError("give your files: --config.data.train_file=FILE and --config.data.dev_file=FILE")
        if data.kind == "tags":
            return synthetic_task(settings, functools.partial(tagging.objective, tags=2))
        return synthetic_task(
            settings, functools.partial(_objective, data, ("0", "1")), labels=2 if data.kind == "multilabel" else 0
        )
    vocabulary = finetuning.vocabulary_of(settings)
    if data.kind == "tags":
        return _tagging(settings, vocabulary, train)
    model = finetuning.model_of(settings, vocabulary)
    readings: list[ReadStats] = []
    labels: Sequence[str] = ()
    if data.kind != "number":
        labels = saved_labels(data.labels) or _labels(data)
    read = functools.partial(_read, data, Tokenizer(vocabulary), labels, readings)
    split = splits.evaluated(data, train)
    trained = examples = None
    if train or split == splits.SHARE:
        trained, examples = splits.divided(data, read(data.train_file, labelled=True, training=True), readings)
    if split in SPLITS:
        file, labelled = (data.dev_file, True) if split == "dev" else (data.test_file, False)
        examples = read(file, labelled=labelled, training=False)
    weights = PLAIN
    if train and data.kind == "classes":
        weights = weighting_of(settings, labels, trained.rows["labels"])
    return finetuning.make_task(
        settings,
        _objective(data, labels, model, weights),
        vocabulary,
        trained if train else None,
        examples,
        readings,
        layer=OutputLayer(
            MULTILABEL if data.kind == "multilabel" else CLASSES,
            tuple(labels),
            f"text/{data.kind}{'/pair' if data.second_text else ''}",
            2 if data.second_text else 1,
        ),
        score=lambda outputs: _measured(data, examples, _values(data, examples, outputs)),
        baseline=lambda: _baseline(data, examples),
        best_by=_BEST_BY[data.kind],
        write=functools.partial(_write, data, labels, examples),
        records=[
            FileRecords(
                RECORDS, functools.partial(_records, data, labels, examples), examples.lines, _evaluated_table(data)
            )
        ]
        if examples
        else (),
        evaluated_on=readings[-1].file,
        is_labelled=examples is None or finetuning.known(examples.rows["labels"]).any(),
        per_class=functools.partial(_per_class, data, labels, examples) if labels else None,
    )


def _objective(data: TextData, labels: Sequence[str], model: ModelConfig, weights: Weighting = PLAIN) -> Objective:
    if data.kind == "multilabel":
        return objectives.labels_objective(SequenceModel(model, len(labels)))
    return objectives.sequence_objective(labels if data.kind == "classes" else (), model, weights)


def _tagging(settings: Config, vocabulary: Vocabulary, train: bool) -> Task:
    data = settings.data
    readings: list[ReadStats] = []

    def read(file: str, labelled: bool, training: bool) -> Tagged:
        label = data.label if labelled else None
        rows, reading = _open(data, file, [data.text, *([label] if label else [])], not training)
        readings.append(reading)
        return tagged_rows(rows, data.text, label, reading, keep_untagged=not training)

    return tagging.tagging_task(
        settings,
        vocabulary,
        readings,
        train,
        read_training=functools.partial(read, data.train_file, True, True),
        read_split=lambda split: read(*((data.dev_file, True) if split == "dev" else (data.test_file, False)), False),
        output=f"text/{data.kind}",
        documents=False,
        table=_evaluated_table(data),
    )


def _evaluated_table(data: TextData) -> Callable[[Sequence[str]], Iterator[Row]]:
    """Columns to all rows of the file that is evaluated."""
    dev = data.train_file if data.dev_share else data.dev_file
    return lambda columns: _open(data, dev if data.eval_split == "dev" else data.test_file, columns, True)[0]


def _open(data: TextData, file: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
    if not file:
        raise UsageError("give the file to evaluate: --config.data.dev_file=FILE, or test_file for --split test")
    path = Path(data.path).expanduser() / file
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise UsageError(f"{path} ends with none of {', '.join(f'.{known}' for known in FORMATS)}")
    reading = ReadStats(str(path))
    return read_table(path, columns, reading, form=form, keep_short=keep_short), reading


def _labels(data: TextData) -> list[str]:
    if not data.train_file:
        raise UsageError("the classes are those of the training file: --config.data.train_file=FILE")
    rows, reading = _open(data, data.train_file, [data.label], False)
    if data.kind == "multilabel":
        labels = sorted({label for row in rows for label in labels_of(row, data.label, data.label_separator, reading)})
        if not labels:
            raise UsageError(f"the column {data.label!r} of {data.train_file} has no labels")
        return labels
    labels = sorted({label_of(row, data.label, reading) for row in rows} - {""})
    if len(labels) < 2:
        raise UsageError(
            f"the column {data.label!r} of {data.train_file} has {len(labels)} different labels; classes are at least "
            "2, for numbers give kind=number"
        )
    return labels


def _read(
    data: TextData,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    readings: list[ReadStats],
    file: str,
    *,
    labelled: bool,
    training: bool,
) -> Examples:
    texts = [data.text, *([data.second_text] if data.second_text else [])]
    rows, reading = _open(data, file, [*texts, *([data.label] if labelled else [])], not training)
    readings.append(reading)
    target = Target(data.label, labels, data.label_separator if data.kind == "multilabel" else "")
    return encode_rows(rows, texts, target, tokenizer, data.seq_len, reading, labelled=labelled, training=training)


def _values(data: TextData, examples: Examples, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The class of each row, int [N]; which labels it has, int [N, K] of 0 and 1; or its number."""
    logits = np.array(in_input_order(outputs, len(examples))["logits"])
    if data.kind == "multilabel":
        return are_given(logits, data.threshold).astype(np.int64)
    return logits.argmax(axis=-1) if data.kind == "classes" else logits


def _measured(data: TextData, examples: Examples, values: np.ndarray) -> dict[str, float]:
    there = finetuning.known(examples.rows["labels"])
    values, wanted = values[there], examples.rows["labels"][there]
    if not len(wanted):
        return {}
    if data.kind == "multilabel":
        return metrics.multilabel(values, wanted)
    if data.kind == "classes":
        return {
            "accuracy": metrics.accuracy(values, wanted),
            "macro_f1": metrics.macro_f1(values, wanted),
            "matthews": metrics.matthews(values, wanted),
        }
    return {"pearson": metrics.pearson(values, wanted), "spearman": metrics.spearman(values, wanted)}


def _per_class(
    data: TextData, labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]]
) -> dict[str, ClassReport]:
    there = finetuning.known(examples.rows["labels"])
    values, wanted = _values(data, examples, outputs)[there], examples.rows["labels"][there]
    return {"": (report.of_labels if data.kind == "multilabel" else report.of_classes)(labels, values, wanted)}


def _baseline(data: TextData, examples: Examples) -> dict[str, float]:
    """The most frequent class, the labels that most rows have, or the mean, for every example."""
    labels = examples.rows["labels"]
    if data.kind == "multilabel":
        usual = labels[finetuning.known(labels)].mean(axis=0) > 0.5
        return _measured(data, examples, np.tile(usual.astype(np.int64), (len(labels), 1)))
    return _measured(data, examples, finetuning.constant_guess(labels))


def _write(
    data: TextData, labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]], folder: Path
) -> list[Path]:
    """`prediction`, a line for each row of the file, in its order."""
    values = _values(data, examples, outputs)
    if data.kind == "multilabel":
        shown = [data.label_separator.join(labels[index] for index in np.flatnonzero(row)) for row in values]
    else:
        shown = [labels[value] for value in values] if labels else [f"{value:.6g}" for value in values]
    lines = "".join(f"{one_line(value)}\n" for value in shown)
    return [write_atomic(folder / "predictions.tsv", "prediction\n" + lines)]


def _records(
    data: TextData, labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]], logits: bool
) -> Iterator[Record]:
    for row in in_input_order(outputs, len(examples))["logits"]:
        if data.kind == "multilabel":
            yield of_labels(labels, row, data.threshold, logits)
        else:
            yield of_class(labels, row, logits) if labels else of_number(row)
