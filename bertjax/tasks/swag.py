"""SWAG: which of four endings goes on a sentence (section 4.4 of the paper)."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data import schema
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, encode_pair, in_input_order, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row, read_table
from bertjax.data.finetuning.tfds_rows import PREFIX, read_tfds
from bertjax.errors import UsageError
from bertjax.metrics.classification import accuracy
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.output_layer import CHOICES, OutputLayer
from bertjax.tasks.finetuning.records import RECORDS, FileRecords, Record, of_choice
from bertjax.tasks.finetuning.settings import SPLITS, FinetuningConfig
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.finetuning.weighting import PLAIN, Weighting
from bertjax.tasks.objectives import classes as objectives
from bertjax.tasks.task import Objective, Task
from bertjax.utils.io import write_atomic

_CHOICES = 4
_ENDINGS = tuple(f"ending{index}" for index in range(_CHOICES))
_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


@dataclasses.dataclass(frozen=True)
class Config(FinetuningConfig):
    """Settings of the task."""

    task: str = "swag"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse("swag has choices, not classes", "data.class_weights")
        self.refuse("a row of swag is four", "data.examples_per_row")


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on the files in their folder; without one, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files that are not SWAG's.
    """
    if not settings.has_data:
        if train:
            raise UsageError("give SWAG's files: --config.data.path=DIR, which holds train.csv and val.csv")
        return synthetic_task(settings, objective, choices=_CHOICES)
    vocabulary = finetuning.vocabulary_of(settings)
    model = finetuning.model_of(settings, vocabulary)
    tokenizer = Tokenizer(vocabulary)
    readings: list[ReadStats] = []
    encode = functools.partial(_read, settings, tokenizer, readings)
    split = splits.evaluated(settings.data, train)
    trained = examples = None
    if train or split == splits.SHARE:
        trained, examples = splits.divided(settings.data, encode("train"), readings)
    if split in SPLITS:
        examples = encode(split)

    def table(columns: Sequence[str]) -> Iterator[Row]:
        return _open(settings.data.path, "train" if split == splits.SHARE else split, columns, keep_short=True)[1]

    return finetuning.make_task(
        settings,
        objective(model, Weighting(smoothing=settings.label_smoothing)),
        vocabulary,
        trained if train else None,
        examples,
        readings,
        layer=OutputLayer(CHOICES, output="swag"),
        score=lambda outputs: _accuracy(examples, _predictions(examples, outputs)),
        baseline=lambda: _accuracy(examples, finetuning.constant_guess(examples.rows["labels"])),
        best_by="accuracy",
        write=functools.partial(_write, examples),
        records=[FileRecords(RECORDS, functools.partial(_records, examples), examples.lines, table)]
        if examples
        else (),
        evaluated_on=readings[-1].file,
        is_labelled=examples is None or finetuning.known(examples.rows["labels"]).any(),
    )


def objective(model: ModelConfig, weighting: Weighting = PLAIN) -> Objective:
    """Cross-entropy over the choices, each scored by one vector against its pooled first token."""
    return objectives.classes_objective(SequenceModel(model, 1), weighting, schema.CHOICES)


def _read(settings: Config, tokenizer: Tokenizer, readings: list[ReadStats], split: str) -> Examples:
    labelled = split != "test"
    columns = ("sent1", "sent2", *_ENDINGS, *(("label",) if labelled else ()))
    reading, rows = _open(settings.data.path, split, columns, keep_short=split != "train")
    readings.append(reading)
    vocabulary, seq_len = tokenizer.vocabulary, settings.data.seq_len
    sequences, labels, lines = [], [], []
    for row in rows:
        context = tokenizer.encode(row.fields["sent1"])
        start = row.fields["sent2"]
        # The ending goes on the second sentence, so both are the second segment.
        endings = [tokenizer.encode(f"{start} {row.fields[ending]}") for ending in _ENDINGS]
        if not context or not all(row.fields[ending].strip() for ending in _ENDINGS):
            reading.note("with an empty text", row.line)
        if len(context) + max(map(len, endings)) + 3 > seq_len:
            reading.note(f"cut to {seq_len} tokens", row.line)
        sequences += [encode_pair(context, end, seq_len, vocabulary.cls_id, vocabulary.sep_id) for end in endings]
        lines.append(row.line)
        label = row.fields["label"].strip() if labelled and not row.is_short else ""
        if labelled and not label and not row.is_short and split != "train":
            reading.note("with an empty label, predicted and not scored", row.line)
        labels.append(-1 if not label and split != "train" else _label(label, reading.file, row.line))
    reading.used = len(labels) - (labels.count(-1) if labelled else 0)
    if not labels:
        raise UsageError(f"{reading.file} has no rows that can be used")
    return make_examples(sequences, {"labels": np.array(labels, np.int32)}, _CHOICES, lines)


def _open(path: str, split: str, columns: Sequence[str], keep_short: bool) -> tuple[ReadStats, Iterator[Row]]:
    if path.startswith(PREFIX):
        name, theirs = path.removeprefix(PREFIX), {"dev": "validation"}.get(split, split)
        reading = ReadStats(f"{path}:{theirs}")
        return reading, read_tfds(name, theirs, {column: column for column in columns}, reading, named_labels=False)
    file = Path(path).expanduser() / _FILES[split]
    reading = ReadStats(str(file))
    return reading, read_table(file, columns, reading, form="csv", keep_short=keep_short)


def _label(value: str, file: str, line: int) -> int:
    if value not in {str(index) for index in range(_CHOICES)}:
        raise UsageError(f"{file} line {line}: label is {value!r}; known labels: 0, 1, 2, 3")
    return int(value)


def _predictions(examples: Examples, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
    return np.array(in_input_order(outputs, len(examples))["logits"]).argmax(axis=-1)


def _accuracy(examples: Examples, predictions: np.ndarray) -> dict[str, float]:
    labels = examples.rows["labels"]
    there = finetuning.known(labels)
    return {"accuracy": accuracy(predictions[there], labels[there])} if there.any() else {}


def _write(examples: Examples, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
    """The leaderboard's form: `pred`, a header, then a choice a line, in the order of the file."""
    lines = "".join(f"{choice}\n" for choice in _predictions(examples, outputs))
    return [write_atomic(folder / "predictions.csv", "pred\n" + lines)]


def _records(examples: Examples, outputs: list[dict[str, np.ndarray]], logits: bool) -> Iterator[Record]:
    for row in in_input_order(outputs, len(examples))["logits"]:
        yield of_choice(row, logits)
