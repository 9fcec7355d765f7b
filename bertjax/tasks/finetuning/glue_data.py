"""What GLUE says of its tasks, and their rows from its own files or from TFDS."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.labelled_text import Target, encode_rows
from bertjax.data.finetuning.tables import ReadStats, Row, read_table
from bertjax.data.finetuning.tfds_rows import PREFIX, read_tfds
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.settings import FinetuningData


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """What GLUE says of one task.

    Attributes:
      folder: of its files in GLUE's archive.
      texts: columns of the one sentence or the two.
      label: column of the label.
      labels: classes, the index is the id; () is regression.
      metrics: of `bertjax.metrics.classification`; the first one selects on dev.
      evaluated: suffix of the metrics to the name of its dev and test files, where that is not `dev` and `test`.
      submission: suffix to the file that the GLUE server takes.
      header: of train and dev files that have none.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submission: dict[str, str]
    evaluated: dict[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    header: tuple[str, ...] = ()


_NUMBERED = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_DIAGNOSTIC = "diagnostic"
_NLI = ("contradiction", "entailment", "neutral")
TASKS = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        "label",
        _NUMBERED,
        ("matthews", "accuracy"),
        {"": "CoLA.tsv"},
        header=("source", "label", "star", "sentence"),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), "label", _NUMBERED, ("accuracy",), {"": "SST-2.tsv"}),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _NUMBERED, ("f1", "accuracy"), {"": "MRPC.tsv"}),
    "stsb": GlueTask("STS-B", _PAIR, "score", (), ("spearman", "pearson"), {"": "STS-B.tsv"}),
    "qqp": GlueTask("QQP", ("question1", "question2"), "is_duplicate", _NUMBERED, ("f1", "accuracy"), {"": "QQP.tsv"}),
    "mnli": GlueTask(
        "MNLI",
        _PAIR,
        "gold_label",
        _NLI,
        ("accuracy",),
        {"": "MNLI-m.tsv", "_mismatched": "MNLI-mm.tsv"},
        evaluated={"": "_matched", "_mismatched": "_mismatched"},
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",), {"": "QNLI.tsv"}),
    "rte": GlueTask("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",), {"": "RTE.tsv"}),
    "wnli": GlueTask("WNLI", _PAIR, "label", _NUMBERED, ("accuracy",), {"": "WNLI.tsv"}),
    # Has no training or dev set: predicted by a model of MNLI.
    "ax": GlueTask(_DIAGNOSTIC, _PAIR, "gold_label", _NLI, ("accuracy",), {"": "AX.tsv"}),
}
_TFDS_TEXTS = {
    "mrpc": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "ax": ("premise", "hypothesis"),
}
# STS-B's scores run from 0 to 5, and the server takes nothing beyond.
SCORE_RANGE = (0.0, 5.0)
# What a row is called in a submission: the column of the files, the feature of TFDS, which stores rows in any order.
_INDEX, _TFDS_INDEX = "index", "idx"


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples, what each is called where they are to be predicted, and columns to all rows of their file."""

    examples: Examples
    ids: list[str]
    table: Callable[[Sequence[str]], Iterator[Row]]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def labels(self) -> np.ndarray:
        return self.examples.rows["labels"]


def read(data: FinetuningData, tokenizer: Tokenizer, readings: list[ReadStats], glue: GlueTask, split: str) -> Split:
    """The rows of a split, such as `train` or `dev_matched`; `readings` gains one.

    Raises:
      UsageError: there is no file, or it is not the task's.
    """
    labelled = not split.startswith("test") and glue.folder != _DIAGNOSTIC
    label = glue.label if labelled else None
    training = split == "train"
    if data.path.startswith(PREFIX):
        reading, rows = _tfds_rows(data.path.removeprefix(PREFIX), glue, split, labelled)
    else:
        reading, rows = _file_rows(Path(data.path).expanduser(), glue, split, labelled, not training)
    readings.append(reading)
    ids: list[str] = []
    watched = _watched(rows, None if glue.labels else label, ids, reading)
    target = Target(glue.label, glue.labels)
    examples = encode_rows(
        watched,
        glue.texts,
        target,
        tokenizer,
        data.seq_len,
        reading,
        labelled=labelled,
        training=training,
    )
    return Split(examples, [] if labelled else ids, functools.partial(_table, data.path, glue, split))


def _watched(rows: Iterator[Row], score: str | None, ids: list[str], reading: ReadStats) -> Iterator[Row]:
    """The rows, of which it notes what they are called, and scores no annotator gave."""
    low, high = SCORE_RANGE
    for row in rows:
        ids.append(row.fields.get(_INDEX, ""))
        with contextlib.suppress(ValueError):
            if score and not low <= float(row.fields[score]) <= high:
                reading.note(f"with a score beyond {low:g} to {high:g}", row.line)
        yield row


def _file_rows(
    folder: Path, glue: GlueTask, split: str, labelled: bool, keep_short: bool
) -> tuple[ReadStats, Iterator[Row]]:
    path = file_of(folder, glue, split)
    if path is None:
        name = _name(glue, split)
        raise UsageError(f"there is no {folder / glue.folder / name} and no {folder / name}")
    columns = (*glue.texts, glue.label) if labelled else glue.texts
    reading = ReadStats(str(path))
    return reading, read_table(
        path,
        columns,
        reading,
        optional=() if labelled else (_INDEX,),
        header=glue.header if labelled and glue.header else True,
        keep_short=keep_short,
    )


def _table(path: str, glue: GlueTask, split: str, columns: Sequence[str]) -> Iterator[Row]:
    """All rows of a set, with columns that a user names; those of TFDS are its features."""
    if path.startswith(PREFIX):
        dataset, theirs = _dataset(path.removeprefix(PREFIX), glue, split)
        return read_tfds(dataset, theirs, {column: column for column in columns}, ReadStats(dataset))
    file = file_of(Path(path).expanduser(), glue, split)
    header = glue.header if glue.header and not split.startswith("test") else True
    return read_table(file, columns, ReadStats(str(file)), header=header, keep_short=True)


def _tfds_rows(name: str, glue: GlueTask, split: str, labelled: bool) -> tuple[ReadStats, Iterator[Row]]:
    """TFDS names MNLI's texts otherwise, its splits `validation`, and its classes where GLUE numbers them."""
    features = _TFDS_TEXTS.get(_name_of(glue), glue.texts)
    columns = dict(zip(glue.texts, features, strict=True)) | ({glue.label: "label"} if labelled else {})
    dataset, split = _dataset(name, glue, split)
    reading = ReadStats(f"tfds:{dataset.rpartition(':')[2]}:{split}")
    named = bool(glue.labels) and glue.labels != _NUMBERED
    return reading, read_tfds(
        dataset,
        split,
        columns,
        reading,
        optional={_INDEX: _TFDS_INDEX},
        named_labels=named,
    )


def _dataset(name: str, glue: GlueTask, split: str) -> tuple[str, str]:
    """The dataset of TFDS, with its directory, and its name of a split."""
    directory, colon, dataset = name.rpartition(":")
    dataset = dataset if "/" in dataset else f"{dataset}/{_name_of(glue)}"
    theirs = "test" if glue.folder == _DIAGNOSTIC else split.replace("dev", "validation")
    return f"{directory}{colon}{dataset}", theirs


def _name_of(glue: GlueTask) -> str:
    return next(key for key, value in TASKS.items() if value is glue)


def _name(glue: GlueTask, split: str) -> str:
    return f"{_DIAGNOSTIC if glue.folder == _DIAGNOSTIC else split}.tsv"


def file_of(folder: Path, glue: GlueTask, split: str) -> Path | None:
    """GLUE's file of a split, in the archive's folder or in the task's own; None where it is in neither."""
    name = _name(glue, split)
    # The diagnostic set is in a folder AX or diagnostic, depending on the archive.
    folders = [folder / glue.folder, *([folder / "AX"] if glue.folder == _DIAGNOSTIC else []), folder]
    return next((place / name for place in folders if (place / name).is_file()), None)
