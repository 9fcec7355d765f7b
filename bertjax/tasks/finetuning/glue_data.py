"""Specifications of the GLUE tasks, and readers of GLUE's original files and of TFDS datasets."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

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
      eval_sets: metric suffix and file suffix of each evaluation set, such as `_matched` in `dev_matched.tsv`.
      submission: name of each evaluation set's file for the GLUE server, by metric suffix (default: `FOLDER.tsv`).
      header: column names of train and dev files if they have no header line (default: (), they have one).
      tfds_texts: TFDS features of the sentences (default: (), named like `texts`).
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    eval_sets: dict[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    submission: dict[str, str] = dataclasses.field(default_factory=dict)
    header: tuple[str, ...] = ()
    tfds_texts: tuple[str, ...] = ()


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_DIAGNOSTIC = "diagnostic"
_NLI = ("contradiction", "entailment", "neutral")
_TFDS_NLI = ("premise", "hypothesis")
_COLA = ("source", "label", "star", "sentence")
SPECS = {
    "cola": GlueSpec("CoLA", ("sentence",), "label", _BINARY, ("matthews", "accuracy"), header=_COLA),
    "sst2": GlueSpec("SST-2", ("sentence",), "label", _BINARY, ("accuracy",)),
    "mrpc": GlueSpec("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("f1", "accuracy"), tfds_texts=_PAIR),
    "stsb": GlueSpec("STS-B", _PAIR, "score", (), ("spearman", "pearson")),
    "qqp": GlueSpec("QQP", ("question1", "question2"), "is_duplicate", _BINARY, ("f1", "accuracy")),
    "mnli": GlueSpec(
        "MNLI",
        _PAIR,
        "gold_label",
        _NLI,
        ("accuracy",),
        eval_sets={"": "_matched", "_mismatched": "_mismatched"},
        submission={"": "MNLI-m.tsv", "_mismatched": "MNLI-mm.tsv"},
        tfds_texts=_TFDS_NLI,
    ),
    "qnli": GlueSpec("QNLI", ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",)),
    "rte": GlueSpec("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",)),
    "wnli": GlueSpec("WNLI", _PAIR, "label", _BINARY, ("accuracy",)),
    # The diagnostic set has no training or dev set; its labels are predicted by a model trained on MNLI.
    "ax": GlueSpec(
        _DIAGNOSTIC, _PAIR, "gold_label", _NLI, ("accuracy",), submission={"": "AX.tsv"}, tfds_texts=_TFDS_NLI
    ),
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
    read_rows = functools.partial(_read_rows, data.path, spec, split)
    texts = dict(zip(spec.texts, spec.tfds_texts or spec.texts, strict=True))
    columns = texts | ({spec.label: "label"} if has_labels else {})
    optional = {} if has_labels else {_INDEX: _TFDS_INDEX}
    named_labels = bool(spec.labels) and spec.labels != _BINARY
    stats, rows = read_rows(columns, optional, keep_short=not training, named_labels=named_labels)
    read_stats.append(stats)
    ids: list[str] = []
    rows = _collect_ids(rows, None if spec.labels or not has_labels else spec.label, ids, stats)
    target = Target(spec.label, spec.labels)
    examples = encode_rows(
        rows, spec.texts, target, tokenizer, data.seq_len, stats, labeled=has_labels, training=training
    )
    return EvaluationSet(
        examples, [] if has_labels else ids, lambda names: read_rows({name: name for name in names})[1]
    )


def _collect_ids(rows: Iterator[Row], score: str | None, ids: list[str], stats: ReadStats) -> Iterator[Row]:
    """Yields the rows, appends their ids to `ids`, and counts in `stats` the scores outside STS-B's range."""
    low, high = SCORE_RANGE
    for row in rows:
        ids.append(row.fields.get(_INDEX, ""))
        with contextlib.suppress(ValueError):
            if score and not low <= float(row.fields[score]) <= high:
                stats.count_irregular(f"with a score outside {low:g} to {high:g}", row.line)
        yield row


def _read_rows(
    path: str,
    spec: GlueSpec,
    split: str,
    columns: Mapping[str, str],
    optional: Mapping[str, str] = MappingProxyType({}),
    keep_short: bool = True,
    named_labels: bool = True,
) -> tuple[ReadStats, Iterator[Row]]:
    """Reads columns of a split. `columns` and `optional` map column names of GLUE's files to features of TFDS."""
    if path.startswith(TFDS_PREFIX):
        dataset, split = _dataset(path.removeprefix(TFDS_PREFIX), spec, split)
        stats = ReadStats(f"tfds:{dataset.rpartition(':')[2]}:{split}")
        return stats, read_tfds(dataset, split, columns, stats, optional=optional, named_labels=named_labels)
    file = _require_file(Path(path).expanduser(), spec, split)
    stats = ReadStats(str(file))
    header = () if split.startswith("test") else spec.header
    return stats, read_table(file, [*columns], stats, optional=[*optional], header=header, keep_short=keep_short)


def _dataset(name: str, spec: GlueSpec, split: str) -> tuple[str, str]:
    """Returns the names of the TFDS dataset, such as `glue/mnli`, and of its split.

    If `name` contains a data folder, the name of the dataset starts with this folder: `DIR:glue/mnli`.
    """
    folder, colon, dataset = name.rpartition(":")
    dataset = dataset if "/" in dataset else f"{dataset}/{_task_name(spec)}"
    tfds_split = "test" if spec.folder == _DIAGNOSTIC else split.replace("dev", "validation")
    return f"{folder}{colon}{dataset}", tfds_split


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
