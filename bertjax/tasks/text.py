"""A user's own sentences, pairs of them or words, with a class, a number or tags, from TSV, CSV or JSON Lines."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.data.examples import Examples, in_input_order
from bertjax.data.labelled_text import encode_rows, label_of
from bertjax.data.tables import FORMATS, Reading, Row, read_table
from bertjax.data.tagged import Tagged, tagged_rows
from bertjax.errors import UsageError
from bertjax.files import write_whole
from bertjax.metrics import classification as metrics
from bertjax.tasks import finetuning, objectives, tagging
from bertjax.tasks.output_layer import saved_labels
from bertjax.tasks.records import RECORDS, FileRecords, Record, of_class, of_number
from bertjax.tasks.task import Task

KINDS = ("classes", "number", "tags")


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    finetuning.check(config)
    data = config.data
    named = [name for name in (data.text, data.second_text, data.label) if name]
    if len({*named}) < len(named):
        raise UsageError(f"text, second and label name one column twice: {', '.join(named)}")
    if data.kind == "tags" and data.second_text:
        raise UsageError("kind=tags takes one text a row; leave second out")
    if config.data.kind not in KINDS:
        raise UsageError(f"config.data.kind is {config.data.kind!r}; known: {', '.join(KINDS)}")


def has_data(config: ConfigDict) -> bool:
    """Whether a config names any file."""
    return bool(config.data.train_file or config.data.dev_file or config.data.test_file)


def build(config: ConfigDict, train: bool = True) -> Task:
    """The task of a config, on the files it names; without any, a task that has synthetic batches only.

    Raises:
      UsageError: no files, or files without the columns that are named.
    """
    data = config.data
    if train and not data.train_file or not has_data(config):
        if train:
            raise UsageError("give your files: --config.data.train_file=FILE and --config.data.dev_file=FILE")
        if data.kind == "tags":
            return finetuning.synthetic_task(config, functools.partial(tagging.objective, tags=2))
        return finetuning.synthetic_task(config, functools.partial(objectives.sequence_objective, ("0", "1")))
    vocabulary = finetuning.vocabulary_of(config)
    if data.kind == "tags":
        return _tagging(config, vocabulary, train)
    model = finetuning.model_of(config, vocabulary)
    readings: list[Reading] = []
    labels: Sequence[str] = ()
    if data.kind == "classes":
        labels = (saved_labels(config.data.labels) if not train else None) or _labels(data)
    read = functools.partial(_read, data, Tokenizer(vocabulary), labels, readings)
    trained = read(data.train_file, True) if train else None
    examples = read(data.dev_file, True) if data.eval_split == "dev" else read(data.test_file, False)
    return finetuning.make_task(
        config,
        objectives.sequence_objective(labels, model),
        vocabulary,
        trained,
        examples,
        readings,
        output=f"text/{data.kind}{'/pair' if data.second_text else ''}",
        labels=labels,
        score=lambda outputs: _measured(labels, examples, _values(labels, examples, outputs)),
        baseline=lambda: _baseline(labels, examples),
        best_by="accuracy" if labels else "pearson",
        write=functools.partial(_write, labels, examples),
        records=[
            FileRecords(RECORDS, functools.partial(_records, labels, examples), examples.lines, _evaluated_table(data))
        ],
    )


def _tagging(config: ConfigDict, vocabulary: Vocabulary, train: bool) -> Task:
    data = config.data
    readings: list[Reading] = []

    def read(file: str, labelled: bool) -> Tagged:
        label = data.label if labelled else None
        rows, reading = _open(data, file, [data.text, *([label] if label else [])], labelled)
        readings.append(reading)
        return tagged_rows(rows, data.text, label, reading)

    labels = saved_labels(config.data.labels)
    trained = read(data.train_file, True) if train or labels is None else None
    tagged = read(data.dev_file, True) if data.eval_split == "dev" else read(data.test_file, False)
    return tagging.tagging_task(
        config,
        vocabulary,
        labels or tagging.tags_of(trained),
        trained if train else None,
        tagged,
        readings,
        output=f"text/{data.kind}",
        documents=False,
        table=_evaluated_table(data),
    )


def _evaluated_table(data: ConfigDict) -> Callable[[Sequence[str]], Iterator[Row]]:
    """Columns to all rows of the file that is evaluated."""
    file = data.dev_file if data.eval_split == "dev" else data.test_file
    return lambda columns: _open(data, file, columns, False)[0]


def _open(data: ConfigDict, file: str, columns: Sequence[str], labelled: bool) -> tuple[Iterator[Row], Reading]:
    if not file:
        raise UsageError("give the file to evaluate: --config.data.dev_file=FILE, or test_file for --split test")
    path = Path(data.path).expanduser() / file
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise UsageError(f"{path} ends with none of {', '.join(f'.{known}' for known in FORMATS)}")
    reading = Reading(str(path))
    return read_table(path, columns, reading, form=form, keep_short=not labelled), reading


def _labels(data: ConfigDict) -> list[str]:
    if not data.train_file:
        raise UsageError("the classes are those of the training file: --config.data.train_file=FILE")
    rows, reading = _open(data, data.train_file, [data.label], True)
    labels = sorted({label_of(row, data.label, reading) for row in rows} - {""})
    if len(labels) < 2:
        raise UsageError(
            f"the column {data.label!r} of {data.train_file} has {len(labels)} different labels; classes are at least "
            "2, for numbers give kind=number"
        )
    return labels


def _read(
    data: ConfigDict, tokenizer: Tokenizer, labels: Sequence[str], readings: list[Reading], file: str, labelled: bool
) -> Examples:
    texts = [data.text, *([data.second_text] if data.second_text else [])]
    label = data.label if labelled else None
    rows, reading = _open(data, file, [*texts, *([label] if label else [])], labelled)
    readings.append(reading)
    return encode_rows(rows, texts, label, labels, tokenizer, data.seq_len, reading)


def _values(labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
    logits = np.array(in_input_order(outputs, len(examples))["logits"])
    return logits.argmax(axis=-1) if labels else logits


def _measured(labels: Sequence[str], examples: Examples, values: np.ndarray) -> dict[str, float]:
    wanted = examples.rows["labels"]
    if not finetuning.are_known(wanted):
        return {}
    if labels:
        return {
            "accuracy": metrics.accuracy(values, wanted),
            "macro_f1": float(np.mean([metrics.f1(values == c, wanted == c) for c in range(len(labels))])),
            "matthews": metrics.matthews(values, wanted),
        }
    return {"pearson": metrics.pearson(values, wanted), "spearman": metrics.spearman(values, wanted)}


def _baseline(labels: Sequence[str], examples: Examples) -> dict[str, float]:
    """The most frequent class, or the mean, for every example."""
    return _measured(labels, examples, finetuning.constant_guess(examples.rows["labels"]))


def _write(labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
    """`prediction`, a line for each row that was used, in the order of the file."""
    values = _values(labels, examples, outputs)
    shown = [labels[value] for value in values] if labels else [f"{value:.6g}" for value in values]
    return [write_whole(folder / "predictions.tsv", "prediction\n" + "".join(f"{value}\n" for value in shown))]


def _records(
    labels: Sequence[str], examples: Examples, outputs: list[dict[str, np.ndarray]], logits: bool
) -> Iterator[Record]:
    for row in in_input_order(outputs, len(examples))["logits"]:
        yield of_class(labels, row, logits) if labels else of_number(row)
