"""TensorFlow Datasets as a source of text. TensorFlow is imported only when a dataset is read."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, listed

# NAME or NAME/CONFIG, perhaps with a version, then the split, which may hold a slice such as train[:10%].
_SPEC = re.compile(r"(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?):(?P<split>.+)")
_READ_EXAMPLES = 64


def parse(spec: str, rest: str) -> tuple[str, str]:
    """Dataset and split of what follows `tfds:`.

    Raises:
      UsageError: there is no split.
    """
    match = _SPEC.fullmatch(rest)
    if not match:
        raise UsageError(f"input {spec!r} lacks a split; write tfds:NAME/CONFIG:SPLIT, say tfds:lm1b:train")
    return match["name"], match["split"]


def size_bytes(name: str, split: str, data_dir: str | None) -> int | None:
    """Bytes of a split's records, little more than its text; None where the dataset is still to be downloaded.

    Raises:
      UsageError: no such dataset or split.
      BertjaxError: TensorFlow Datasets does not run here.
    """
    info = open_builder(name, data_dir).info
    try:
        return info.splits[split].num_bytes if info.splits else None
    except (KeyError, ValueError) as error:
        raise UsageError(f"tfds dataset {name!r} has no split {split!r}; it has {listed(info.splits)}") from error


def texts(
    name: str, split: str, data_dir: str | None, problems: Counter[str], advance: Callable[[int], None]
) -> Iterator[str]:
    """The text of each example of a dataset, in the order stored; the dataset is downloaded where it is not there.

    Raises:
      UsageError: no such dataset or split, or no single text feature.
      BertjaxError: the dataset cannot be had or read.
    """
    builder = open_builder(name, data_dir)
    with reading(name, split):
        if not builder.is_prepared():
            builder.download_and_prepare()
        feature = _text_feature(name, builder.info.features)
        dataset = builder.as_dataset(split=split, shuffle_files=False).map(lambda example: example[feature])
        for batch in dataset.batch(_READ_EXAMPLES).as_numpy_iterator():
            for data in batch:
                advance(len(data))
                yield _decode(data, problems)


@contextlib.contextmanager
def reading(name: str, split: str) -> Iterator[None]:
    """Says in one line what goes wrong in reading a dataset.

    Raises:
      UsageError: no such split.
      BertjaxError: the dataset cannot be had or read.
    """
    try:
        yield
    except BertjaxError:
        raise
    except ImportError as error:
        raise BertjaxError(f"TensorFlow Datasets does not run here: {first_line(error)}; install it") from error
    except ValueError as error:
        raise UsageError(f"cannot read split {split!r} of tfds dataset {name!r}: {first_line(error)}") from error
    except Exception as error:
        raise BertjaxError(f"cannot read tfds dataset {name!r}, split {split!r}: {first_line(error)}") from error


def open_builder(name: str, data_dir: str | None) -> Any:
    """The builder of a dataset, prepared or not.

    Raises:
      UsageError: no such dataset.
      BertjaxError: TensorFlow Datasets does not run here.
    """
    try:
        import tensorflow_datasets as tfds

        return tfds.builder(name, data_dir=data_dir)
    except ImportError as error:
        raise BertjaxError(f"TensorFlow Datasets does not run here: {first_line(error)}; install it") from error
    except Exception as error:  # TFDS raises a class of its own for each of a dozen causes.
        raise UsageError(f"tfds has no dataset {name!r}: {first_line(error)}") from error


def _text_feature(name: str, features: Any) -> str:
    import tensorflow_datasets as tfds

    found = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if "text" in found:
        return "text"
    if len(found) != 1:
        raise UsageError(
            f"tfds dataset {name!r} has no feature 'text' and {len(found)} other text features; "
            f"its features are {listed(sorted(features))}"
        )
    return found[0]


def _decode(data: bytes, problems: Counter[str]) -> str:
    problems["nul_characters"] += data.count(0)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
        problems["invalid_utf8_bytes"] += sum("\udc80" <= char <= "\udcff" for char in text)
        return data.decode("utf-8", "replace")
