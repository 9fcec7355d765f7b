"""Predictions for a task's data: its official files, and JSON lines with one record per row of the data."""

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
    config: RunConfig,
    task: Task,
    checkpoint: epath.Path,
    folder: str,
    logits: bool = False,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Predicts all evaluation examples of a task and writes the prediction files.

    Args:
      config: config of the task.
      task: task built from `config`.
      checkpoint: checkpoint of that task.
      folder: output folder; created if needed.
      logits: add logits to the records.
      columns: columns of the data file to copy into the records.

    Returns:
      Paths of the files.
    """
    mesh, params = mesh_and_params(task, checkpoint)
    # Last of the checks, since it creates the folder.
    check_output(task, config.task, folder, columns)
    return write_outputs(task, predict(task, mesh, params)[1], folder, logits, columns)


def check_output(task: Task, task_name: str, folder: str, columns: Sequence[str] = ()) -> None:
    """Creates the folder and raises if `write_outputs` would fail, before any prediction."""
    if not task.writes_predictions:
        raise UsageError(f"the task {task_name} has no prediction files; use `bertjax evaluate`")
    for file_records in task.prediction_records():
        _check_columns(file_records, columns)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BertjaxError(f"cannot make the folder {folder}: {error.strerror}; choose another --output") from error


def write_outputs(
    task: Task, outputs: list[dict[str, np.ndarray]], folder: str, logits: bool = False, columns: Sequence[str] = ()
) -> list[Path]:
    """Writes the prediction files from model outputs; see `write_predictions`."""
    paths = task.write_predictions(outputs, Path(folder))
    for file_records in task.prediction_records():
        path = Path(folder) / file_records.file_name
        _write_json_lines(path, _add_columns(file_records, file_records.make(outputs, logits), columns))
        paths.append(path)
    return paths


def _check_columns(file_records: PredictionRecords, columns: Sequence[str]) -> None:
    if not columns:
        return
    if file_records.read_columns is None:
        raise UsageError("--columns needs data with named columns, which this task does not have")
    if reserved := [column for column in columns if column in FIELDS]:
        raise UsageError(f"--columns={reserved[0]!r} is the name of another field of the records; leave it out")
    empty = {*columns}
    for row in file_records.read_columns(columns):
        empty -= {column for column in columns if row.fields[column]}
        if not empty:
            return
    raise UsageError(f"--columns={min(empty)!r} is empty in every row of the file; leave it out")


def _add_columns(
    file_records: PredictionRecords, records: Iterable[Record], columns: Sequence[str]
) -> Iterator[Record]:
    """Yields records with their line numbers and columns, which are read from the data file again."""
    if not file_records.lines:
        yield from records
        return
    rows = file_records.read_columns(columns) if columns else iter(())
    for line, record in zip(file_records.lines, records, strict=True):
        fields = next(row.fields for row in rows if row.line == line) if columns else {}
        yield {"line": line, **fields, **record}


def _write_json_lines(path: Path, records: Iterable[Record]) -> None:
    try:
        with contextlib.ExitStack() as stack:
            unfinished = stack.enter_context(atomic_file(path))
            # Lone surrogates become JSON escapes.
            file = stack.enter_context(open(unfinished, "w", encoding="utf-8", errors="backslashreplace"))
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error
