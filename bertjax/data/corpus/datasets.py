"""Readers of text from TensorFlow Datasets (TFDS) and from Hugging Face Hub datasets.

TFDS and the library `datasets`, which streams Hub datasets, are imported only when a dataset is read.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, listed

# Regular expression for name, split and column of each kind of dataset, and the format to show in error messages. In
# TFDS, the name may end with a version, and the split may include a slice such as train[:10%].
_SPECS = {
    "tfds": (
        r"([^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?):(.+)()",
        "tfds:NAME/CONFIG:SPLIT, for example tfds:lm1b:train",
    ),
    "hf": (
        r"([^:#]+):([^:#]+)(?:#(.+))?",
        "hf:ORG/NAME[/CONFIG]:SPLIT[#COLUMN], for example hf:wikimedia/wikipedia/20231101.en:train",
    ),
}
_READ_EXAMPLES = 64


def parse_dataset(spec: str) -> tuple[str, str, str]:
    """Splits an input spec, `tfds:...` or `hf:...`, into dataset name, split and column ("" if not given)."""
    kind, _, rest = spec.partition(":")
    pattern, example = _SPECS[kind]
    match = re.fullmatch(pattern, rest)
    if not match:
        raise UsageError(f"input {spec!r} has no split; write {example}")
    return match[1], match[2], match[3] or ""


def tfds_size_bytes(name: str, split: str, data_dir: str | None) -> int | None:
    """Returns the size of a split's records in bytes. Returns None if the dataset is not downloaded yet."""
    splits = open_builder(name, data_dir).info.splits
    with read_errors(f"tfds dataset {name!r}", split):
        return splits[split].num_bytes if splits else None


def tfds_texts(name: str, split: str, data_dir: str | None) -> Iterator[str]:
    """Yields the text of each example in a dataset, in stored order; downloads the dataset if necessary.

    Invalid UTF-8 is replaced but, unlike in files, not counted.
    """
    import tensorflow_datasets as tfds

    builder = open_builder(name, data_dir)
    dataset = f"tfds dataset {name!r}"
    with read_errors(dataset, split):
        rows = stored_rows(builder, split)
        features = builder.info.features.items()
        columns = [key for key, feature in features if isinstance(feature, tfds.features.Text)]
        column = _text_column(dataset, columns, "use a dataset with a single text feature, or with 'text'")
        for batch in rows.map(lambda row: row[column]).batch(_READ_EXAMPLES).as_numpy_iterator():
            yield from (data.decode("utf-8", "replace") for data in batch)


@contextlib.contextmanager
def read_errors(dataset: str, split: str) -> Iterator[None]:
    """Re-raises exceptions of TensorFlow Datasets and of the library `datasets` as one-line errors.

    `dataset` describes the dataset in messages, such as "tfds dataset 'lm1b'".
    """
    try:
        yield
    except BertjaxError:
        raise
    except Exception as error:
        # A ValueError means an unknown split or config, and its message lists the known ones.
        error_class, advice = BertjaxError, "check the disk and network, then repeat the command"
        if isinstance(error, ValueError):
            error_class, advice = UsageError, "use another split or config"
        raise error_class(f"cannot read split {split!r} of {dataset}: {first_line(error)}; {advice}") from error


def stored_rows(builder: Any, split: str) -> Any:
    """Returns a `tf.data` dataset of a split in stored order; downloads and prepares the dataset if necessary."""
    if not builder.is_prepared():
        builder.download_and_prepare()
    return builder.as_dataset(split=split, shuffle_files=False)


def _text_column(dataset: str, columns: list[str], advice: str) -> str:
    """Returns the name of the column to read: `text` if it is in `columns`, otherwise the only name in `columns`."""
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        raise UsageError(f"{dataset} has {len(columns)} text columns ({listed(sorted(columns))}); {advice}")
    return columns[0]


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the TFDS builder of a dataset."""
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # Catch everything, because TFDS's exceptions have no common base class.
        raise UsageError(f"tfds has no dataset {name!r}: {first_line(error)}; check the name") from error


def hub_texts(name: str, split: str, column: str) -> Iterator[str]:
    """Streams the text of each row in a Hub dataset, in order, without saving the dataset to disk."""
    dataset = open_hub(name, split)
    column = hub_text_column(dataset, name, column)
    with read_errors(f"dataset {name!r}", split):
        for row in dataset.select_columns([column]):
            yield row[column] or ""


def open_hub(name: str, split: str) -> Any:
    """Opens the Hub dataset `NAME`, `ORG/NAME` or `ORG/NAME/CONFIG` as a stream, with its `features` resolved."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError(f"cannot import datasets: {first_line(error)}; pip install 'bertjax[datasets]'") from error
    # In ORG/NAME/CONFIG, the first slash is part of the dataset's name, and the second one precedes the config.
    parts = name.split("/", 2)
    with read_errors(f"dataset {name!r}", split):
        try:
            dataset = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split, streaming=True)
        except datasets.exceptions.DatasetNotFoundError as error:
            raise UsageError(f"no dataset {name!r} on the Hub; check the name, or set HF_TOKEN") from error
        return dataset if dataset.features else dataset._resolve_features()


def hub_text_column(dataset: Any, name: str, column: str) -> str:
    """Returns the name of the text column: `column` if it is not "", else `text`, else the only string column."""
    features: Any = dataset.features
    columns = [key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    if column and column not in columns:
        raise UsageError(f"dataset {name!r} has no text column {column!r}; use one of {listed(columns)}")
    return column or _text_column(f"dataset {name!r}", columns, "append #COLUMN to choose one")
