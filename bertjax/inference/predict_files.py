"""Predictions of a task's data: the official files, and beside each an object of JSON for every row of the data."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.finetuning.records import FIELDS, PredictionRecords, Record
from bertjax.tasks.task import Task
from bertjax.training.evaluation import mesh_and_params, predict
from bertjax.utils.io import atomic_file


def write_predictions(
    settings: RunConfig,
    task: Task,
    checkpoint: epath.Path,
    folder: str,
    logits: bool = False,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Predicts all evaluation examples of a task and writes them in its official format, and as records.

    Args:
      settings, task: built from them.
      checkpoint: of that task.
      folder: made where it is not there.
      logits: whether the records have them.
      columns: of the data's file, which records are to have.

    Returns:
      The files.

    Raises:
      UsageError: the task has no such format, its data no such column, or the checkpoint does not fit the settings'
        model.
      BertjaxError: the folder cannot be written.
    """
    check_writable(task, settings.task, folder, columns)
    mesh, params = mesh_and_params(task, checkpoint)
    return write_outputs(task, predict(task, mesh, params)[1], folder, logits, columns)


def check_writable(task: Task, name: str, folder: str, columns: Sequence[str]) -> None:
    """Makes the folder, and refuses what cannot be written there before anything is predicted.

    Raises:
      UsageError, BertjaxError: as `write_predictions`.
    """
    if not task.writes_predictions:
        raise UsageError(f"the task {name} has no predictions to write")
    for part in task.prediction_records():
        _check_columns(part, columns)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BertjaxError(f"cannot make the folder {folder} ({error.strerror}); choose another --output") from error


def write_outputs(
    task: Task, outputs: list[dict[str, np.ndarray]], folder: str, logits: bool = False, columns: Sequence[str] = ()
) -> list[Path]:
    """Writes what was found for the evaluation examples; see `write_predictions`."""
    written = task.write_predictions(outputs, Path(folder))
    for part in task.prediction_records():
        path = Path(folder) / part.file_name
        _write_lines(path, _with_rows(part, part.make(outputs, logits), columns))
        written.append(path)
    return written


def _check_columns(part: PredictionRecords, columns: Sequence[str]) -> None:
    """Refuses columns before anything is predicted."""
    if not columns:
        return
    if part.read_columns is None:
        raise UsageError("--columns is for data in columns with names, which this task's has not")
    taken = [column for column in columns if column in FIELDS]
    if taken:
        raise UsageError(f"--columns has {taken[0]!r}, a name that records have for something else")
    empty = {*columns}
    for row in part.read_columns(columns):
        empty -= {column for column in columns if row.fields[column]}
        if not empty:
            return
    raise UsageError(f"--columns has {min(empty)!r}, which is empty in every row of the file")


def _with_rows(part: PredictionRecords, records: Iterable[Record], columns: Sequence[str]) -> Iterator[Record]:
    """The records with the lines they are of, and what these have in the columns.

    The file is read once more, so that what was not asked for need not be held.
    """
    if not part.lines:
        yield from records
        return
    rows = part.read_columns(columns) if columns else iter(())
    for line, record in zip(part.lines, records, strict=True):
        fields = next(row.fields for row in rows if row.line == line) if columns else {}
        yield {"line": line, **fields, **record}


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    try:
        # Half a surrogate pair becomes the escape that JSON has for it.
        with contextlib.ExitStack() as stack:
            unfinished = stack.enter_context(atomic_file(path))
            file = stack.enter_context(open(unfinished, "w", encoding="utf-8", errors="backslashreplace"))
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error
