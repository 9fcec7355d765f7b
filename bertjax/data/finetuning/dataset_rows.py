"""Readers of table rows from TensorFlow Datasets and Hugging Face Hub datasets."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bertjax.data.corpus.datasets import open_builder, open_hub, parse_dataset, read_errors, stored_rows
from bertjax.data.finetuning.tables import NULL, ReadStats, Row, as_text
from bertjax.errors import UsageError, listed

TFDS_PREFIX, HUB_PREFIX = "tfds:", "hf:"


def read_tfds(
    name: str, split: str, columns: Mapping[str, str], stats: ReadStats, *, named_labels: bool
) -> Iterator[Row]:
    """Yields the rows of a split in stored order; downloads and prepares the dataset if necessary.

    `name` is dataset and config, such as `glue/mrpc`. An optional prefix selects a data folder (`DIR:glue/mrpc`) or a
    TFDS namespace (`huggingface:swag/regular`). `columns` maps column names to features of the dataset. With
    `named_labels`, class names replace class ids.
    """
    folder, _, dataset = name.rpartition(":")
    if folder and not os.path.isabs(folder) and not os.path.isdir(folder) and "://" not in folder:
        folder, dataset = "", name
    builder = open_builder(dataset, folder or None)
    features = builder.info.features
    if missing := [feature for feature in columns.values() if feature not in features]:
        raise UsageError(f"tfds dataset {dataset!r} has no feature {missing[0]!r}; its features are {listed(features)}")
    with read_errors(f"tfds dataset {dataset!r}", split):
        for line, example in enumerate(stored_rows(builder, split).as_numpy_iterator(), 1):
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


def hub_columns(address: str) -> list[str]:
    """Returns the column names of a Hugging Face Hub dataset."""
    name, split, _ = parse_dataset(address)
    return [*(open_hub(name, split).features or {})]


def read_hub(address: str, columns: Sequence[str], stats: ReadStats, nullable: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the rows of a Hugging Face Hub dataset, `hf:ORG/NAME[/CONFIG]:SPLIT`, with the given columns.

    `Row.line` is the row number. Class names replace class ids. Missing values of `nullable` columns are "".
    Rows with other missing values are skipped.
    """
    name, split, _ = parse_dataset(address)
    dataset = open_hub(name, split)
    features = dataset.features or {}
    if missing := [column for column in columns if column not in features]:
        raise UsageError(f"dataset {name!r} has no column {missing[0]!r}; its columns are {listed(features)}")
    stats.describe_columns([*features], columns)
    with read_errors(f"dataset {name!r}", split):
        for line, row in enumerate(dataset.select_columns([*columns]), 1):
            stats.read += 1
            fields = {column: _hub_cell(features[column], row[column], column) for column in columns}
            fields |= {column: "" for column in nullable if fields[column] is NULL}
            if NULL in fields.values():
                stats.skip("with null, NaN or the class id -1", line)
                continue
            yield Row(line, fields)


def _hub_cell(feature: Any, value: Any, column: str) -> Any:
    if not hasattr(feature, "int2str"):
        return as_text(value, column)
    # -1 is the class id of examples without a label, as in SNLI.
    return NULL if value in (None, -1) else feature.int2str(value)
