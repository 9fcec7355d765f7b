"""Specifications of the GLUE tasks, and readers of GLUE's original files and of TFDS datasets."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.labeled_text import Target, encode_rows
from bertjax.data.finetuning.tables import TFDS_PREFIX, ReadStats, Row, read_table, read_tfds
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import FinetuningData


@dataclasses.dataclass(frozen=True)
class GlueSpec:
    """Files, columns, labels and metrics of one GLUE task.

    MNLI has several evaluation sets. Each set adds a suffix to its metric names: "" or `_mismatched`.

    Attributes:
      folder: folder of the task's files in GLUE's archive.
      texts: columns of the one or two sentences.
      label: column of the label.
      labels: names of the classes by id. Empty for regression.
      metrics: names in `bertjax.metrics.classification.METRICS`. The first one selects the best checkpoint.
      submission: name of each evaluation set's file for the GLUE server, by metric suffix.
      eval_sets: text after `dev` or `test` in the name of each evaluation set's data file, by metric suffix.
      header: column names of train and dev files if they have no header line (default: (), they have one).
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submission: dict[str, str]
    eval_sets: dict[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    header: tuple[str, ...] = ()


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_DIAGNOSTIC = "diagnostic"
_NLI = ("contradiction", "entailment", "neutral")
SPECS = {
    "cola": GlueSpec(
        "CoLA",
        ("sentence",),
        "label",
        _BINARY,
        ("matthews", "accuracy"),
        {"": "CoLA.tsv"},
        header=("source", "label", "star", "sentence"),
    ),
    "sst2": GlueSpec("SST-2", ("sentence",), "label", _BINARY, ("accuracy",), {"": "SST-2.tsv"}),
    "mrpc": GlueSpec("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("f1", "accuracy"), {"": "MRPC.tsv"}),
    "stsb": GlueSpec("STS-B", _PAIR, "score", (), ("spearman", "pearson"), {"": "STS-B.tsv"}),
    "qqp": GlueSpec("QQP", ("question1", "question2"), "is_duplicate", _BINARY, ("f1", "accuracy"), {"": "QQP.tsv"}),
    "mnli": GlueSpec(
        "MNLI",
        _PAIR,
        "gold_label",
        _NLI,
        ("accuracy",),
        {"": "MNLI-m.tsv", "_mismatched": "MNLI-mm.tsv"},
        eval_sets={"": "_matched", "_mismatched": "_mismatched"},
    ),
    "qnli": GlueSpec("QNLI", ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",), {"": "QNLI.tsv"}),
    "rte": GlueSpec("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",), {"": "RTE.tsv"}),
    "wnli": GlueSpec("WNLI", _PAIR, "label", _BINARY, ("accuracy",), {"": "WNLI.tsv"}),
    # The diagnostic set has no training or dev set; its labels are predicted by a model trained on MNLI.
    "ax": GlueSpec(_DIAGNOSTIC, _PAIR, "gold_label", _NLI, ("accuracy",), {"": "AX.tsv"}),
}
_TFDS_TEXTS = {
    "mrpc": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "ax": ("premise", "hypothesis"),
}
# Range of STS-B's scores. The GLUE server rejects other scores.
SCORE_RANGE = (0.0, 5.0)
# Names of the column and of the TFDS feature that contain the row id. Submissions are sorted by row id, because TFDS
# does not keep the order of rows.
_INDEX, _TFDS_INDEX = "index", "idx"


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Examples of one split.

    Attributes:
      examples: encoded rows.
      ids: values of the column `index` of a test set. Empty for other sets.
      read_columns: function that yields the named columns of every row, including rows that `examples` skips.
    """

    examples: Examples
    ids: list[str]
    read_columns: Callable[[Sequence[str]], Iterator[Row]]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def labels(self) -> np.ndarray:
        """Labels of the examples: class ids (-1 if unknown) or numbers (NaN if unknown)."""
        return self.examples.rows["labels"]


def read_split(
    data: FinetuningData, tokenizer: Tokenizer, read_stats: list[ReadStats], spec: GlueSpec, split: str
) -> EvaluationSet:
    """Reads and encodes the rows of a split such as `dev_matched`. Appends row counts to `read_stats`."""
    has_labels = not split.startswith("test") and spec.folder != _DIAGNOSTIC
    training = split == "train"
    if data.path.startswith(TFDS_PREFIX):
        stats, rows = _tfds_rows(data.path.removeprefix(TFDS_PREFIX), spec, split, has_labels)
    else:
        stats, rows = _file_rows(Path(data.path).expanduser(), spec, split, has_labels, keep_short=not training)
    read_stats.append(stats)
    ids: list[str] = []
    rows = _collect_ids(rows, None if spec.labels or not has_labels else spec.label, ids, stats)
    target = Target(spec.label, spec.labels)
    examples = encode_rows(
        rows, spec.texts, target, tokenizer, data.seq_len, stats, labeled=has_labels, training=training
    )
    read_columns = functools.partial(_read_columns, data.path, spec, split)
    return EvaluationSet(examples, [] if has_labels else ids, read_columns)


def _collect_ids(rows: Iterator[Row], score: str | None, ids: list[str], stats: ReadStats) -> Iterator[Row]:
    """Yields the rows, appends their ids to `ids`, and counts in `stats` the scores outside STS-B's range."""
    low, high = SCORE_RANGE
    for row in rows:
        ids.append(row.fields.get(_INDEX, ""))
        with contextlib.suppress(ValueError):
            if score and not low <= float(row.fields[score]) <= high:
                stats.count_irregular(f"with a score outside {low:g} to {high:g}", row.line)
        yield row


def _file_rows(
    folder: Path, spec: GlueSpec, split: str, has_labels: bool, keep_short: bool
) -> tuple[ReadStats, Iterator[Row]]:
    path = _require_file(folder, spec, split)
    columns = (*spec.texts, spec.label) if has_labels else spec.texts
    stats = ReadStats(str(path))
    return stats, read_table(
        path,
        columns,
        stats,
        optional=() if has_labels else (_INDEX,),
        header=spec.header if has_labels else (),
        keep_short=keep_short,
    )


def _read_columns(path: str, spec: GlueSpec, split: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yields all rows of a split with the given columns or, for TFDS, the given features."""
    if path.startswith(TFDS_PREFIX):
        dataset, tfds_split = _dataset(path.removeprefix(TFDS_PREFIX), spec, split)
        return read_tfds(dataset, tfds_split, {column: column for column in columns}, ReadStats(dataset))
    file = _require_file(Path(path).expanduser(), spec, split)
    header = () if split.startswith("test") else spec.header
    return read_table(file, columns, ReadStats(str(file)), header=header, keep_short=True)


def _tfds_rows(name: str, spec: GlueSpec, split: str, has_labels: bool) -> tuple[ReadStats, Iterator[Row]]:
    """Reads a TFDS dataset, and converts its feature names and labels to the columns and labels of GLUE's files."""
    features = _TFDS_TEXTS.get(_task_name(spec), spec.texts)
    columns = dict(zip(spec.texts, features, strict=True)) | ({spec.label: "label"} if has_labels else {})
    dataset, split = _dataset(name, spec, split)
    stats = ReadStats(f"tfds:{dataset.rpartition(':')[2]}:{split}")
    named_labels = bool(spec.labels) and spec.labels != _BINARY
    optional = {_INDEX: _TFDS_INDEX}
    return stats, read_tfds(dataset, split, columns, stats, optional=optional, named_labels=named_labels)


def _dataset(name: str, spec: GlueSpec, split: str) -> tuple[str, str]:
    """Returns the names of the TFDS dataset, such as `glue/mnli`, and of its split.

    If `name` contains a data directory, the name of the dataset starts with this directory: `DIR:glue/mnli`.
    """
    directory, colon, dataset = name.rpartition(":")
    dataset = dataset if "/" in dataset else f"{dataset}/{_task_name(spec)}"
    tfds_split = "test" if spec.folder == _DIAGNOSTIC else split.replace("dev", "validation")
    return f"{directory}{colon}{dataset}", tfds_split


def _task_name(spec: GlueSpec) -> str:
    return next(name for name, value in SPECS.items() if value is spec)


def _file_name(spec: GlueSpec, split: str) -> str:
    return f"{_DIAGNOSTIC if spec.folder == _DIAGNOSTIC else split}.tsv"


def _require_file(folder: Path, spec: GlueSpec, split: str) -> Path:
    if path := find_file(folder, spec, split):
        return path
    name = _file_name(spec, split)
    raise UsageError(
        f"no file {folder / spec.folder / name} or {folder / name}; set config.data.path to the folder of the GLUE data"
    )


def find_file(folder: Path, spec: GlueSpec, split: str) -> Path | None:
    """Finds the file of a split in the task's subfolder or in `folder` itself. Returns None if no file exists."""
    name = _file_name(spec, split)
    # The folder of the diagnostic set is called AX in some archives, and diagnostic in others.
    folders = [folder / spec.folder, *([folder / "AX"] if spec.folder == _DIAGNOSTIC else []), folder]
    return next((place / name for place in folders if (place / name).is_file()), None)
