"""From any format of checkpoint to any other."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from bertjax.corpus.staging import staged
from bertjax.errors import UsageError
from bertjax.interop import huggingface, names, tensorflow, workdir
from bertjax.interop.portable import Portable
from bertjax.training.checkpoint import CHECKPOINTS, absolute

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
    if (local / "params").exists() or (local / CHECKPOINTS).is_dir() or local.name == CHECKPOINTS:
        return BERTJAX
    if huggingface.is_folder(local):
        return HUGGINGFACE
    if tensorflow.prefix_of(local) is not None:
        return TENSORFLOW
    if not local.exists():
        raise UsageError(f"there is nothing at {path}; names of a hub are not downloaded, give a folder")
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
        return workdir.read(absolute(path))
    return {HUGGINGFACE: huggingface.read, TENSORFLOW: tensorflow.read}[form](Path(path).expanduser())


def convert(source: str, destination: str, form: str, overwrite: bool, tell: Callable[[str], None]) -> None:
    """Writes the checkpoint at `source` to the folder `destination` in another format, whole or not at all.

    Raises:
      UsageError: the source is no checkpoint, the format has no place for it, or the destination is taken.
      BertjaxError: reading or writing failed.
    """
    if form not in FORMATS:
        raise UsageError(f"--format is {form!r}; known: {', '.join(FORMATS)}")
    target = Path(destination).expanduser().absolute()
    given = Path(source).expanduser().absolute()
    if target == given or target in given.parents or given in target.parents:
        raise UsageError(f"{destination} and {source} lie in each other; choose another place")
    found = detect(source)
    with staged(target, overwrite, "checkpoint", _may_be_replaced) as folder:
        portable = read(source)
        tell(f"{source}: {found}, {_described(portable)}")
        for note in portable.notes:
            tell(note)
        write = {BERTJAX: workdir.write, HUGGINGFACE: huggingface.write, TENSORFLOW: tensorflow.write}[form]
        for note in write(portable, folder):
            tell(note)
        if form == BERTJAX:
            workdir.write_origin(folder, _origin(source))
    tell(f"wrote {target}: {form}")


@contextlib.contextmanager
def as_bertjax(path: str, tell: Callable[[str], None], keep: Path | None = None) -> Iterator[str]:
    """The path of a checkpoint of ours; one of another format is converted.

    Args:
      path: of any format.
      tell: takes what there is to say, a line at a time.
      keep: where the converted one stays, and is found the next time; None is a folder that is gone at the end.

    Raises:
      UsageError, BertjaxError: as `convert`.
    """
    if detect(path) == BERTJAX:
        yield path
    elif keep is not None:
        if workdir.origin(keep) != _origin(path):
            convert(path, str(keep), BERTJAX, True, tell)
        yield str(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
            target = f"{folder}/{Path(path).name}"
            convert(path, target, BERTJAX, False, tell)
            yield target


def _origin(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _may_be_replaced(path: Path) -> bool:
    """Whether a folder is what a conversion writes: not the workdir of a run, whose training would be lost."""
    return workdir.is_converted(path) or huggingface.is_folder(path) or (path / tensorflow.CONFIG).is_file()


def _described(portable: Portable) -> str:
    model = portable.model
    size = f"{model.num_layers} layers of width {model.hidden_size}, {model.vocab_size:,} pieces, {model.activation}"
    there = [text for part, text in _HEADS.items() if part in portable.parts]
    new = [text for part, text in _HEADS.items() if part not in portable.parts]
    if portable.output:
        there.append(f"output layer for {portable.output}")
    lacking = f"; new where they are needed: {', '.join(new)}" if new else ""
    return f"{size}; with {', '.join(there) or 'no head'}{lacking}"
