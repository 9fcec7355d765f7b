"""Text from TensorFlow Datasets (TFDS). TensorFlow is imported only when a dataset is read."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, listed

# NAME or NAME/CONFIG, an optional version, and the split, which may include a slice such as train[:10%].
_SPEC = re.compile(r"(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?):(?P<split>.+)")
_READ_EXAMPLES = 64


def parse(spec: str, rest: str) -> tuple[str, str]:
    """Parses the part of an input spec after `tfds:` and returns the names of the dataset and the split."""
    match = _SPEC.fullmatch(rest)
    if not match:
        raise UsageError(f"input {spec!r} has no split; write tfds:NAME/CONFIG:SPLIT, for example tfds:lm1b:train")
    return match["name"], match["split"]


def size_bytes(name: str, split: str, data_dir: str | None) -> int | None:
    """Returns the size of a split's records in bytes. Returns None if the dataset is not downloaded yet."""
    info = open_builder(name, data_dir).info
    try:
        return info.splits[split].num_bytes if info.splits else None
    except (KeyError, ValueError) as error:
        raise UsageError(f"tfds dataset {name!r} has no split {split!r}; use one of {listed(info.splits)}") from error


def texts(
    name: str, split: str, data_dir: str | None, problems: Counter[str], advance: Callable[[int], None]
) -> Iterator[str]:
    """Yields the text of each example of a dataset, in stored order; downloads the dataset if necessary.

    Raises:
      UsageError: the dataset or split does not exist, or several features could be the text.
      BertjaxError: the dataset cannot be downloaded or read.
    """
    builder = open_builder(name, data_dir)
    with read_errors(name, split):
        if not builder.is_prepared():
            builder.download_and_prepare()
        feature = _text_feature(name, builder.info.features)
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
    except ImportError as error:
        raise BertjaxError(
            f"cannot import TensorFlow Datasets: {first_line(error)}; install tensorflow-datasets"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"cannot read split {split!r} of tfds dataset {name!r}: {first_line(error)}; check the split"
        ) from error
    except Exception as error:
        raise BertjaxError(
            f"cannot read tfds dataset {name!r}, split {split!r}: {first_line(error)}; check its directory and the disk"
        ) from error


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a dataset."""
    try:
        import tensorflow_datasets as tfds

        return tfds.builder(name, data_dir=data_dir)
    except ImportError as error:
        raise BertjaxError(
            f"cannot import TensorFlow Datasets: {first_line(error)}; install tensorflow-datasets"
        ) from error
    except Exception as error:  # TFDS raises many exception types that have no common base class.
        raise UsageError(f"tfds has no dataset {name!r}: {first_line(error)}; check the name") from error


def _text_feature(name: str, features: Any) -> str:
    import tensorflow_datasets as tfds

    text_features = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if "text" in text_features:
        return "text"
    if len(text_features) != 1:
        raise UsageError(
            f"tfds dataset {name!r} needs a feature 'text' or exactly one text feature, but contains "
            f"{len(text_features)} text features; its features are {listed(sorted(features))}"
        )
    return text_features[0]


def _decode(data: bytes, problems: Counter[str]) -> str:
    problems["nul_characters"] += data.count(0)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
        problems["invalid_utf8_bytes"] += sum("\udc80" <= char <= "\udcff" for char in text)
        return data.decode("utf-8", "replace")
