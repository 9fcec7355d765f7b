"""Weights of a Hugging Face folder: one safetensors file, or shards with an index."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bertjax.convert.huggingface_tokenizer import VOCABULARY
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.utils.io import read_json

WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def has_weights(path: Path) -> bool:
    """Returns True for a folder with safetensors weights."""
    return (path / WEIGHTS).is_file() or (path / _INDEX).is_file()


def open_weights(folder: Path, architecture: str) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Opens the weights of a folder.

    Args:
      folder: Hugging Face folder.
      architecture: class name in transformers, for the message about pickles.

    Returns:
      The shape of each array, and a function that reads one array by name.
    """
    from safetensors import safe_open

    shapes, files = {}, {}
    for path in _weight_files(folder, architecture):
        with _naming_file(path):
            # Pages of a memory-mapped file would count as memory until it is closed.
            file = safe_open(path, framework="numpy", backend="pread")
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), (path, file)

    def read_array(name: str) -> np.ndarray:
        path, file = files[name]
        with _naming_file(path):
            return file.get_tensor(name)

    return shapes, read_array


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BertjaxError(f"cannot read {path}: {error}; copy it again") from error


def _weight_files(folder: Path, architecture: str) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted({*read_json(index)["weight_map"].values()})
            outside = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"cannot read {index}: {error}; copy it again") from error
        if outside:
            raise UsageError(f"{index} has files outside its folder: {listed(outside)}; copy the original index")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise UsageError(f"{folder} lacks {listed(missing)}, listed in {_INDEX}; copy all shards")
        return [folder / name for name in names]
    if pickles := [name for name in _PICKLES if (folder / name).is_file()]:
        raise UsageError(
            f"{folder} has {pickles[0]} but no {WEIGHTS}; bertjax does not open pickles, which can run any code. If "
            f'you trust it: python -c "import sys; from transformers import {architecture} as M; '
            f'M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {shlex.quote(str(folder))} '
            f"{shlex.quote(f'{folder}-safetensors')}, and copy {VOCABULARY} there"
        )
    raise UsageError(f"{folder} has neither {WEIGHTS} nor {_INDEX}; copy the weights there")
