"""The nine GLUE tasks and the diagnostic set (section 4.1 of the paper), from GLUE's original files or from TFDS."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.data.finetuning.dataset_rows import TFDS_PREFIX, read_tfds
from bertjax.data.finetuning.examples import known_labels
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row, read_table
from bertjax.errors import UsageError
from bertjax.metrics.classification import cross_entropy
from bertjax.metrics.metric import Metric
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.output_layer import CLASSES, OutputLayer
from bertjax.tasks.finetuning.rows import RowsTask
from bertjax.tasks.objectives.classification import LabelObjective, sequence_objective
from bertjax.utils.io import write_atomic
from bertjax.utils.sections import bounded

# Suffix of the diagnostic set's metrics.
_AX_SUFFIX = "_ax"
# Losses that a task with several evaluation sets also reports for each set separately.
_LOSSES = ("cross_entropy", "loss")


@dataclasses.dataclass(frozen=True)
class GlueSpec:
    """Files, columns, labels and metrics of one GLUE task."""

    folder: str  # folder of the task's files in GLUE's archive
    texts: tuple[str, ...]  # columns of the one or two sentences
    label: str  # column of the label
    labels: tuple[str, ...]  # names of the classes by id. Empty for regression.
    # Names in `bertjax.metrics.classification.METRICS`. The first one selects the best checkpoint.
    metrics: tuple[str, ...]
    # File suffix of each evaluation set, such as `_matched`, keyed by the suffix of its metric names.
    eval_sets: dict[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    # Column names of train and dev files without a header line (default: (), the files have a header line).
    header: tuple[str, ...] = ()
    tfds_texts: tuple[str, ...] = ()  # TFDS feature names of the sentences (default: (), those in `texts`)


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
# Name of the diagnostic set's folder, file and split.
DIAGNOSTIC = "diagnostic"
_NLI = ("contradiction", "entailment", "neutral")
_TFDS_NLI = ("premise", "hypothesis")
_MNLI_SETS = {"": "_matched", "_mismatched": "_mismatched"}
# File names for the GLUE server, keyed by metric suffix. The files of other tasks are named after the task's folder.
_MNLI_FILES = {"": "MNLI-m", "_mismatched": "MNLI-mm", _AX_SUFFIX: "AX"}
_COLA = ("source", "label", "star", "sentence")
SPECS = {
    "cola": GlueSpec("CoLA", ("sentence",), "label", _BINARY, ("matthews", "accuracy"), header=_COLA),
    "sst2": GlueSpec("SST-2", ("sentence",), "label", _BINARY, ("accuracy",)),
    "mrpc": GlueSpec("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("f1", "accuracy"), tfds_texts=_PAIR),
    "stsb": GlueSpec("STS-B", _PAIR, "score", (), ("spearman", "pearson")),
    "qqp": GlueSpec("QQP", ("question1", "question2"), "is_duplicate", _BINARY, ("f1", "accuracy")),
    "mnli": GlueSpec("MNLI", _PAIR, "gold_label", _NLI, ("accuracy",), _MNLI_SETS, tfds_texts=_TFDS_NLI),
    "qnli": GlueSpec("QNLI", ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",)),
    "rte": GlueSpec("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",)),
    "wnli": GlueSpec("WNLI", _PAIR, "label", _BINARY, ("accuracy",)),
    # The diagnostic set has only test data; its labels are predicted by a model trained on MNLI.
    "ax": GlueSpec("AX", _PAIR, "gold_label", _NLI, ("accuracy",), tfds_texts=_TFDS_NLI),
}
# Range of STS-B's scores. The GLUE server rejects other scores.
SCORE_RANGE = (0.0, 5.0)
# Column of the row id. Submissions are sorted by row id, because TFDS does not preserve the order of rows.
INDEX = "index"


@dataclasses.dataclass(frozen=True)
class GlueData(FinetuningData):
    """Data and batches of a GLUE task.

    Attributes:
      task: GLUE task: `cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte`, `wnli` or `ax`.
    """

    task: str = bounded("mrpc", choices=tuple(SPECS))


@dataclasses.dataclass(frozen=True)
class GlueConfig(FinetuningConfig):
    """Config for a GLUE task."""

    task: str = "glue"
    data: GlueData = GlueData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not SPECS[self.data.task].labels:
            reason = f"the labels of {self.data.task} are numbers, not classes"
            self.reject(reason, "label_smoothing", "data.class_weights")


class GlueTask(RowsTask):
    """One GLUE task. MNLI has two dev sets and two test sets. `ax` is predicted along with the test sets of MNLI."""

    config: GlueConfig

    def __init__(self, config: GlueConfig, train: bool = True) -> None:
        self._spec = spec = SPECS[config.data.task]
        self.missing_data = f"no data; set --config.data.path to GLUE's folder, which contains {spec.folder}/train.tsv"
        if train and config.has_data and config.data.task == "ax":
            raise UsageError("ax has no training set; train on mnli, then use that checkpoint to predict ax")
        self.labels, self.metrics, self.sequences = spec.labels, spec.metrics, (spec.texts,)
        self.target = Target(spec.label, spec.labels)
        super().__init__(config, train)

    def make_objective(self, model: ModelConfig) -> LabelObjective:
        return sequence_objective(self.labels, model, self.class_weighting())

    def output_layer(self) -> OutputLayer:
        name = "mnli" if self.config.data.task == "ax" else self.config.data.task
        return OutputLayer(CLASSES, self._spec.labels, f"glue/{name}", len(self._spec.texts))

    def eval_splits(self) -> dict[str, str]:
        if self.split == splits.HELD_OUT:
            return super().eval_splits()
        if self.config.data.task == "ax":
            return {"": DIAGNOSTIC}
        names = {suffix: f"{self.split}{name}" for suffix, name in self._spec.eval_sets.items()}
        # With TFDS, the diagnostic set is always available.
        has_diagnostic = self._is_tfds or any(file.is_file() for file in self._files(DIAGNOSTIC))
        if self.config.data.task == "mnli" and self.split == "test" and has_diagnostic:
            names[_AX_SUFFIX] = DIAGNOSTIC
        return names

    def has_labels(self, split: str) -> bool:
        return split != DIAGNOSTIC and super().has_labels(split)

    def read_rows(self, split: str, columns: Sequence[str], keep_short: bool) -> tuple[Iterator[Row], ReadStats]:
        """Reads columns of a split, such as `dev_matched`, from GLUE's files or from TFDS."""
        spec, path = SPECS["ax"] if split == DIAGNOSTIC else self._spec, self.config.data.path
        if self._is_tfds:
            # A data folder may precede the name of the dataset, as in `DIR:glue/mnli`.
            folder, colon, dataset = path.removeprefix(TFDS_PREFIX).rpartition(":")
            if "/" not in dataset:
                dataset += f"/{'ax' if split == DIAGNOSTIC else self.config.data.task}"
            split = "test" if split == DIAGNOSTIC else split.replace("dev", "validation")
            features = dict(zip(spec.texts, spec.tfds_texts or spec.texts, strict=True))
            features |= {spec.label: "label", INDEX: "idx"}
            features = {name: features.get(name, name) for name in columns}
            stats = ReadStats(f"{TFDS_PREFIX}{dataset}:{split}")
            is_named = spec.labels not in ((), _BINARY)
            return read_tfds(folder + colon + dataset, split, features, stats, named_labels=is_named), stats
        files = self._files(split)
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise UsageError(f"no file {files[0]} or {files[-1]}; set config.data.path to the folder of the GLUE data")
        stats = ReadStats(str(file))
        header = () if split.startswith("test") else spec.header
        # Do not reject quoted fields, because official files have irregular rows, and their quotes are text.
        return read_table(file, columns, stats, header=header, keep_short=keep_short, reject_quoted=False), stats

    @property
    def _is_tfds(self) -> bool:
        return self.config.data.path.startswith(TFDS_PREFIX)

    def _files(self, split: str) -> list[Path]:
        """Returns the possible paths of a split's file, in the task's subfolder or in `config.data.path` itself."""
        folder = Path(self.config.data.path).expanduser()
        # The folder of the diagnostic set is called AX in some archives, and diagnostic in others.
        names = (DIAGNOSTIC, SPECS["ax"].folder) if split == DIAGNOSTIC else (self._spec.folder,)
        return [folder / name / f"{split}.tsv" for name in (*names, "")]

    def extra_metrics(self) -> list[Metric]:
        names = [f"{name}{suffix}" for suffix in self.sets for name in _LOSSES] if self._has_several_sets() else []
        return [Metric(name, lower_is_better=True) for name in names]

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        values = super().score(outputs)
        if self._has_several_sets():
            for suffix, logits in self.logits_by_set(outputs).items():
                labels = self.sets[suffix].rows["labels"]
                known = known_labels(labels)
                if known.any():
                    loss = cross_entropy(logits[known], labels[known])
                    values |= {f"{name}{suffix}": loss for name in _LOSSES}
        return values

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes files for the GLUE server, with the columns `index` and `prediction`, sorted by index."""
        files = []
        for suffix, logits in self.logits_by_set(outputs).items():
            predictions = self.predictions(logits)
            texts = [self.labels[value] if self.labels else f"{value:.3f}" for value in predictions]
            rows = sorted(zip(self._row_indices(suffix, len(texts)), texts, strict=True))
            lines = "".join(f"{index}\t{text}\n" for index, text in rows)
            files.append(write_atomic(folder / f"{self._file_name(suffix)}.tsv", "index\tprediction\n" + lines))
        return files

    def records_file(self, suffix: str) -> str:
        return f"{self._file_name(suffix)}.jsonl"

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        return super().predictions(logits) if self.labels else np.clip(logits, *SCORE_RANGE)

    def _has_several_sets(self) -> bool:
        return len(self.sets) > 1 and bool(self.labels)

    def _file_name(self, suffix: str) -> str:
        return _MNLI_FILES[suffix] if self.config.data.task == "mnli" else self._spec.folder

    def _row_indices(self, suffix: str, count: int) -> list[int]:
        """Returns a test set's column `index`, or 0 to count - 1 if it is missing or not unique."""
        split = self.eval_splits()[suffix]
        if not self.has_labels(split):
            with contextlib.suppress(UsageError):
                ids = [row.fields[INDEX] for row in self.read_rows(split, (INDEX,), keep_short=True)[0]]
                if all(id_.isascii() and id_.isdigit() for id_ in ids) and len({*map(int, ids)}) == count:
                    return list(map(int, ids))
        return list(range(count))
