"""Functions that create, lock and check a workdir before the first training step, and open its checkpoints."""

import contextlib
import dataclasses
import json
import logging
import secrets
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
from etils import epath
from filelock import FileLock, Timeout

from bertjax.config.fields import differences, with_defaults
from bertjax.config.run import PATH_FIELDS
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.errors import BertjaxError, DivergenceError, UsageError, listed
from bertjax.tasks.build import config_class
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, DAMAGED, Checkpoints, resolve_checkpoint_path, workdir_of
from bertjax.training.checkpoint_metadata import model_metadata, read_metadata
from bertjax.training.multihost import assert_same_run, assert_shared_workdir, raise_on_all_hosts
from bertjax.utils.io import AnyPath, check_bucket, check_free_space, is_remote, remove_temporaries, write_atomic
from bertjax.utils.json_files import naming, read_object, write_json

logger = logging.getLogger(__name__)

CONFIG = "config.json"
DATA = "data.json"
RESULTS = "results.json"
CURVES = "curves.png"
CONFUSION = "confusion.png"
# File that describes the source of a converted checkpoint.
ORIGIN = "origin.json"
# Folder of the workdir for an `--init_from` checkpoint that was converted from another format.
CONVERTED = "init_from"
_LOCK = ".lock"
# Fields that may differ when a run resumes. They affect the result of a step only by rounding.
_RESUMABLE_FIELDS = (
    *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "divergence_factor", "patience"),
    *("mesh", "cluster", "hang_seconds", "data.eval_batch_size"),
    # These fields change only how the model is compiled, to fit other devices or less memory.
    *("model.scan_layers", "model.remat"),
    # Data is compared by its hash, so its path may change.
    *PATH_FIELDS,
)
_MAX_SHOWN_DIFFERENCES = 5
# Files that a new workdir may contain: hidden files, a converted checkpoint, logs of a shell or a scheduler.
_ALLOWED_FILES = (".*", CONVERTED, "*.log", "*.out", "*.err")


@contextlib.contextmanager
def open_workdir(
    task: Task, path: str, init_from: epath.Path | None, state_shapes: Any
) -> Iterator[tuple[epath.Path, Checkpoints, Callable[[], None]]]:
    """Creates and locks the workdir, checks that it belongs to this run, and opens its checkpoints.

    `init_from` is the checkpoint with the initial parameters of a new run (None: random parameters). `state_shapes` is
    the abstract train state.

    Yields:
      The workdir, its checkpoints, and a function that raises if another run has taken over the workdir.
    """
    config: dict[str, Any] = dataclasses.asdict(task.config)
    init_fingerprint = read_metadata(init_from).fingerprints["params"] if init_from else ""
    # Compare the contents of vocabulary and labels, because their paths may differ between hosts.
    files = {name: json.loads(task.workdir_files[name]) for name in (ENTRY, OUTPUT_LAYER) if name in task.workdir_files}
    assert_same_run({"config": config, "data": task.data_hash, "started_from": init_fingerprint, "files": files})
    workdir = create(path)
    assert_shared_workdir(workdir)
    if config["data"].get("vocabulary"):  # The original file may be in the temporary folder of a converted checkpoint.
        config["data"]["vocabulary"] = str(workdir / ENTRY)
    with acquire_lock(workdir):
        check_config(workdir, config, task.data_hash)
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state_shapes))
        check_free_space(workdir, 2 * state_bytes, "two checkpoints", "choose another --workdir")
        if jax.process_index() == 0:
            write_json(workdir / CONFIG, config)
            if not has_checkpoints(workdir):
                origin = read_origin(workdir_of(init_from)) if init_from else {}
                source = {name: origin[name] for name in ("source", "address") if name in origin}
                data = {"sha256": task.data_hash, "started_from": init_fingerprint, "init_from": source}
                write_json(workdir / DATA, data)
            for name, content in task.workdir_files.items():
                write_atomic(workdir / name, content)
        check_still_owner = take_ownership(workdir)
        keep, every = task.config.keep_checkpoints, task.checkpoint_every
        checkpoints = Checkpoints(workdir, keep, lambda step: model_metadata(task.objective_at(step).model), every)
        with contextlib.closing(checkpoints):
            try:
                yield workdir, checkpoints, check_still_owner
            except DivergenceError as error:
                checkpoints.wait()
                remedy = "use a lower optimizer.learning_rate or a longer warm-up, in a new --workdir"
                raise DivergenceError(f"{error}; {checkpoints.describe_last()}; {remedy}") from error


def create(path: str, marker: str = CONFIG) -> epath.Path:
    """Creates a workdir and returns its path. An existing folder must pass `check_unrelated_files`."""
    workdir = resolve_checkpoint_path(path)
    check_unrelated_files(workdir, marker)
    check_bucket(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    return workdir


def check_unrelated_files(workdir: epath.Path, marker: str = CONFIG) -> None:
    """Raises a UsageError if a folder contains files other than `_ALLOWED_FILES`, because a run might overwrite them.

    If the folder contains `marker` (a file or folder), it is a workdir and may contain any other files.
    """
    names = sorted(entry.name for entry in workdir.iterdir()) if workdir.exists() else []
    unrelated = [name for name in names if not any(fnmatch(name, pattern) for pattern in _ALLOWED_FILES)]
    if unrelated and marker not in names:
        raise UsageError(f"{workdir} contains unrelated files: {listed(unrelated, 3)}; choose another --workdir")
    if CONFIG in names and not {"task", "data", "model"} <= read_object(workdir / CONFIG).keys():
        raise UsageError(f"{workdir / CONFIG} is not the config of a run; choose another --workdir")


@contextlib.contextmanager
def acquire_lock(workdir: epath.Path) -> Iterator[None]:
    """Locks a local workdir until the context exits or the process ends. Removes temporary files of killed processes.

    Raises a UsageError if another run has locked the workdir.
    """

    lock = FileLock(workdir / _LOCK, blocking=False)
    with contextlib.ExitStack() as stack:
        with raise_on_all_hosts():
            if not is_remote(workdir) and jax.process_index() == 0:
                try:
                    stack.enter_context(lock)
                except Timeout:
                    message = f"another run is using the workdir {workdir}; wait or choose another --workdir"
                    raise UsageError(message) from None
                remove_temporaries(Path(workdir))
        yield


def take_ownership(workdir: epath.Path) -> Callable[[], None]:
    """Makes this run the owner of a workdir at a `gs://` path, where files cannot be locked.

    The newest run owns the workdir. An older run, for example on a preempted machine, must stop before its next save,
    so that two runs never write the same checkpoint. Returns a function that raises if another run is the owner.
    """
    if not is_remote(workdir) or jax.process_index() != 0:
        return lambda: None
    token = secrets.token_hex(16)
    write_atomic(workdir / _LOCK, token)

    def check_ownership() -> None:
        try:
            owner = (workdir / _LOCK).read_text()
        except FileNotFoundError:
            owner = ""
        if owner != token:
            raise BertjaxError(f"another run has taken over or emptied the workdir {workdir}; this run stops")

    return check_ownership


def check_config(workdir: epath.Path, config: dict[str, Any], data_hash: str) -> None:
    """Raises a UsageError if the data, or a config field that affects results, differs from the workdir's.

    If the workdir has no checkpoints, any config is accepted, because nothing would be lost. A finished run with a
    single phase continues if its command is run again with more steps or epochs.
    """
    if not has_checkpoints(workdir):
        return
    restore, repeat = "restore it, or choose another --workdir", "remove it, and run the same command again"
    saved, data = (read_object(workdir / name, optional=True, fix=restore) for name in (CONFIG, DATA))
    results = read_object(workdir / RESULTS, optional=True, fix=repeat)
    increased: dict[str, Any] = {}
    if not data:
        raise BertjaxError(f"{workdir / DATA} is missing; restore the file, or choose another --workdir")
    with naming(workdir / RESULTS, repeat):
        steps = [int(step.name) for step in (workdir / CHECKPOINTS).glob("*") if step.name.isdecimal()]
        if max(steps, default=0) <= results.get("last_step", -1):  # The run is finished; no checkpoint is newer.
            # Use epochs and steps of the results, because `config.json` may be from an interrupted continuation.
            finished = {name: results["config"][name] for name in ("epochs", "steps") if name in results["config"]}
            saved |= finished
            if len(config.get("phases", ())) <= 1:  # With several phases, more steps would move the later phases.
                # Ignore steps=0, which means that `epochs` determines the number of steps.
                increased = {name: config[name] for name, value in finished.items() if 0 < value < config[name]}
    problem = "on other data" if data.get("sha256") != data_hash else ""
    with naming(workdir / CONFIG, restore):
        if saved and (changes := result_differences({**saved, **increased}, config)):
            problem = f"with another config ({changes})"
    if problem:
        raise UsageError(f"{workdir} belongs to a run {problem}; restore config and data, or use another --workdir")
    for name, value in increased.items():
        change = f"{name} increased from {saved[name]:g} to {value:g}"
        logger.info(f"continuing the finished run with {change}; the learning rate reaches 0 at the new last step")


def saved_init_fingerprint(workdir: epath.Path) -> str | None:
    """Returns the fingerprint of a run's initial parameters ("": random), or None if the run has no checkpoints."""
    data = read_object(workdir / DATA, optional=True) if has_checkpoints(workdir) else {}
    return data.get("started_from", "") if data else None


def has_checkpoints(workdir: epath.Path) -> bool:
    """Returns True if a workdir contains checkpoints, damaged or not."""
    return any(folder.exists() and any(folder.iterdir()) for folder in (workdir / CHECKPOINTS, workdir / DAMAGED))


def result_differences(old: dict[str, Any], new: dict[str, Any], of_best: bool = False) -> str:
    """Lists, in one line, the fields that affect results and differ between two configs ("": none differ).

    With `of_best`, also compares `eval_every` and `patience`, which determine which checkpoints can be the best.
    """
    # Convert tuples to lists, because one of the configs may come from JSON.
    old, new = (json.loads(json.dumps(with_defaults(config_class(config["task"]), config))) for config in (old, new))
    for config in (old, new):
        for source in config["data"].get("sources", ()):
            del source["file"]  # ignored like the paths of `PATH_FIELDS`
    fields = (field for field in _RESUMABLE_FIELDS if not (of_best and field in ("eval_every", "patience")))
    ignored = tuple(f"{field}{end}" for field in fields for end in ":.")
    changes = [line for line in differences(old, new) if not line.startswith(ignored)]
    return "; ".join(changes[:_MAX_SHOWN_DIFFERENCES]) + ("; ..." if len(changes) > _MAX_SHOWN_DIFFERENCES else "")


def read_origin(workdir: AnyPath) -> dict[str, Any]:
    """Reads the source of a workdir's converted checkpoint. Returns {} if the checkpoint was not converted."""
    try:
        return read_object(workdir / ORIGIN)
    except UsageError:
        return {}


def pinned_address(address: str, path: str) -> str:
    """Pins a Hub address `hf:ORG/NAME[@REVISION]` to the commit that the run in the workdir `path` started from.

    Returns other addresses and local paths unchanged.
    """
    init_from = read_object(resolve_checkpoint_path(path) / DATA, optional=True).get("init_from") or {}
    return init_from["source"] if init_from.get("address") == address else address


def is_converted(workdir: AnyPath) -> bool:
    """Returns True if `bertjax convert` wrote the workdir."""
    return (workdir / ORIGIN).exists()
