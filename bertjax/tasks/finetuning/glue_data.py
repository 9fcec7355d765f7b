"""Specifications of the GLUE tasks, and readers of GLUE's original files and of TFDS datasets."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertjax.data.finetuning.dataset_rows import TFDS_PREFIX, read_tfds
from bertjax.data.finetuning.tables import ReadStats, Row, read_table
from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class GlueSpec:
    """Files, columns, labels and metrics of one GLUE task.

    Attributes:
      folder: folder of the task's files in GLUE's archive.
      texts: columns of the one or two sentences.
      label: column of the label.
      labels: names of the classes by id. Empty for regression.
      metrics: names in `bertjax.metrics.classification.METRICS`. The first one selects the best checkpoint.
      eval_sets: file suffix of each evaluation set, such as `_matched`, by the suffix of its metric names.
      submission: name of each evaluation set's file for the GLUE server, by metric suffix (default: `FOLDER.tsv`).
      header: column names of train and dev files without a header line (default: (), the files have a header line).
      tfds_texts: TFDS features of the sentences (default: (), the names in `texts`).
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
# Name of the diagnostic set's folder, file and split.
DIAGNOSTIC = "diagnostic"
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
        DIAGNOSTIC, _PAIR, "gold_label", _NLI, ("accuracy",), submission={"": "AX.tsv"}, tfds_texts=_TFDS_NLI
    ),
}
# Range of STS-B's scores. The GLUE server rejects other scores.
SCORE_RANGE = (0.0, 5.0)
# Column of the row id. Submissions are sorted by row id, because TFDS does not preserve the order of rows.
INDEX = "index"


def read_rows(
    path: str, spec: GlueSpec, split: str, columns: Sequence[str], keep_short: bool
) -> tuple[Iterator[Row], ReadStats]:
    """Reads columns of a split such as `dev_matched` from GLUE's files, or from TFDS if `path` starts with `tfds:`.

    Returns the rows, and counts that are updated as the rows are read.
    """
    if path.startswith(TFDS_PREFIX):
        # A data folder may precede the name of the dataset, as in `DIR:glue/mnli`.
        folder, colon, dataset = path.removeprefix(TFDS_PREFIX).rpartition(":")
        if "/" not in dataset:
            dataset += f"/{next(name for name, value in SPECS.items() if value is spec)}"
        split = "test" if spec.folder == DIAGNOSTIC else split.replace("dev", "validation")
        features = dict(zip(spec.texts, spec.tfds_texts or spec.texts, strict=True))
        features |= {spec.label: "label", INDEX: "idx"}
        features = {name: features.get(name, name) for name in columns}
        stats = ReadStats(f"{TFDS_PREFIX}{dataset}:{split}")
        is_named = spec.labels not in ((), _BINARY)
        return read_tfds(folder + colon + dataset, split, features, stats, named_labels=is_named), stats
    folder = Path(path).expanduser()
    files = _files(folder, spec, split)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UsageError(f"no file {files[0]} or {files[-1]}; set config.data.path to the folder of the GLUE data")
    stats = ReadStats(str(file))
    header = () if split.startswith("test") else spec.header
    # Official files have rows with too few fields, so their quotes are always text.
    return read_table(file, columns, stats, header=header, keep_short=keep_short, reject_quoted=False), stats


def has_diagnostic(path: str) -> bool:
    """Returns whether `path` contains the diagnostic set. GLUE in TFDS always does."""
    is_tfds = path.startswith(TFDS_PREFIX)
    return is_tfds or any(file.is_file() for file in _files(Path(path).expanduser(), SPECS["ax"], DIAGNOSTIC))


def _files(folder: Path, spec: GlueSpec, split: str) -> list[Path]:
    """Returns the possible files of a split, in the task's subfolder or in `folder` itself."""
    if spec.folder != DIAGNOSTIC:
        return [folder / spec.folder / f"{split}.tsv", folder / f"{split}.tsv"]
    # The folder of the diagnostic set is called AX in some archives, and diagnostic in others.
    return [parent / f"{DIAGNOSTIC}.tsv" for parent in (folder / DIAGNOSTIC, folder / "AX", folder)]
