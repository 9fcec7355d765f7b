"""Weights of a folder in Hugging Face's format: safetensors in one file or in shards."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from bertjax.convert.arrays import FLOAT_DTYPES
from bertjax.errors import UsageError, listed
from bertjax.tasks.embedding import sentence_transformers
from bertjax.utils.io import unreadable
from bertjax.utils.json_files import naming, read_object

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def has_weights(path: Path) -> bool:
    """Returns True if a folder, or the subfolder of its sentence-transformers encoder, contains safetensors weights."""
    path = sentence_transformers.transformer_folder(path)
    return (path / WEIGHTS).is_file() or (path / INDEX).is_file()


def open_weights(folder: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Returns the shapes of a folder's arrays, keyed by name, and a function that reads one array by name."""
    shapes, files = {}, {}
    for path in _weight_files(folder):
        with _naming_file(path):
            # Read without mmap, because mapped pages would count as used memory until the file is closed.
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
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise unreadable(path, str(error)) from error
    except AttributeError as error:  # NumPy lacks the dtype of an array, such as float8.
        raise UsageError(f"cannot read {path}: {error}; weights must be {', '.join(FLOAT_DTYPES)}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file() and any(folder.glob("*.bin")):
        raise missing_weights(str(folder), f"{folder}-safetensors")
    if not index.is_file():
        fix = "save the model with save_pretrained of transformers, and copy all files"
        raise UsageError(f"{folder} contains neither {WEIGHTS} nor {INDEX}; {fix}")
    with naming(index):
        files = sorted({*read_object(index)["weight_map"].values()})
        # Do not open files outside the folder.
        if missing := [name for name in files if Path(name).name != name or not (folder / name).is_file()]:
            raise UsageError(f"{index} lists files that its folder lacks: {listed(missing)}; copy all shards")
    return [folder / name for name in files]


def missing_weights(model: str, destination: str) -> UsageError:
    """Returns the error for a model without safetensors, a folder or Hub name, with a command that converts pickles."""
    # The printed command reads the class name itself, because a name from the config may contain shell code.
    return UsageError(
        f"{model} contains no {WEIGHTS}; bertjax does not open pickles such as pytorch_model.bin, which can run code. "
        'If you trust the file, run: python -c "import sys, transformers as t; '
        "name = (t.AutoConfig.from_pretrained(sys.argv[1]).architectures or ['AutoModel'])[0]; "
        f'getattr(t, name).from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {shlex.quote(model)} '
        f"{shlex.quote(destination)}, and copy the files of the tokenizer there"
    )
