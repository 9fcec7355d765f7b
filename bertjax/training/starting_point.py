"""Where a fine-tuning run takes its model's sizes and its vocabulary from: the checkpoint it starts with."""

import json

from etils import epath
from ml_collections import ConfigDict

from bertjax.errors import UsageError
from bertjax.fields import FROM_CHECKPOINT
from bertjax.tasks.task import Task
from bertjax.tasks.vocabulary_files import ENTRY, workdir_vocabulary
from bertjax.training.checkpoint import workdir_of
from bertjax.training.workdir import CONFIG


def check_vocabulary(task: Task, checkpoint: epath.Path) -> None:
    """Refuses a checkpoint whose pieces have other ids than the task's data.

    Raises:
      UsageError: it has another vocabulary.
    """
    theirs = workdir_of(checkpoint) / ENTRY
    if ENTRY in task.files and theirs.exists():
        ours = json.loads(task.files[ENTRY])["sha256"]
        found = workdir_vocabulary(workdir_of(checkpoint)).sha256
        if found != ours:
            raise UsageError(
                f"{checkpoint} was trained with another vocabulary than the data has (SHA-256 {found[:12]} and "
                f"{ours[:12]}); prepare the data with {theirs.parent / json.loads(theirs.read_text())['file']}"
            )


def adopt(config: ConfigDict, checkpoint: epath.Path) -> ConfigDict:
    """The config with the fields it leaves to the checkpoint: the model's sizes, and the path of the vocabulary.

    Raises:
      UsageError: the checkpoint's workdir has no config.
    """
    workdir = workdir_of(checkpoint)
    try:
        saved = json.loads((workdir / CONFIG).read_text())["model"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{checkpoint} has no readable {workdir / CONFIG} ({error}), which tells its sizes") from error
    whole = config.copy_and_resolve_references()
    for name in FROM_CHECKPOINT:
        if not whole.model[name]:
            whole.model[name] = saved[name]
    whole.model.vocab_multiple = saved["vocab_multiple"]
    if "vocabulary" in whole.data and not whole.data.vocabulary:
        whole.data.vocabulary = str(workdir / ENTRY)
    return whole
