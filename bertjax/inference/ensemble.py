"""Several fine-tuned models as one: the mean of their logits, as for the paper's SQuAD 1.1 (Table 2)."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bertjax.config.fields import differences
from bertjax.config.run import RunConfig
from bertjax.data.corpus.vocabulary_files import ENTRY
from bertjax.errors import UsageError
from bertjax.inference.predict_files import check_writable, write_outputs
from bertjax.tasks.build import build_task
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import saved_fingerprint
from bertjax.training.evaluation import mesh_and_params, predict
from bertjax.training.workdir import CONFIG, RESULTS
from bertjax.utils.io import write_atomic

logger = logging.getLogger(__name__)

_Outputs = list[dict[str, np.ndarray]]
# Of the data's settings, what may differ: files of the checkpoint itself, and what members were trained with.
_MAY_DIFFER = ("vocabulary", "labels", "train_share", "batch_size", "class_weights")


def ensemble(
    checkpoints: Sequence[epath.Path], parse_config: Callable[[epath.Path], RunConfig], folder: str
) -> dict[str, Any]:
    """Predicts with all members, and writes what the mean of their logits says.

    The mean is of logits and not of probabilities, so that scores of windows stay comparable within a question.

    Args:
      checkpoints: of one task, with one vocabulary; sizes may differ.
      parse_config: a checkpoint to the settings with which it is to predict.
      folder: for the predictions, and for `results.json` with what is returned, the first member's config and the hash
        of the data.

    Returns:
      The metrics of the whole, none where the examples have no labels, and `members` with those of each.

    Raises:
      UsageError: the members do not fit together, the task has no predictions, or the folder is a workdir.
      BertjaxError: the folder cannot be written.
    """
    if len(checkpoints) < 2:
        raise UsageError("an ensemble is of two checkpoints at least; give --checkpoint once for each")
    if (Path(folder) / CONFIG).exists():
        raise UsageError(f"{folder} is the workdir of a run, whose {RESULTS} would be lost; name another folder")
    fingerprints = [saved_fingerprint(checkpoint) for checkpoint in checkpoints]
    for index, fingerprint in enumerate(fingerprints):
        if fingerprint in fingerprints[:index]:
            raise UsageError(f"{checkpoints[index]} has the same parameters as another member; give different ones")
    first: tuple[RunConfig, Task] | None = None
    mean: _Outputs = []
    members = []
    for number, (checkpoint, fingerprint) in enumerate(zip(checkpoints, fingerprints, strict=True), 1):
        logger.info(f"member {number} of {len(checkpoints)}: {checkpoint}")
        settings = parse_config(checkpoint)
        task = build_task(settings)
        if first is None:
            first = settings, task
            check_writable(task, settings.task, folder, ())
        _check_alike(*first, settings, task, checkpoint)
        outputs = predict(task, *mesh_and_params(task, checkpoint))[1]
        members.append({"fingerprint": fingerprint, **_scores(task, outputs)})
        mean = _moved(mean, outputs, number) if mean else outputs
    assert first is not None
    settings, task = first
    results = {**_scores(task, mean), "members": members}
    for path in write_outputs(task, mean, folder):
        logger.info(str(path))
    told = {"config": dataclasses.asdict(settings), "data_sha256": task.data_hash}
    write_atomic(Path(folder) / RESULTS, json.dumps({**results, **told}, indent=1) + "\n")
    return results


def _check_alike(first: RunConfig, task: Task, settings: RunConfig, other: Task, checkpoint: epath.Path) -> None:
    if settings.task != first.task:
        raise UsageError(f"{checkpoint} is of the task {settings.task}, and the first member of {first.task}")
    old, new = (
        {name: value for name, value in dataclasses.asdict(each.data).items() if name not in _MAY_DIFFER}
        for each in (first, settings)
    )
    if found := differences(old, new):
        raise UsageError(
            f"{checkpoint} was trained on other data than the first member ({found[0]}); give --config.data.FIELD for "
            "all of them"
        )
    for name in (ENTRY, *task.workdir_files.keys() & other.workdir_files.keys()):
        if _form(name, task.workdir_files) != _form(name, other.workdir_files):
            raise UsageError(f"{checkpoint} has another {name} than the first member, so their outputs differ in form")


def _form(name: str, files: Mapping[str, bytes]) -> Any:
    """What must be alike in a file of all members: of the output layer all but what is below it."""
    content = files.get(name)
    if name != OUTPUT_LAYER or content is None:
        return content
    return {field: value for field, value in json.loads(content).items() if field != "feature_head"}


def _moved(mean: _Outputs, outputs: _Outputs, count: int) -> _Outputs:
    """The mean of `count` members from that of all but the last, and the last; a sum would overflow at padding."""
    return [
        # Which example a row is of is no logit.
        {
            name: old[name] + (new[name] - old[name]) / np.float32(count) if name != "example" else old[name]
            for name in old
        }
        for old, new in zip(mean, outputs, strict=True)
    ]


def _scores(task: Task, outputs: _Outputs) -> dict[str, float]:
    return {} if task.unlabeled_source else task.evaluate({}, outputs)
