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
    """Returns the dataset and the split of an input spec; `rest` is its part after `tfds:`."""
    match = _TFDS_SPEC.fullmatch(rest)
    if not match:
        raise UsageError(f"input {spec!r} has no split; write tfds:NAME/CONFIG:SPLIT, for example tfds:lm1b:train")
    return match["name"], match["split"]


def tfds_size_bytes(name: str, split: str, data_dir: str | None) -> int | None:
    """Returns the size of a split's records in bytes. Returns None if the dataset is not downloaded yet."""
    splits = open_builder(name, data_dir).info.splits
    try:
        return splits[split].num_bytes if splits else None
    except (KeyError, ValueError) as error:
        raise UsageError(f"tfds dataset {name!r} has no split {split!r}; use one of {listed(splits)}") from error


def tfds_texts(
    name: str, split: str, data_dir: str | None, problems: Counter[str], advance: Callable[[int], object]
) -> Iterator[str]:
    """Yields the text of each example of a dataset, in stored order; downloads the dataset if necessary.

    Invalid UTF-8 is replaced but, unlike in files, not counted in `problems`.
    """
    import tensorflow_datasets as tfds

    builder = open_builder(name, data_dir)
    dataset = f"tfds dataset {name!r}"
    with read_errors(dataset, split):
        rows = stored_rows(builder, split)
        features = builder.info.features
        advice = f"use a dataset with a feature 'text' or a single text feature (features: {listed(sorted(features))})"
        columns = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
        column = _text_column(dataset, columns, advice)
        for batch in rows.map(lambda row: row[column]).batch(_READ_EXAMPLES).as_numpy_iterator():
            for data in batch:
                problems["nul_characters"] += data.count(0)
                advance(len(data))
                yield data.decode("utf-8", "replace")


@contextlib.contextmanager
def read_errors(dataset: str, split: str) -> Iterator[None]:
    """Re-raises exceptions of TensorFlow Datasets and of the library `datasets` as one-line errors.

    A ValueError becomes a UsageError, and any other exception a BertjaxError. `dataset` describes the dataset in
    messages, such as "tfds dataset 'lm1b'".
    """
    try:
        yield
    except BertjaxError:
        raise
    except Exception as error:
        # The message of a ValueError lists the known configs or splits.
        is_usage = isinstance(error, ValueError)
        advice = "use another split or config" if is_usage else "check the disk and network, then repeat the command"
        message = f"cannot read split {split!r} of {dataset}: {first_line(error)}; {advice}"
        raise (UsageError if is_usage else BertjaxError)(message) from error


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
        raise UsageError(f"{dataset} has {len(columns)} text columns; {advice}")
    return columns[0]


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the TFDS builder of a dataset."""
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # TFDS raises many exception types that have no common base class.
        raise UsageError(f"tfds has no dataset {name!r}: {first_line(error)}; check the name") from error


def parse_hub(spec: str, rest: str) -> tuple[str, str, str]:
    """Parses `rest`, the part of an input spec after `hf:`, and returns dataset, split and column ("" if not given)."""
    match = _HUB_SPEC.fullmatch(rest)
    if not match:
        raise UsageError(
            f"input {spec!r} has no split; write hf:ORG/NAME[/CONFIG]:SPLIT[#COLUMN], for example "
            "hf:wikimedia/wikipedia/20231101.en:train"
        )
    return match["name"], match["split"], match["column"] or ""


def hub_texts(
    name: str, split: str, column: str, problems: Counter[str], advance: Callable[[int], object]
) -> Iterator[str]:
    """Streams the text of each row of a dataset, in order, without saving the dataset to disk.

    `name` is `NAME`, `ORG/NAME` or `ORG/NAME/CONFIG`. If `column` is "", reads the column `text` or, if it does not
    exist, the only column of strings.
    """
    dataset, column = open_hub(name, split, column)
    with read_errors(f"dataset {name!r}", split):
        for row in dataset.select_columns([column]):
            text = row[column] or ""
            problems["nul_characters"] += text.count("\0")
            advance(len(text.encode("utf-8", "surrogatepass")))
            yield text


def open_hub(name: str, split: str, column: str) -> tuple[Any, str]:
    """Returns the streamed dataset and its text column. Raises a UsageError if one of them does not exist."""
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
            raise UsageError(f"no dataset {name!r} on the hub; check the name, or set HF_TOKEN") from error
        features: Any = dataset.features or dataset._resolve_features().features
    columns = [key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    if column and column not in columns:
        raise UsageError(f"dataset {name!r} has no text column {column!r}; use one of {listed(columns)}")
    advice = f"append #COLUMN to choose one of {listed(columns)}"
    return dataset, column or _text_column(f"dataset {name!r}", columns, advice)
