"""Functions that read checkpoints in any format, and convert them to the formats of `WRITERS`."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bertjax.convert import huggingface, model_card, tensorflow1
from bertjax.convert.family import DISCRIMINATOR, ENCODER, NEXT_SENTENCE
from bertjax.convert.huggingface_tokenizer import TOKENIZER_FILES, read_tokenizer
from bertjax.convert.huggingface_weights import has_weights, missing_weights
from bertjax.convert.portable import WORKDIR_FILES, PortableCheckpoint, missing_vocabulary, read_workdir, write_workdir
from bertjax.data.corpus.vocabulary import Vocabulary, load_vocabulary, open_vocabulary, workdir_vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.tasks.embedding import sentence_transformers
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.sharding import list_devices
from bertjax.training.workdir import CONFIG, ORIGIN, is_converted, read_origin
from bertjax.utils import hub
from bertjax.utils.io import atomic_folder, check_free_space, recover_folder
from bertjax.utils.json_files import write_json
from bertjax.utils.process_pool import process_pool

logger = logging.getLogger(__name__)

BERTJAX, HUGGINGFACE, TENSORFLOW = "bertjax", "huggingface", "tensorflow"
EMBEDDER = "sentence_transformers"
WRITERS = {BERTJAX: write_workdir, HUGGINGFACE: huggingface.write, EMBEDDER: huggingface.write_embedder}
# Files that a conversion may overwrite, keyed by the file that identifies their format.
_REPLACEABLE = {ORIGIN: WORKDIR_FILES, huggingface.CONFIG: huggingface.FILES}
_SAVED_FROM_PYTHON = {"source": "bertjax.Pretrained.save"}
_READ_FILES = (*huggingface.READ_FILES, *sentence_transformers.READ_FILES)


def local_checkpoint(path: str | os.PathLike) -> str:
    """Returns the local path of a checkpoint. Downloads it if `path` is a Hub address, `hf:ORG/NAME[@REVISION]`."""
    if not hub.is_hub(path):
        return str(path)
    repository, folder = hub.parse(str(path))[0], hub.download(str(path), _READ_FILES)
    if paths := [path for path in sentence_transformers.module_paths(folder).values() if path]:
        # Also download the folders of these modules, from the same commit as the first download.
        commit = f"{hub.PREFIX}{repository}@{folder.name}"
        hub.download(commit, [f"{path}/{name}" for path in paths for name in _READ_FILES])
    if not has_weights(folder):
        raise missing_weights(repository, repository.split("/")[-1])
    return str(folder)


def detect_format(path: str | os.PathLike) -> str:
    """Returns the format of the checkpoint at a path."""
    if "://" in str(path):
        return BERTJAX
    local = Path(path).expanduser()
    if has_weights(local):
        return HUGGINGFACE
    if (local / "params").is_dir() or (local / CHECKPOINTS).is_dir() or (local.is_dir() and local.name == CHECKPOINTS):
        return BERTJAX
    prefix = tensorflow1.find_prefix(local)
    if prefix is not None and (prefix.parent / tensorflow1.CONFIG).is_file():
        return TENSORFLOW
    if huggingface.is_checkpoint_folder(local):
        return HUGGINGFACE
    if prefix is not None:
        return TENSORFLOW
    # transformers' Trainer writes one folder per saved step.
    if folders := [folder.name for folder in sorted(local.glob("checkpoint-*/"), key=os.path.getmtime)]:
        message = f"{path} is a folder of checkpoints of transformers' Trainer"
        raise UsageError(f"{message}; use one of them, such as {folders[-1]}")
    raise UsageError(
        f"no checkpoint at {path}; use a folder with {CHECKPOINTS}/ (bertjax), config.json (Hugging Face) or an "
        ".index file (TensorFlow), or hf:ORG/NAME for a model on the Hugging Face Hub"
    )


def read_checkpoint(path: str | os.PathLike, lower_case: bool | None = None) -> PortableCheckpoint:
    """Reads a checkpoint of any format into host memory.

    `lower_case` overrides the tokenizer's setting (default: None, no override).
    """
    fmt = detect_format(path)
    if fmt == BERTJAX:
        _reject_case(path, lower_case)
        return read_workdir(path)
    read = huggingface.read if fmt == HUGGINGFACE else tensorflow1.read
    return read(Path(path).expanduser(), lower_case)


def _reject_case(path: str | os.PathLike, lower_case: bool | None) -> None:
    if lower_case is not None:
        raise UsageError(f"the workdir {path} already sets lower_case; omit --cased, --uncased or lower_case")


def read_vocabulary(path: str | os.PathLike, lower_case: bool | None = None) -> Vocabulary:
    """Reads a vocabulary from a file, from a checkpoint of any format, or from the Hub."""
    if hub.is_hub(path):
        folder = hub.download(str(path), (huggingface.CONFIG, *TOKENIZER_FILES))
    else:
        folder = Path(path).expanduser()
        if folder.is_file():
            return open_vocabulary(folder) if lower_case is None else load_vocabulary(folder, lower_case)
        if detect_format(path) == BERTJAX:
            _reject_case(path, lower_case)
            return workdir_vocabulary(workdir_of(find_checkpoint(path)))
    folder = sentence_transformers.transformer_folder(folder)
    prefix = tensorflow1.find_prefix(folder)
    if prefix is None or has_weights(folder):
        vocabulary, _, notes = read_tokenizer(folder, lower_case)
        for note in notes:
            logger.info(note)
    else:
        vocabulary = tensorflow1.read_vocabulary(prefix.parent, lower_case)
    if vocabulary is None:
        raise missing_vocabulary(path)
    return vocabulary


def convert(source: str, destination: str, fmt: str, overwrite: bool, lower_case: bool | None = None) -> None:
    """Converts the checkpoint at a path or Hub address to the format `fmt`. Writes the destination atomically."""
    # os.path.realpath resolves links and `..`. Unlike Path.resolve, it accepts a link that points to itself.
    target, source_path = (Path(os.path.realpath(Path(path).expanduser())) for path in (destination, source))
    is_local = "://" not in source and not hub.is_hub(source)
    if is_local and (target == source_path or target in source_path.parents or source_path in target.parents):
        raise UsageError(f"{destination} and {source} overlap; choose a destination outside the source")
    # Initialize the devices, because Orbax needs them to read and write checkpoints.
    list_devices()
    path = local_checkpoint(source)
    checkpoint = read_checkpoint(path, lower_case)
    heads = ", ".join(sorted(checkpoint.modules - {ENCODER})) or "(none)"
    logger.info(f"{source}: {detect_format(path)}, {checkpoint.size}; heads: {heads}")
    save(checkpoint, destination, fmt, overwrite, _origin_of(source, path))


def save(
    checkpoint: PortableCheckpoint,
    destination: str | os.PathLike,
    fmt: str,
    overwrite: bool,
    origin: Mapping[str, Any] = _SAVED_FROM_PYTHON,
) -> None:
    """Writes an in-memory checkpoint atomically. In bertjax's format, also writes `origin` to `origin.json`.

    Removes untrained heads from `checkpoint.params`. In other formats, removes all arrays, to save memory.
    """
    if fmt not in WRITERS:
        raise UsageError(f"unknown format {fmt!r}; use one of {', '.join(WRITERS)}")
    if hub.is_hub(destination) or "://" in str(destination):
        raise UsageError(f"cannot save to {destination}; save to a local folder, then copy it")
    params, target = checkpoint.params, Path(os.path.realpath(Path(destination).expanduser()))
    # A copy in bertjax's format keeps the next-sentence head, which `evaluate` needs.
    left_out = {*checkpoint.unexported} - {NEXT_SENTENCE if fmt == BERTJAX else ""}
    # In transformers, only ELECTRA has the head that detects replaced tokens.
    left_out |= {DISCRIMINATOR} if fmt != BERTJAX and checkpoint.config.model_type != "electra" else set()
    for name in [name for name in params if name.split("/")[0] in left_out]:
        del params[name]
    with atomic_folder(target, overwrite, "checkpoint", _REPLACEABLE) as folder:
        check_free_space(target, sum(array.nbytes for array in params.values()), f"the checkpoint {target}")
        try:
            notes = [*checkpoint.notes, *WRITERS[fmt](checkpoint, Path(folder))]
        except (BertjaxError, OSError):
            raise
        except Exception as error:  # Catch all, because Orbax and safetensors raise different types on a full disk.
            raise BertjaxError(f"cannot write the checkpoint {target}: {first_line(error)}; check the disk") from error
        for note in notes:
            logger.info(note)
        if fmt == BERTJAX:
            write_json(folder / ORIGIN, origin)


def upload(source: str, address: str, overwrite: bool) -> str:
    """Uploads a checkpoint to the Hub in Hugging Face's format, with a model card, and returns the URL.

    `address` is `hf:ORG/NAME[@BRANCH]`. With `overwrite`, adds a commit to a repository that already contains a model.
    """
    path = local_checkpoint(source)
    workdir = workdir_of(find_checkpoint(path)) if detect_format(path) == BERTJAX else None
    run = None if workdir is None or is_converted(workdir) else workdir
    checkpoint = read_checkpoint(path)
    card = model_card.model_card(hub.parse(address)[0], run, checkpoint)
    with tempfile.TemporaryDirectory(prefix="bertjax-") as parent:
        folder = Path(parent, "model")
        save(checkpoint, folder, HUGGINGFACE, overwrite=False)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if run is not None:
            (folder / model_card.CONFIG_FILE).write_bytes((run / CONFIG).read_bytes())
        message = f"Upload {source.rstrip('/').split('/')[-1]} with bertjax"
        # Remove the sentence-transformers modules of a replaced model, because they must not apply to this one.
        return hub.upload(folder, address, overwrite, message, replaced=sentence_transformers.STALE_FILES)


@contextlib.contextmanager
def bertjax_checkpoint(path: str, cache_dir: Path | None = None) -> Iterator[str]:
    """Yields the path of a checkpoint in bertjax's format. Converts `path` if it has another format or is on the Hub.

    With `cache_dir`, the converted checkpoint is saved in the folder `cache_dir`. Later calls with the same `path`
    reuse this checkpoint, unless the files of a local `path` have changed. New commits on the Hub are ignored, because
    a resumed run must use the same commit. Without `cache_dir`, the conversion is in a temporary folder.
    """
    cached: dict[str, Any] = {}
    if cache_dir:
        recover_folder(cache_dir)
        cached = read_origin(epath.Path(cache_dir))
    if cached and _is_origin(cached, path):
        logger.info(f"using {cache_dir}, converted from {cached.get('source')}")
        yield str(cache_dir)
    elif not hub.is_hub(path) and detect_format(path) == BERTJAX:
        yield path
    elif cache_dir:
        convert(path, str(cache_dir), BERTJAX, overwrite=bool(cached))
        yield str(cache_dir)
    else:
        with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
            target = f"{folder}/converted"
            try:
                if jax.distributed.is_initialized():
                    _convert_in_subprocess(path, target)
                else:
                    convert(path, target, BERTJAX, overwrite=False)
                yield target
            except BertjaxError as error:
                # Replace temporary paths in the message with the path that the user gave.
                message = str(error).replace(f"{target}/{CHECKPOINTS}/0", path).replace(target, path)
                raise type(error)(message) from error


def _is_origin(origin: dict[str, Any], path: str) -> bool:
    """Returns True if `origin` describes a conversion of `path`, and the files of `path` are unchanged or removed."""
    if hub.is_hub(path):
        return path in (origin.get("address"), origin.get("source"))
    current = _origin_of(path)
    return origin == current or (origin.get("source") == current["source"] and not Path(path).expanduser().exists())


def _convert_in_subprocess(path: str, target: str) -> None:
    """Converts a checkpoint in a subprocess. In a process that uses jax.distributed, Orbax would wait for all hosts."""
    worker_died = BertjaxError(f"the conversion of {path} was killed; check the free memory of the host")
    with process_pool(1, worker_died, _use_cpu) as pool:
        pool.submit(convert, path, target, BERTJAX, False).result()


def _use_cpu() -> None:
    # Use the CPU, because the parent process owns the accelerators.
    jax.config.update("jax_platforms", "cpu")


def _origin_of(path: str, folder: str = "") -> dict[str, Any]:
    """Returns the content of `origin.json`, which identifies the source of a conversion.

    For a local checkpoint, this is its path, and the name, size and modification time of each file. For the Hub,
    `folder` is the folder of the download, whose name is the commit.
    """
    if hub.is_hub(path):
        return {"source": f"{hub.PREFIX}{hub.parse(path)[0]}@{Path(folder).name}", "address": path}
    source = Path(path).expanduser().absolute()
    root, patterns = (source, ("*", "*/*")) if source.is_dir() else (source.parent, ("*",))
    files = sorted(file for pattern in patterns for file in root.glob(pattern) if file.is_file())
    return {
        "source": str(source),
        "files": [[str(file.relative_to(root)), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }
