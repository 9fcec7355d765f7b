"""The weights of a folder of Hugging Face: one file of safetensors, or shards of them and an index."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bertjax.convert.foreign_tokenizer import VOCABULARY
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.utils.io import read_json

WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def has_weights(path: Path) -> bool:
    """Whether something is a folder with weights that can be read."""
    return (path / WEIGHTS).is_file() or (path / _INDEX).is_file()


def read_arrays(folder: Path, architecture: str) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Shapes of all arrays of a folder, and how to get one; nothing but what is asked for is read.

    Raises:
      UsageError: there are no weights, or none that can be read without running code.
      BertjaxError: a file cannot be read.
    """
    from safetensors import safe_open

    shapes, files = {}, {}
    for path in _weight_files(folder, architecture):
        with _reading(path):
            # What is given out of a mapped file would count as held until it is closed.
            file = safe_open(path, framework="numpy", backend="pread")
            for name in file.keys():  # noqa: SIM118 - no dictionary
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), (path, file)

    def get(name: str) -> np.ndarray:
        path, file = files[name]
        with _reading(path):
            return file.get_tensor(name)

    return shapes, get


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BertjaxError(f"cannot read {path}: {error}; copy it anew") from error


def _weight_files(folder: Path, architecture: str) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / _INDEX).is_file():
        try:
            wanted = sorted({*read_json(folder / _INDEX)["weight_map"].values()})
            beyond = [name for name in wanted if Path(name).name != name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"cannot read {folder / _INDEX}: {error}") from error
        if beyond:
            raise UsageError(f"{folder / _INDEX} names {listed(beyond)}, which are no files of that folder")
        lacking = [name for name in wanted if not (folder / name).is_file()]
        if lacking:
            raise UsageError(f"{folder / _INDEX} names {listed(lacking)}, which {folder} lacks")
        return [folder / name for name in wanted]
    pickled = [name for name in _PICKLED if (folder / name).is_file()]
    if pickled:
        raise UsageError(
            f"{folder} has {pickled[0]} and no {WEIGHTS}; a pickle may run any code, so bertjax opens none. Where you "
            f'trust it: python -c "import sys; from transformers import {architecture} as M; '
            f'M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {shlex.quote(str(folder))} '
            f"{shlex.quote(f'{folder}-safetensors')}, and copy {VOCABULARY} there"
        )
    raise UsageError(f"{folder} has no {WEIGHTS} and no {_INDEX}")
