"""Ensembles that average the logits of fine-tuned models, like the paper's ensemble for SQuAD 1.1 (Table 2)."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bertjax.config.run import RunConfig
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.errors import UsageError, listed
from bertjax.inference.predict import build_prediction_task, create_output, write_outputs
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import saved_fingerprint
from bertjax.training.evaluation import evaluate_batches, load_for_task
from bertjax.training.workdir import CONFIG, RESULTS
from bertjax.utils.json_files import write_json

logger = logging.getLogger(__name__)

_Outputs = list[dict[str, np.ndarray]]


def ensemble(checkpoints: Sequence[epath.Path], configs: Sequence[RunConfig], folder: str) -> dict[str, Any]:
    """Averages the logits of several models, writes the predictions and `results.json`, and returns the metrics.

    Logits are averaged instead of probabilities, because SQuAD compares span scores from different windows of a
    passage. Models may differ in size. `configs` are their prediction configs. In the result, `members` contains the
    fingerprint and metrics of each model. Without labels, there are no metrics.
    """
    if len(checkpoints) < 2:
        raise UsageError("an ensemble needs several checkpoints; repeat --checkpoint")
    if (Path(folder) / CONFIG).exists():
        raise UsageError(f"{folder} is a workdir, and its {RESULTS} would be overwritten; choose another --output")
    fingerprints = [saved_fingerprint(checkpoint) for checkpoint in checkpoints]
    if len({*fingerprints}) < len(fingerprints):
        raise UsageError(f"members with the same parameters: {listed(checkpoints)}; use different checkpoints")
    first = build_prediction_task(configs[0])
    create_output(first, folder)
    mean: _Outputs = []
    members = []
    for number, (checkpoint, config, fingerprint) in enumerate(zip(checkpoints, configs, fingerprints, strict=True), 1):
        logger.info(f"ensemble member {number} of {len(checkpoints)}: {checkpoint}")
        task = first if number == 1 else build_prediction_task(config)
        compared = _compared(task)
        if changed := [name for name, value in _compared(first).items() if value != compared[name]]:
            raise UsageError(
                f"{checkpoint} differs from the first member in {', '.join(changed)}; set the same for all"
            )
        outputs = evaluate_batches(task, *load_for_task(task, checkpoint))[1]
        members.append({"fingerprint": fingerprint, **_metrics(task, outputs)})
        mean = _update_mean(mean, outputs, number) if mean else outputs
    metrics = {**_metrics(first, mean), "members": members}
    for path in write_outputs(first, mean, folder):
        logger.info(str(path))
    results = {**metrics, "config": dataclasses.asdict(first.config), "data_sha256": first.data_hash}
    write_json(Path(folder) / RESULTS, results)
    return metrics


def _compared(task: Task) -> dict[str, Any]:
    """Returns the properties that all members must share, so that their outputs can be averaged."""
    config = task.config
    data = {f"config.data.{name}": getattr(config.data, name) for name in ("seq_len", "bucket", "eval_batch_size")}
    vocabulary = task.workdir_files.get(ENTRY)
    return {"task": config.task, "labels": [*task.labels], "vocabulary": vocabulary, "data": task.data_hash, **data}


def _update_mean(mean: _Outputs, outputs: _Outputs, count: int) -> _Outputs:
    """Updates the mean output of `count - 1` models with the outputs of the next model."""
    # Do not sum, because SQuAD's logits at padding are the lowest float32 value, so a sum could overflow. `example` is
    # the index of each row's example, not a logit.
    return [
        {
            name: array if name == "example" else array + (new[name] - array) / np.float32(count)
            for name, array in old.items()
        }
        for old, new in zip(mean, outputs, strict=True)
    ]


def _metrics(task: Task, outputs: _Outputs) -> dict[str, float]:
    return {} if task.evaluation_problem else task.final_metrics({}, outputs)
