"""From any format of checkpoint to any other."""

import contextlib
import fnmatch
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bertjax.convert import foreign_weights, huggingface, names, workdir
from bertjax.convert import tensorflow1 as tensorflow
from bertjax.convert.foreign_tokenizer import read_tokenizer
from bertjax.convert.portable import Portable
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.training.checkpoint import CHECKPOINTS, resolve_checkpoint_path
from bertjax.training.workdir import is_converted
from bertjax.utils.atomic_directory import atomic_directory, recover_directory
from bertjax.utils.io import check_free_space
from bertjax.utils.process_pool import process_pool

logger = logging.getLogger(__name__)

BERTJAX, HUGGINGFACE, TENSORFLOW = "bertjax", names.HUGGINGFACE, names.TENSORFLOW
FORMATS = (BERTJAX, HUGGINGFACE, TENSORFLOW)
_HEADS = {names.POOLER: "pooler", names.MASKED_LM: "masked-LM head", names.NEXT_SENTENCE: "next-sentence head"}


def detect(path: str | epath.Path) -> str:
    """The format of what is at a path.

    Raises:
      UsageError: there is nothing, or nothing that any reader knows.
    """
    if "://" in str(path):
        return BERTJAX
    local = Path(path).expanduser()
    if foreign_weights.has_weights(local):
        return HUGGINGFACE
    if (local / "params").is_dir() or (local / CHECKPOINTS).is_dir():
        return BERTJAX
    prefix = tensorflow.prefix_of(local)
    if prefix is not None and (prefix.parent / tensorflow.CONFIG).is_file():
        return TENSORFLOW
    if huggingface.is_folder(local):
        return HUGGINGFACE
    if prefix is not None:
        return TENSORFLOW
    if local.name == CHECKPOINTS and local.is_dir():
        return BERTJAX
    if not local.exists():
        raise UsageError(f"there is nothing at {path}; names of a hub are not downloaded, give a folder")
    if local.is_file():
        raise UsageError(f"{path} is a file; give the folder it is in")
    raise UsageError(
        f"no checkpoint at {path}: neither {CHECKPOINTS}/ of a bertjax workdir, nor config.json of Hugging Face, nor "
        "an .index file of TensorFlow"
    )


def read(path: str | epath.Path) -> Portable:
    """A checkpoint of any format.

    Raises:
      UsageError, BertjaxError: as the format's reader.
    """
    form = detect(path)
    if form == BERTJAX:
        return workdir.read(resolve_checkpoint_path(path))
    return {HUGGINGFACE: huggingface.read, TENSORFLOW: tensorflow.read}[form](Path(path).expanduser())


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a folder of Hugging Face or of google-research/bert, without its arrays.

    Raises:
      UsageError: there is none.
    """
    prefix = tensorflow.prefix_of(path)
    folder = prefix.parent if prefix is not None else path
    vocabulary = read_tokenizer(folder)[0]
    if vocabulary is None:
        raise UsageError(f"{path} has no vocab.txt; put the one it was trained with beside it")
    return vocabulary


def convert(source: str, destination: str, form: str, overwrite: bool) -> None:
    """Writes the checkpoint at `source` to the folder `destination` in another format, whole or not at all.

    Raises:
      UsageError: the source is no checkpoint, the format has no place for it, or the destination is taken.
      BertjaxError: reading or writing failed.
    """
    if form not in FORMATS:
        raise UsageError(f"--format is {form!r}; known: {', '.join(FORMATS)}")
    if "://" in destination:
        raise UsageError(f"{destination} is not on this machine; convert to a folder and copy it there")
    # Resolved, so that no link and no `..` hides that both are one.
    # Not Path.resolve, which a link to itself is an error of its own for.
    target, given = (Path(os.path.realpath(Path(path).expanduser())) for path in (destination, source))
    if "://" not in source and (target == given or target in given.parents or given in target.parents):
        raise UsageError(f"{destination} and {source} lie in each other; choose another place")
    found = detect(source)
    with atomic_directory(target, overwrite, "checkpoint", _may_be_replaced) as folder:
        portable = read(source)
        check_free_space(target, sum(array.nbytes for array in portable.params.values()), f"the checkpoint {target}")
        logger.info(f"{source}: {found}, {_described(portable)}")
        for note in portable.notes:
            logger.info(note)
        write = {BERTJAX: workdir.write, HUGGINGFACE: huggingface.write, TENSORFLOW: tensorflow.write}[form]
        try:
            for note in write(portable, folder):
                logger.info(note)
        except (BertjaxError, OSError):
            raise
        except Exception as error:  # A full disk is an exception of its own for each library.
            raise BertjaxError(f"cannot write the checkpoint {target}: {first_line(error)}") from error
        if form == BERTJAX:
            workdir.write_origin(folder, _origin(source))
    logger.info(f"wrote {target}: {form}")


@contextlib.contextmanager
def as_bertjax(path: str, keep: Path | None = None) -> Iterator[str]:
    """The path of a checkpoint of ours; one of another format is converted.

    Args:
      path: of any format.
      keep: where the converted one stays, and is found the next time; None is a folder that is gone at the end.

    Raises:
      UsageError, BertjaxError: as `convert`.
    """
    if keep:
        # A run that was killed when all was in its place is not made anew, and had left no more than its folder.
        recover_directory(keep)
    kept = workdir.read_origin(keep) if keep else {}
    if keep and kept.get("source") == _origin(path)["source"] and not Path(path).expanduser().exists():
        logger.info(f"{path} is gone; taken: {keep}, which was converted from it")
        yield str(keep)
    elif detect(path) == BERTJAX:
        yield path
    elif keep:
        if kept != _origin(path):
            convert(path, str(keep), BERTJAX, bool(kept))
        yield str(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
            target = f"{folder}/converted"
            try:
                if jax.distributed.is_initialized():
                    _convert_in_a_process_of_its_own(path, target)
                else:
                    convert(path, target, BERTJAX, False)
                yield target
            except BertjaxError as error:
                # The user knows the place by the other name.
                raise type(error)(
                    str(error).replace(f"{target}/{CHECKPOINTS}/0", path).replace(target, path)
                ) from error


def _convert_in_a_process_of_its_own(path: str, target: str) -> None:
    """For one process of several, each of which converts for itself: of those Orbax has the first alone write."""
    with process_pool(1, _crashed, _use_cpu) as process:
        for line in process.submit(_converted, path, target).result():
            logger.info(line)


def _converted(path: str, target: str) -> list[str]:
    """Converts to our format, and gives what there is to say."""
    told: list[str] = []
    convert(path, target, BERTJAX, False, told.append)
    return told


def _use_cpu() -> None:
    # Accelerators are the run's.
    jax.config.update("jax_platforms", "cpu")


def _crashed() -> BertjaxError:
    return BertjaxError("the process that converts the checkpoint was killed; is there enough memory?")


def _origin(path: str) -> dict[str, Any]:
    """Where a checkpoint is, and what tells one from another that comes to the same place."""
    source = Path(path).expanduser().absolute()
    folder = source if source.is_dir() else source.parent
    files = sorted(file for file in folder.glob("*") if file.is_file())
    return {
        "source": str(source),
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _may_be_replaced(path: Path) -> bool:
    """Whether a folder holds what a conversion writes, all else would be lost: the workdir of a run, a user's notes."""
    held = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if is_converted(path):
        files: tuple[str, ...] = workdir.FILES
    else:
        files = huggingface.FILES if huggingface.CONFIG in held else tensorflow.FILES
        if not {huggingface.CONFIG, tensorflow.CONFIG} & {*held}:
            return False
    return all(any(fnmatch.fnmatch(name, pattern) for pattern in files) for name in held)


def _described(portable: Portable) -> str:
    model = portable.model
    size = f"{model.num_hidden_layers} layers of width {model.hidden_size}, {model.vocab_size:,} pieces, {model.hidden_act}"
    there = [text for part, text in _HEADS.items() if part in portable.parts]
    new = [text for part, text in _HEADS.items() if part not in portable.parts]
    if portable.output:
        there.append(f"output layer for {portable.output}")
    lacking = f"; new where they are needed: {', '.join(new)}" if new else ""
    return f"{size}; with {', '.join(there) or 'no head'}{lacking}"
