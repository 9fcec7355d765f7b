"""Text of datasets on the Hugging Face Hub, streamed by the library `datasets`, which is imported only here."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, listed

_SPEC = re.compile(r"(?P<name>[^:#]+):(?P<split>[^:#]+)(?:#(?P<column>.+))?")


def parse(spec: str, rest: str) -> tuple[str, str, str]:
    """Parses the part of an input spec after `hf:` and returns dataset, split and column ("": not given)."""
    match = _SPEC.fullmatch(rest)
    if not match:
        raise UsageError(
            f"input {spec!r} has no split; write hf:NAME[/CONFIG]:SPLIT[#COLUMN], for example "
            "hf:wikimedia/wikipedia/20231101.en:train"
        )
    return match["name"], match["split"], match["column"] or ""


def check(name: str, split: str, column: str) -> None:
    """Raises a UsageError if the dataset, the split or the column does not exist."""
    with _one_line_errors(name, split):
        _text_column(_open(name, split), name, column)


def texts(
    name: str, split: str, column: str, problems: Counter[str], advance: Callable[[int], object]
) -> Iterator[str]:
    """Yields the text of each row of a dataset, in stored order, without storing the dataset.

    Args:
      name: `NAME`, `ORG/NAME` or `ORG/NAME/CONFIG`.
      split: name of a split.
      column: column of the text (default: "", the column `text` or the only column of strings).
      problems: counter of problems, updated while reading.
      advance: called with the number of bytes read since the last call.

    Raises:
      UsageError: the dataset, the split or the column does not exist.
      BertjaxError: the dataset cannot be read.
    """
    with _one_line_errors(name, split):
        dataset = _open(name, split)
        column = _text_column(dataset, name, column)
        for row in dataset.select_columns([column]):
            text = row[column] or ""
            problems["nul_characters"] += text.count("\0")
            advance(len(text.encode("utf-8", "surrogatepass")))
            yield text


def _open(name: str, split: str) -> Any:
    import datasets

    # The first slash is part of the name.
    parts = name.split("/", 2)
    return datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split, streaming=True)


def _text_column(dataset: Any, name: str, column: str) -> str:
    features = dataset.features or dataset._resolve_features().features
    columns = [key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    if column:
        if column not in columns:
            raise UsageError(f"dataset {name!r} has no text column {column!r}; use one of {listed(columns)}")
        return column
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        raise UsageError(
            f"dataset {name!r} has {len(columns)} text columns; append #COLUMN to choose one of {listed(columns)}"
        )
    return columns[0]


@contextlib.contextmanager
def _one_line_errors(name: str, split: str) -> Iterator[None]:
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
