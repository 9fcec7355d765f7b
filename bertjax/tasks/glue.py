"""The nine GLUE tasks and its diagnostic set (section 4.1 of the paper), from GLUE's own files or from TFDS."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bertjax.config.fields import one_of
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, in_input_order, joined
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tfds_rows import PREFIX
from bertjax.errors import UsageError
from bertjax.metrics import classification as metrics
from bertjax.metrics.report import ClassReport, of_classes
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.glue_data import SCORE_RANGE, TASKS, GlueTask, Split, file_of, read
from bertjax.tasks.finetuning.output_layer import CLASSES, OutputLayer
from bertjax.tasks.finetuning.records import FileRecords, Record, of_class, of_number
from bertjax.tasks.finetuning.settings import SPLITS, FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.finetuning.weighting import PLAIN, Weighting, weighting_of
from bertjax.tasks.objectives import classes as objectives
from bertjax.tasks.task import Task
from bertjax.utils.io import write_atomic

# Suffix of the diagnostic set's metrics.
_AX = "_ax"
# Of a task with several dev sets, each has these of its own.
_LOSSES = ("cross_entropy", "loss")


@dataclasses.dataclass(frozen=True)
class GlueData(FinetuningData):
    """What is read, and in which batches.

    Attributes:
      task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or ax.
    """

    task: str = "mrpc"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "config.data", task=tuple(TASKS))


@dataclasses.dataclass(frozen=True)
class Config(FinetuningConfig):
    """Settings of the task."""

    task: str = "glue"
    data: GlueData = GlueData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not TASKS[self.data.task].labels:
            self.refuse(f"{self.data.task} has numbers, not classes", "label_smoothing", "data.class_weights")


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on the files in their folder; without one, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files that are not the task's.
    """
    name = settings.data.task
    glue = TASKS[name]
    if not settings.has_data:
        if train:
            raise UsageError(f"give GLUE's files: --config.data.path=DIR, which holds {glue.folder}/train.tsv")
        return synthetic_task(settings, functools.partial(objectives.sequence_objective, glue.labels))
    vocabulary = finetuning.vocabulary_of(settings)
    model = finetuning.model_of(settings, vocabulary)
    readings: list[ReadStats] = []
    encode = functools.partial(read, settings.data, Tokenizer(vocabulary), readings)
    if train and name == "ax":
        raise UsageError("ax has no training set; predict it with a checkpoint of mnli")
    data, split = settings.data, splits.evaluated(settings.data, train)
    sets: dict[str, Split] = {}
    if split in SPLITS:
        sets = {suffix: encode(glue, f"{split}{middle}") for suffix, middle in glue.evaluated.items()}
    in_tfds = data.path.startswith(PREFIX)
    if name == "mnli" and split == "test" and (in_tfds or file_of(Path(data.path).expanduser(), TASKS["ax"], split)):
        sets[_AX] = encode(TASKS["ax"], split)
    evaluated_on = [reading.file for reading in readings]
    trained = None
    if train or split == splits.SHARE:
        whole = encode(glue, "train")
        trained, dev = splits.divided(data, whole.examples, readings)
        if dev is not None and split == splits.SHARE:
            sets, evaluated_on = {"": Split(dev, [], whole.table)}, [readings[-1].file]
    several = len(sets) > 1 and bool(glue.labels)
    return finetuning.make_task(
        settings,
        objectives.sequence_objective(glue.labels, model, _weighting(settings, glue, trained if train else None)),
        vocabulary,
        trained if train else None,
        joined([part.examples for part in sets.values()]) if sets else None,
        readings,
        # The diagnostic set is predicted with a model of MNLI.
        layer=OutputLayer(CLASSES, glue.labels, "glue/mnli" if name == "ax" else f"glue/{name}", len(glue.texts)),
        score=functools.partial(_score, glue, sets),
        baseline=functools.partial(_baseline, glue, sets),
        best_by=glue.metrics[0],
        write=functools.partial(_write, glue, sets),
        records=[
            FileRecords(
                f"{Path(_submission(glue, suffix)).stem}.jsonl",
                functools.partial(_records, glue, sets, suffix),
                part.examples.lines,
                part.table,
            )
            for suffix, part in sets.items()
        ],
        evaluated_on=", ".join(evaluated_on),
        is_labelled=any(finetuning.known(part.labels).any() for part in sets.values()),
        per_class=functools.partial(_per_class, glue, sets) if glue.labels else None,
        more_metrics=[f"{name}{suffix}" for suffix in sets for name in _LOSSES] if several else (),
    )


def _weighting(settings: Config, glue: GlueTask, trained: Examples | None) -> Weighting:
    return weighting_of(settings, glue.labels, trained.rows["labels"]) if trained and glue.labels else PLAIN


def _parts(sets: dict[str, Split], outputs: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Logits of each evaluation set, in input order."""
    logits = np.array(in_input_order(outputs, sum(map(len, sets.values())))["logits"])
    cuts = np.cumsum([len(examples) for examples in sets.values()])[:-1]
    return dict(zip(sets, np.split(logits, cuts), strict=True))


def _score(glue: GlueTask, sets: dict[str, Split], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
    parts = _parts(sets, outputs)
    found = _measured(glue, sets, {suffix: _predictions(glue, part) for suffix, part in parts.items()})
    if len(sets) > 1 and glue.labels:
        # Of all sets together they would be those of none.
        for suffix, logits in parts.items():
            there = finetuning.known(sets[suffix].labels)
            if there.any():
                loss = metrics.cross_entropy(logits[there], sets[suffix].labels[there])
                found |= {f"{name}{suffix}": loss for name in _LOSSES}
    return found


def _per_class(glue: GlueTask, sets: dict[str, Split], outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
    found = {}
    for suffix, logits in _parts(sets, outputs).items():
        there = finetuning.known(sets[suffix].labels)
        if there.any():
            found[suffix] = of_classes(glue.labels, logits[there].argmax(axis=-1), sets[suffix].labels[there])
    return found


def _measured(glue: GlueTask, sets: dict[str, Split], predictions: dict[str, np.ndarray]) -> dict[str, float]:
    found = {}
    for suffix, predicted in predictions.items():
        labels = sets[suffix].labels
        there = finetuning.known(labels)
        if there.any():
            pair = predicted[there], labels[there]
            found |= {f"{name}{suffix}": getattr(metrics, name)(*pair) for name in glue.metrics}
    return found


def _predictions(glue: GlueTask, logits: np.ndarray) -> np.ndarray:
    return logits.argmax(axis=-1) if glue.labels else np.clip(logits, *SCORE_RANGE)


def _baseline(glue: GlueTask, sets: dict[str, Split]) -> dict[str, float]:
    """The most frequent label of the evaluated set, or its mean, for every example."""
    known = {suffix: part.labels for suffix, part in sets.items() if finetuning.known(part.labels).any()}
    return _measured(glue, sets, {suffix: finetuning.constant_guess(labels) for suffix, labels in known.items()})


def _write(glue: GlueTask, sets: dict[str, Split], outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
    """Files as the GLUE server takes them: `index` and `prediction`, with a header, in the order of the indices."""
    written = []
    for suffix, logits in _parts(sets, outputs).items():
        predicted = _predictions(glue, logits)
        shown = [glue.labels[index] for index in predicted] if glue.labels else [f"{value:.3f}" for value in predicted]
        rows = sorted(zip(_indices(sets[suffix].ids, len(shown)), shown, strict=True))
        lines = "".join(f"{index}\t{value}\n" for index, value in rows)
        written.append(write_atomic(folder / _submission(glue, suffix), "index\tprediction\n" + lines))
    return written


def _submission(glue: GlueTask, suffix: str) -> str:
    """The file that the GLUE server takes for an evaluation set."""
    return {**glue.submission, _AX: "AX.tsv"}[suffix]


def _records(
    glue: GlueTask, sets: dict[str, Split], suffix: str, outputs: list[dict[str, np.ndarray]], logits: bool
) -> Iterator[Record]:
    for row in _parts(sets, outputs)[suffix]:
        yield of_class(glue.labels, row, logits) if glue.labels else of_number(_predictions(glue, row))


def _indices(ids: list[str], count: int) -> list[int]:
    """What the rows are called where these are numbers of their own, else their places."""
    if len(ids) == count and all(id_.isascii() and id_.isdigit() for id_ in ids) and len({*map(int, ids)}) == len(ids):
        return list(map(int, ids))
    return list(range(count))
