"""Rows of a TensorFlow Datasets split, in the form `tables.read_table` gives. TensorFlow is imported only here."""

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from bertjax.data.corpus.datasets import open_builder
from bertjax.data.corpus.datasets import reading as reading_dataset
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed

PREFIX = "tfds:"


def read_tfds(
    name: str,
    split: str,
    columns: Mapping[str, str],
    reading: ReadStats,
    *,
    optional: Mapping[str, str] = MappingProxyType({}),
    named_labels: bool = True,
) -> Iterator[Row]:
    """The rows of a split in the order stored; the dataset is downloaded where it is not there.

    Args:
      name: such as `glue/mrpc`, perhaps with a data directory before it, `DIR:glue/mrpc`, or with a namespace of TFDS,
        `huggingface:swag/regular`.
      split: of the dataset.
      columns: column of a row to feature of the dataset.
      reading: counts `read`.
      optional: the same, of what is read where it is there.
      named_labels: classes by name, or by number.

    Raises:
      UsageError: no such dataset, split or feature.
      BertjaxError: the dataset cannot be had or read.
    """
    directory, _, dataset = name.rpartition(":")
    if directory and not os.path.isabs(directory) and not os.path.isdir(directory) and "://" not in directory:
        directory, dataset = "", name
    builder = open_builder(dataset, directory or None)
    features = builder.info.features
    missing = [feature for feature in columns.values() if feature not in features]
    if missing:
        raise UsageError(f"tfds dataset {dataset!r} has no feature {missing[0]!r}; it has {listed(features)}")
    columns = {**columns, **{column: feature for column, feature in optional.items() if feature in features}}
    with reading_dataset(dataset, split):
        if not builder.is_prepared():
            builder.download_and_prepare()
        for line, example in enumerate(builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator(), 1):
            reading.read += 1
            fields = {}
            for column, feature in columns.items():
                value = example[feature]
                if isinstance(value, bytes):
                    fields[column] = value.decode("utf-8", "replace")
                elif named_labels and hasattr(features[feature], "int2str") and value >= 0:
                    fields[column] = features[feature].int2str(int(value))
                else:
                    fields[column] = str(value)
            yield Row(line, fields)
