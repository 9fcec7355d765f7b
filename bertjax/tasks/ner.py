"""Named entities of CoNLL-2003 (section 5.3 of the paper)."""

import functools
from pathlib import Path

from ml_collections import ConfigDict

from bertjax.data.finetuning.tables import Reading
from bertjax.data.finetuning.tagged import Tagged, read_tagged
from bertjax.errors import UsageError
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.finetuning.tagging import objective, tagging_task
from bertjax.tasks.task import Task

_CONTEXTS = ("document", "sentence")
# Of CoNLL-2003: four types, begun or gone on with, and outside.
_TAGS = 9


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    finetuning.check(config)
    if config.data.context not in _CONTEXTS:
        raise UsageError(f"config.data.context is {config.data.context!r}; known: {', '.join(_CONTEXTS)}")


has_data = finetuning.has_data


def build(config: ConfigDict, train: bool = True) -> Task:
    """The task of a config, on the files it names; without any, a task that has synthetic batches only.

    The tags are those of the training file.

    Raises:
      UsageError: no files, or files that are not of CoNLL's form.
    """
    data = config.data
    if not has_data(config):
        if train:
            raise UsageError("give CoNLL's files: --config.data.path=DIR, which holds eng.train and eng.testa")
        return synthetic_task(config, functools.partial(objective, tags=_TAGS))
    vocabulary = finetuning.vocabulary_of(config)
    readings: list[Reading] = []

    def read(name: str) -> Tagged:
        path = Path(data.path).expanduser() / name
        readings.append(Reading(str(path)))
        return read_tagged(path, readings[-1], labelled=name != data.test_file)

    return tagging_task(
        config,
        vocabulary,
        readings,
        train,
        read_training=lambda: read(data.train_file),
        read_split=lambda split: read(data.dev_file if split == "dev" else data.test_file),
        output="ner",
        documents=data.context == "document",
    )
