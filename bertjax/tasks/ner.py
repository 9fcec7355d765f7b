"""Named entity recognition on CoNLL-2003 (section 5.3 of the paper)."""

import dataclasses
from pathlib import Path

from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText, read_conll
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.tagging import TaggingTask
from bertjax.utils.sections import bounded


@dataclasses.dataclass(frozen=True)
class NerData(FinetuningData):
    """Data and batches of named entity recognition.

    Attributes:
      context: content of a row: `document` (up to `seq_len` tokens of a document) or `sentence` (one sentence).
      train_file, dev_file, test_file: names of the files in `path`.
    """

    context: str = bounded("document", choices=("document", "sentence"))
    train_file: str = "eng.train"
    dev_file: str = "eng.testa"
    test_file: str = "eng.testb"


@dataclasses.dataclass(frozen=True)
class NerConfig(FinetuningConfig):
    """Config for named entity recognition."""

    task: str = "ner"
    data: NerData = NerData()


class NerTask(TaggingTask):
    """CoNLL-2003, read from its original files. The training file defines the set of tags."""

    missing_data = "no data; set --config.data.path to the folder of CoNLL-2003's eng.train and eng.testa"
    # Tags of synthetic batches: O, and a B- and an I- tag for each of the four entity types.
    labels = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))
    output_name = "ner"
    config: NerConfig

    def __init__(self, config: NerConfig, train: bool = True) -> None:
        self.by_document = config.data.context == "document"
        super().__init__(config, train)

    def read_words(self, split: str) -> TaggedText:
        data = self.config.data
        name = getattr(data, f"{split}_file")
        path = Path(data.path).expanduser() / name
        if not path.exists():
            raise UsageError(f"{path} does not exist; set --config.data.{split}_file to the name of the {split} file")
        stats = ReadStats(str(path))
        self.read_stats.append(stats)
        return read_conll(path, stats, labeled=name != data.test_file)
