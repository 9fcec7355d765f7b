"""Ensembles of fine-tuned models by the mean of their logits, as the paper's for SQuAD 1.1 (Table 2)."""

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
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.errors import UsageError
from bertjax.inference.predict import check_output, write_outputs
from bertjax.tasks.build import build_task
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import saved_fingerprint
from bertjax.training.evaluation import mesh_and_params, predict
from bertjax.training.workdir import CONFIG, RESULTS
from bertjax.utils.io import write_atomic

logger = logging.getLogger(__name__)

_Outputs = list[dict[str, np.ndarray]]
# Data fields in which members may differ: paths inside the checkpoint, and fields of training.
_IGNORED_DATA_FIELDS = ("vocabulary", "labels", "train_share", "batch_size", "class_weights")


def ensemble(
    checkpoints: Sequence[epath.Path], read_config: Callable[[epath.Path], RunConfig], folder: str
) -> dict[str, Any]:
    """Predicts with several models and writes the predictions of their mean logits.

    Averaging logits instead of probabilities keeps the scores of a question's windows comparable.

    Args:
      checkpoints: members, of one task and vocabulary; sizes may differ.
      read_config: function from a checkpoint to the config of its predictions.
      folder: output folder for the predictions and `results.json`: the returned metrics, the first member's config,
        and the hash of the data.

    Returns:
      Metrics of the ensemble, and `members` with those of each member; no metrics if the examples have no labels.

    Raises:
      UsageError: the members do not fit together, the task has no predictions, or the folder is a workdir.
      BertjaxError: the folder cannot be written.
    """
    if len(checkpoints) < 2:
        raise UsageError(f"an ensemble of {len(checkpoints)} checkpoints; give --checkpoint at least twice")
    if (Path(folder) / CONFIG).exists():
        raise UsageError(f"{folder} is the workdir of a run, whose {RESULTS} would be lost; choose another --output")
    fingerprints = [saved_fingerprint(checkpoint) for checkpoint in checkpoints]
    for index, fingerprint in enumerate(fingerprints):
        if fingerprint in fingerprints[:index]:
            raise UsageError(f"{checkpoints[index]} has the same parameters as another member; give different ones")
    first: tuple[RunConfig, Task] | None = None
    mean: _Outputs = []
    members = []
    for number, (checkpoint, fingerprint) in enumerate(zip(checkpoints, fingerprints, strict=True), 1):
        logger.info(f"member {number} of {len(checkpoints)}: {checkpoint}")
        config = read_config(checkpoint)
        task = build_task(config)
        if first is None:
            first = config, task
            check_output(task, config.task, folder)
        _check_same_task(*first, config, task, checkpoint)
        outputs = predict(task, *mesh_and_params(task, checkpoint))[1]
        members.append({"fingerprint": fingerprint, **_metrics(task, outputs)})
        mean = _update_mean(mean, outputs, number) if mean else outputs
    assert first is not None
    config, task = first
    metrics = {**_metrics(task, mean), "members": members}
    for path in write_outputs(task, mean, folder):
        logger.info(str(path))
    results = {**metrics, "config": dataclasses.asdict(config), "data_sha256": task.data_hash}
    write_atomic(Path(folder) / RESULTS, json.dumps(results, indent=1) + "\n")
    return metrics


def _check_same_task(
    first_config: RunConfig, first_task: Task, config: RunConfig, task: Task, checkpoint: epath.Path
) -> None:
    if config.task != first_config.task:
        raise UsageError(f"{checkpoint} is of task {config.task}, but the first member is of {first_config.task}")
    first_data, data = (
        {name: value for name, value in dataclasses.asdict(config_.data).items() if name not in _IGNORED_DATA_FIELDS}
        for config_ in (first_config, config)
    )
    if changed := differences(first_data, data):
        raise UsageError(
            f"{checkpoint} was trained on other data than the first member ({changed[0]}); set the same data for all "
            "with --config.data.FIELD"
        )
    for name in (ENTRY, *first_task.workdir_files.keys() & task.workdir_files.keys()):
        if _shared_content(name, first_task.workdir_files) != _shared_content(name, task.workdir_files):
            raise UsageError(
                f"{checkpoint} has another {name} than the first member; use checkpoints with the same one"
            )


def _shared_content(name: str, files: Mapping[str, bytes]) -> Any:
    """Returns the part of a file that all members must share: everything but the feature head."""
    content = files.get(name)
    if name != OUTPUT_LAYER or content is None:
        return content
    return {field: value for field, value in json.loads(content).items() if field != "feature_head"}


def _update_mean(mean: _Outputs, outputs: _Outputs, count: int) -> _Outputs:
    """Updates the mean of `count - 1` members by one more; a sum would overflow at padding."""
    return [
        {
            # `example` is the index of each row, not a logit.
            name: mean_batch[name]
            if name == "example"
            else mean_batch[name] + (batch[name] - mean_batch[name]) / np.float32(count)
            for name in mean_batch
        }
        for mean_batch, batch in zip(mean, outputs, strict=True)
    ]


def _metrics(task: Task, outputs: _Outputs) -> dict[str, float]:
    return {} if task.unlabeled_source else task.evaluate({}, outputs)
