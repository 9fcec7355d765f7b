"""Text of TensorFlow Datasets (TFDS) and of datasets on the Hugging Face Hub.

TFDS and the library `datasets`, which streams datasets of the hub, are imported only when a dataset is read.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, listed

# NAME or NAME/CONFIG, an optional version, and the split, which may include a slice such as train[:10%].
_TFDS_SPEC = re.compile(r"(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?):(?P<split>.+)")
_HUB_SPEC = re.compile(r"(?P<name>[^:#]+):(?P<split>[^:#]+)(?:#(?P<column>.+))?")
_READ_EXAMPLES = 64


def parse_tfds(spec: str, rest: str) -> tuple[str, str]:
    """Parses `rest`, the part of an input spec after `tfds:`, and returns the names of the dataset and the split."""
    match = _TFDS_SPEC.fullmatch(rest)
    if not match:
        raise UsageError(f"input {spec!r} has no split; write tfds:NAME/CONFIG:SPLIT, for example tfds:lm1b:train")
    return match["name"], match["split"]


def tfds_size_bytes(name: str, split: str, data_dir: str | None) -> int | None:
    """Returns the size of a split's records in bytes. Returns None if the dataset is not downloaded yet."""
    info = open_builder(name, data_dir).info
    try:
        return info.splits[split].num_bytes if info.splits else None
    except (KeyError, ValueError) as error:
        raise UsageError(f"tfds dataset {name!r} has no split {split!r}; use one of {listed(info.splits)}") from error


def tfds_texts(
    name: str, split: str, data_dir: str | None, problems: Counter[str], advance: Callable[[int], object]
) -> Iterator[str]:
    """Yields the text of each example of a dataset, in stored order; downloads the dataset if necessary."""
    builder = open_builder(name, data_dir)
    with read_errors(name, split):
        if not builder.is_prepared():
            builder.download_and_prepare()
        feature = _tfds_text_feature(name, builder.info.features)
        dataset = builder.as_dataset(split=split, shuffle_files=False).map(lambda example: example[feature])
        for batch in dataset.batch(_READ_EXAMPLES).as_numpy_iterator():
            for data in batch:
                advance(len(data))
                yield _decode(data, problems)


@contextlib.contextmanager
def read_errors(name: str, split: str) -> Iterator[None]:
    """Re-raises exceptions of TensorFlow Datasets as one-line errors."""
    try:
        yield
    except BertjaxError:
        raise
    except ValueError as error:
        raise UsageError(
            f"cannot read split {split!r} of tfds dataset {name!r}: {first_line(error)}; check the split"
        ) from error
    except Exception as error:
        raise BertjaxError(
            f"cannot read tfds dataset {name!r}, split {split!r}: {first_line(error)}; check its directory and the disk"
        ) from error


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the TFDS builder of a dataset."""
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # TFDS raises many exception types that have no common base class.
        raise UsageError(f"tfds has no dataset {name!r}: {first_line(error)}; check the name") from error


def _tfds_text_feature(name: str, features: Any) -> str:
    import tensorflow_datasets as tfds

    text_features = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    feature = _text_name(text_features)
    if feature is None:
        raise UsageError(
            f"tfds dataset {name!r} has {len(text_features)} text features, and none is named 'text'; use a dataset "
            f"with a feature 'text' or with one text feature (its features: {listed(sorted(features))})"
        )
    return feature


def _text_name(names: list[str]) -> str | None:
    """Chooses the text column: `text` if it exists, else the only column, else None."""
    return "text" if "text" in names else names[0] if len(names) == 1 else None


def _decode(data: bytes, problems: Counter[str]) -> str:
    problems["nul_characters"] += data.count(0)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
        problems["invalid_utf8_bytes"] += sum("\udc80" <= char <= "\udcff" for char in text)
        return data.decode("utf-8", "replace")


def parse_hub(spec: str, rest: str) -> tuple[str, str, str]:
    """Parses `rest`, the part of an input spec after `hf:`, and returns dataset, split and column ("" if not given)."""
    match = _HUB_SPEC.fullmatch(rest)
    if not match:
        raise UsageError(
            f"input {spec!r} has no split; write hf:NAME[/CONFIG]:SPLIT[#COLUMN], for example "
            "hf:wikimedia/wikipedia/20231101.en:train"
        )
    return match["name"], match["split"], match["column"] or ""


def check_hub(name: str, split: str, column: str) -> None:
    """Raises a UsageError if the dataset, the split or the column does not exist."""
    with _hub_errors(name, split):
        _hub_text_column(_open_hub(name, split), name, column)


def hub_texts(
    name: str, split: str, column: str, problems: Counter[str], advance: Callable[[int], object]
) -> Iterator[str]:
    """Streams the text of each row of a dataset, in order, without saving the dataset to disk.

    `name` is `NAME`, `ORG/NAME` or `ORG/NAME/CONFIG`. If `column` is "", the column is `text`, or else the only column
    of strings.
    """
    with _hub_errors(name, split):
        dataset = _open_hub(name, split)
        column = _hub_text_column(dataset, name, column)
        for row in dataset.select_columns([column]):
            text = row[column] or ""
            problems["nul_characters"] += text.count("\0")
            advance(len(text.encode("utf-8", "surrogatepass")))
            yield text


def _open_hub(name: str, split: str) -> Any:
    import datasets

    # The first slash is part of the name.
    parts = name.split("/", 2)
    return datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split, streaming=True)


def _hub_text_column(dataset: Any, name: str, column: str) -> str:
    features = dataset.features or dataset._resolve_features().features
    columns = [key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    if column:
        if column not in columns:
            raise UsageError(f"dataset {name!r} has no text column {column!r}; use one of {listed(columns)}")
        return column
    text_column = _text_name(columns)
    if text_column is None:
        raise UsageError(
            f"dataset {name!r} has {len(columns)} text columns; append #COLUMN to choose one of {listed(columns)}"
        )
    return text_column


@contextlib.contextmanager
def _hub_errors(name: str, split: str) -> Iterator[None]:
    try:
        yield
    except BertjaxError:
        raise
    except ImportError as error:
        raise UsageError(f"cannot import datasets: {first_line(error)}; pip install 'bertjax[datasets]'") from error
    except ValueError as error:
        raise UsageError(f"cannot read split {split!r} of dataset {name!r}: {first_line(error)}") from error
    except Exception as error:
        from datasets.exceptions import DatasetNotFoundError

        if isinstance(error, DatasetNotFoundError):
            raise UsageError(f"no dataset {name!r} on the hub; check the name, or set HF_TOKEN") from error
        raise BertjaxError(f"cannot read dataset {name!r}: {first_line(error)}; run the same command again") from error
