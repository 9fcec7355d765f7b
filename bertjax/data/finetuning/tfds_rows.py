"""Rows of TensorFlow Datasets splits, in the form of `tables.read_table`; kept apart because it imports TensorFlow."""

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from bertjax.data.corpus.datasets import open_builder, read_errors
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed

PREFIX = "tfds:"


def read_tfds(
    name: str,
    split: str,
    columns: Mapping[str, str],
    stats: ReadStats,
    *,
    optional: Mapping[str, str] = MappingProxyType({}),
    named_labels: bool = True,
) -> Iterator[Row]:
    """Yields the rows of a split in stored order; downloads and prepares the dataset if necessary.

    Args:
      name: dataset and config, such as `glue/mrpc`; with a data directory, `DIR:glue/mrpc`; or with a TFDS namespace,
        `huggingface:swag/regular`.
      split: name of the split.
      columns: column name -> feature of the dataset.
      stats: `read` is updated.
      optional: further columns, read if the dataset has their feature.
      named_labels: return class labels as names (default) or as numbers.

    Raises:
      UsageError: the dataset, split or feature does not exist.
      BertjaxError: the dataset cannot be downloaded or read.
    """
    directory, _, dataset = name.rpartition(":")
    if directory and not os.path.isabs(directory) and not os.path.isdir(directory) and "://" not in directory:
        directory, dataset = "", name
    builder = open_builder(dataset, directory or None)
    features = builder.info.features
    missing = [feature for feature in columns.values() if feature not in features]
    if missing:
        raise UsageError(f"tfds dataset {dataset!r} has no feature {missing[0]!r}; its features are {listed(features)}")
    columns = {**columns, **{column: feature for column, feature in optional.items() if feature in features}}
    with read_errors(dataset, split):
        if not builder.is_prepared():
            builder.download_and_prepare()
        for line, example in enumerate(builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator(), 1):
            stats.read += 1
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
