"""Token tagging of your own sentences, from TSV, CSV or JSON Lines files."""

import dataclasses
from collections.abc import Iterator, Sequence

from bertjax.data.finetuning.tables import Row
from bertjax.data.finetuning.tagged import TaggedText, read_tagged_rows
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.tagging import TaggingTask
from bertjax.tasks.text import TableData


@dataclasses.dataclass(frozen=True)
class TextTagsConfig(FinetuningConfig):
    """Config of token tagging on your own data."""

    task: str = "text_tags"
    data: TableData = TableData()


class TextTagsTask(TaggingTask):
    """Token tagging of files with one sentence per row. Two columns contain the words and the tags."""

    missing_data = "no data; set --config.data.train_file=FILE and --config.data.dev_file=FILE"
    labels = ("O", "B-X")
    output_name = "text/tags"
    config: TextTagsConfig

    def read_words(self, split: str) -> TaggedText:
        data = self.config.data
        label = data.label if split != "test" else None
        columns = [data.text, *([label] if label else [])]
        rows, stats = data.read_rows(data.file_of(split), columns, keep_short=split != "train")
        self.read_stats.append(stats)
        return read_tagged_rows(rows, data.text, label, stats, keep_untagged=split != "train")

    def read_columns(self, columns: Sequence[str]) -> Iterator[Row]:
        data = self.config.data
        file = data.file_of("train" if self.split == splits.HELD_OUT else self.split)
        return data.read_rows(file, columns, keep_short=True)[0]
