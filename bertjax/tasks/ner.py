"""Named entities of CoNLL-2003 (section 5.3 of the paper)."""

import dataclasses
import functools
from pathlib import Path

from bertjax.config.fields import one_of
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import Tagged, read_tagged
from bertjax.errors import UsageError
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning.settings import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.synthetic import synthetic_task
from bertjax.tasks.finetuning.tagging import objective, tagging_task
from bertjax.tasks.task import Task

_CONTEXTS = ("document", "sentence")
# Of CoNLL-2003: four types, begun or gone on with, and outside.
_TAGS = 9


@dataclasses.dataclass(frozen=True)
class NerData(FinetuningData):
    """What is read, and in which batches.

    Attributes:
      context: a row is as much of a `document` as fits, or a `sentence`.
      train_file, dev_file, test_file: in `path`.
    """

    context: str = "document"
    train_file: str = "eng.train"
    dev_file: str = "eng.testa"
    test_file: str = "eng.testb"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "config.data", context=_CONTEXTS)


@dataclasses.dataclass(frozen=True)
class Config(FinetuningConfig):
    """Settings of the task."""

    task: str = "ner"
    data: NerData = NerData()


def build(settings: Config, train: bool = True) -> Task:
    """The task of settings, on the files they name; without any, a task that has synthetic batches only.

    The tags are those of the training file.

    Raises:
      UsageError: no files, or files that are not of CoNLL's form.
    """
    data = settings.data
    if not settings.has_data:
        if train:
            raise UsageError("give CoNLL's files: --config.data.path=DIR, which holds eng.train and eng.testa")
        return synthetic_task(settings, functools.partial(objective, tags=_TAGS))
    vocabulary = finetuning.vocabulary_of(settings)
    readings: list[ReadStats] = []

    def read(name: str) -> Tagged:
        path = Path(data.path).expanduser() / name
        readings.append(ReadStats(str(path)))
        return read_tagged(path, readings[-1], labelled=name != data.test_file)

    return tagging_task(
        settings,
        vocabulary,
        readings,
        train,
        read_training=lambda: read(data.train_file),
        read_split=lambda split: read(data.dev_file if split == "dev" else data.test_file),
        output="ner",
        documents=data.context == "document",
    )
