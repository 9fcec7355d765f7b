"""Checkpoints that are saved asynchronously and atomically, and checked for damage when restored.

A checkpoint is the folder `WORKDIR/checkpoints/STEP` with three Orbax items: `params` (the parameters to evaluate),
`training` (the rest of the train state) and `meta` (see `checkpoint_metadata.py`). Fingerprints in `meta` detect
damaged arrays. During a save, a local checkpoint has a temporary name, and a `gs://` checkpoint lacks its commit file.
"""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from bertjax.config.fields import differences
from bertjax.config.load import load_saved_config
from bertjax.errors import BertjaxError, LostError, UsageError, first_line
from bertjax.training.checkpoint_metadata import CheckpointMetadata, fingerprint, raise_unless_damage, read_metadata
from bertjax.training.multihost import is_collective_error, raise_on_all_hosts
from bertjax.training.step import TrainState
from bertjax.utils.io import is_remote

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# Orbax items with arrays: the parameters to evaluate, and all other fields of the train state.
_ITEMS = ("params", "training")
DAMAGED = "damaged_checkpoints"
# Hosts with replicas of an array write parts of it in parallel. This is the minimum size of a part in bytes.
_MIN_SHARED_BYTES = 1 << 20
# Characters refused in paths, because Orbax reads them as a glob pattern and would not find the checkpoint.
_GLOB_CHARACTERS = frozenset("[]*?\\")


@dataclasses.dataclass(frozen=True)
class KeepBestAndPeriodic(preservation_policy.PreservationPolicy):
    """Policy that keeps the newest checkpoint, the newest periodic checkpoints, and the one with the best score.

    Other checkpoints, such as those saved on a stop signal, are kept only while they are the newest.
    """

    keep: int  # number of checkpoints besides the best checkpoint: the newest and up to `keep - 1` periodic checkpoints
    every: int  # steps between periodic checkpoints. Their steps are multiples of this number.
    # Score of each checkpoint by step, higher is better (None: no score). Of equal scores, the newest is best.
    scores: Mapping[int, float | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        periodic = [step for step in steps[:-1] if step % self.every == 0]
        first = max(len(periodic) - self.keep + 1, 0)
        scored = [(score, step) for step in steps if (score := self.scores.get(step)) is not None]
        preserved = {*steps[-1:], *periodic[first:], *(step for _, step in sorted(scored)[-1:])}
        return [step in preserved for step in steps]


class Checkpoints:
    """Wrapper of `orbax.checkpoint.CheckpointManager` for the checkpoints of one workdir."""

    def __init__(self, workdir: epath.Path, keep: int, model: Callable[[int], dict[str, Any]], every: int = 1) -> None:
        """Opens or creates `workdir/checkpoints`, and removes incomplete checkpoints of interrupted saves.

        `keep` and `every` are fields of `KeepBestAndPeriodic`. `model` returns the `model_metadata` of a step. Moves
        checkpoints with damaged metadata aside. Raises a BertjaxError if the existing checkpoints cannot be listed.
        """
        self._workdir, self._folder, self._model = workdir, workdir / CHECKPOINTS, model
        # Orbax stores scores, too, but without a checksum.
        self._scores: dict[int, float | None] = {}
        policy = KeepBestAndPeriodic(keep, every, self._scores)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_SHARED_BYTES)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in _ITEMS}
        try:
            self._manager = ocp.CheckpointManager(
                self._folder, options=options, item_handlers={**handlers, "meta": ocp.JsonCheckpointHandler()}
            )
        except Exception as error:  # Orbax reads metadata of all checkpoints, which may be damaged.
            if is_collective_error(error):
                raise
            message = f"cannot list the checkpoints in {self._folder}: {first_line(error)}; move damaged ones elsewhere"
            raise BertjaxError(message) from error
        for step in self._manager.all_steps():
            try:
                self._scores[step] = self._read_metadata(step).score
            except BertjaxError as error:
                self.move_aside(step, error)

    def _read_metadata(self, step: int) -> CheckpointMetadata:
        with read_on_all_hosts(self.path(step)):
            return read_metadata(self.path(step))

    def path(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def save(self, state: TrainState, score: float | None = None, sha256: str = "") -> None:
        """Starts an asynchronous save and returns once the state is copied from the devices.

        Waits for the previous save first. Does nothing if the step is already saved. A higher `score` is better; None
        is lower than any score. `sha256` is saved as `CheckpointMetadata.metrics_sha256`. Raises a BertjaxError if this
        save or the previous one failed.
        """
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        items = _as_items(vars(state), state.eval_field)
        fingerprints = {name: fingerprint(tree) for name, tree in items.items()}
        fields: dict[str, Any] = {"arrays": _array_shapes(state), "score": score, "metrics_sha256": sha256}
        metadata = CheckpointMetadata(step, **self._model(step), fingerprints=fingerprints, **fields)
        arrays = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        args = ocp.args.Composite(**arrays, meta=ocp.args.JsonSave(metadata.as_json()))
        self._scores[step] = score
        self._report_failure(lambda: self._manager.save(step, args=args))

    def wait(self) -> None:
        """Waits until the last save is complete."""
        self._report_failure(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits for the last save and releases the manager."""
        self._report_failure(self._manager.close)

    def _report_failure(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # Orbax re-raises any exception of the storage library.
            if is_collective_error(error):
                raise
            message = f"saving a checkpoint in {self._folder} failed ({first_line(error)}); {self.describe_last()}"
            if isinstance(error, TimeoutError):  # A restart may help, for example if the clock has jumped.
                raise LostError(f"{message}. Run the command again") from error
            raise BertjaxError(f"{message}. Free some space or fix the cause, then run the command again") from error

    def describe_last(self) -> str:
        """Returns a clause that names the newest complete checkpoint, for use in error messages."""
        # List the folder, because after a failed save, the manager omits checkpoints that the save would have replaced.
        try:
            steps = _complete_checkpoints(self._folder)
        except Exception:  # A storage failure may make listing fail, too.
            return "the last good checkpoint is unknown, because the folder cannot be listed"
        last = max(steps, key=lambda step: int(step.name), default=None)
        return f"the last good checkpoint is {last}" if last else "no checkpoint was saved yet"

    def restore_latest(self, abstract: TrainState, init: Callable[[], TrainState]) -> TrainState | None:
        """Restores the newest undamaged checkpoint. Moves newer, damaged ones to `workdir/damaged_checkpoints`.

        `init` returns an initial state, which provides all fields and metric sums that the checkpoint lacks. Fields
        that depend on the initial parameters, such as averages, are computed from the saved parameters. Saved sums of
        metrics that this run does not have are dropped.

        Returns None if the workdir never contained a checkpoint. Raises a BertjaxError if all checkpoints are damaged,
        or if the newest undamaged checkpoint differs from this run in the model or in the arrays of the train state.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                metadata = self._read_metadata(step)
                saved = {"model": metadata.model, "architecture": metadata.architecture, "arrays": metadata.arrays}
                run = {**self._model(step), "arrays": _array_shapes(_saved_fields(abstract, metadata))}
                changes = differences(saved, run)
                state = None if changes else self._restore(step, metadata, abstract, init)
            except Exception as error:  # Orbax and its dependencies raise many exception types on damaged files.
                self.move_aside(step, error)
                continue
            if changes:
                message = f"checkpoint {self.path(step)} differs from this run ({'; '.join(changes)})"
                raise BertjaxError(f"{message}; choose another --workdir, or use the bertjax version that saved it")
            return state
        damaged = self._workdir / DAMAGED
        if steps or (damaged.exists() and any(damaged.iterdir())):
            raise BertjaxError(f"all checkpoints are damaged and were moved to {damaged}; choose another --workdir")
        return None

    def move_aside(self, step: int, error: Exception) -> None:
        """Moves a checkpoint that raised `error` to `workdir/damaged_checkpoints`. Raises if it is not damaged."""
        raise_unless_damage(error, self.path(step))
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        aside = self._workdir / DAMAGED / str(step)
        logger.warning(f"checkpoint {self.path(step)} is damaged ({first_line(cause)}); moved to {aside}")
        if jax.process_index() == 0:
            aside.parent.mkdir(parents=True, exist_ok=True)
            if aside.exists():
                aside.rmtree()
            self.path(step).rename(aside)
        self._manager.reload()

    def _restore(
        self, step: int, metadata: CheckpointMetadata, abstract: TrainState, init: Callable[[], TrainState]
    ) -> TrainState:
        items = _as_items(_saved_fields(abstract, metadata), abstract.eval_field)
        restored = {name: _restore_item(self.path(step), name, tree, metadata) for name, tree in items.items()}
        eval_field = abstract.eval_field if "params" in restored["training"] else "params"
        fields = {eval_field: restored["params"], **restored["training"]}
        needed = {name for name, value in vars(abstract).items() if jax.tree.leaves(value)}
        if fields.keys() == needed and fields["sums"].keys() == abstract.sums.keys():
            return abstract.replace(**fields)
        initial = init().with_initial_params(fields["params"])
        sums = {name: fields["sums"].get(name, initial.sums[name]) for name in abstract.sums}
        return initial.replace(**{**fields, "sums": sums})


def restore_opt_state(checkpoint: epath.Path, abstract: TrainState, optimizer: str) -> Any:
    """Restores the optimizer state of another run. Raises a UsageError if its optimizer or parameters differ."""
    metadata = read_metadata(checkpoint)
    # Compare `params` and `opt_state`, and other fields of the saved state, such as averages. Sums may differ.
    fields = _saved_fields(abstract, metadata)
    needed = _array_shapes({**fields, "params": abstract.params, "opt_state": abstract.opt_state, "sums": {}})
    config = load_saved_config(workdir_of(checkpoint) / "config.json")
    name = config.to_dict().get("optimizer", {}).get("name")
    saved = {name: shape for name, shape in metadata.arrays.items() if not name.startswith("sums/")}
    changes = differences(saved, needed)
    changes += [f"optimizer.name: {name} -> {optimizer}"] if name != optimizer else []
    if changes:
        fix = "use the checkpoint's optimizer, model and vocabulary, or omit --keep_optimizer"
        raise UsageError(f"the optimizer state of {checkpoint} does not fit this run ({changes[-1]}); {fix}")
    training = _as_items(fields, abstract.eval_field)["training"]
    try:
        return _restore_item(checkpoint, "training", training, metadata)["opt_state"]
    except Exception as error:  # Orbax raises many exception types on damaged files.
        raise_unless_damage(error, checkpoint)
        raise BertjaxError(f"checkpoint {checkpoint} is damaged ({first_line(error)}); use an older one") from error


def _restore_item(checkpoint: epath.Path, name: str, tree: Any, metadata: CheckpointMetadata) -> Any:
    args = ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    # Do not use a `Checkpointer`, in whose barrier other hosts would wait for a host that failed to read.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler, read_on_all_hosts(checkpoint):
        restored = handler.restore(checkpoint / name, args=args)
    metadata.check_fingerprint(name, restored)
    return restored


@contextlib.contextmanager
def read_on_all_hosts(checkpoint: epath.Path) -> Iterator[None]:
    """Raises on all hosts if the block fails on any host, so that all hosts restore the same checkpoint."""
    with raise_on_all_hosts():
        try:
            yield
        except Exception as error:  # Orbax and its dependencies raise many exception types on damaged files.
            raise_unless_damage(error, checkpoint)
            raise BertjaxError(first_line(error)) from error


def _array_shapes(tree: Any) -> dict[str, str]:
    """Returns the dtype and shape of each array, such as `float32[2, 3]`, keyed by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype.name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _as_items(fields: dict[str, Any], eval_field: str) -> dict[str, Any]:
    """Splits the fields of a state into the items `params` and `training`. Leaves out fields without arrays.

    The item `params` is the field `eval_field` or, in checkpoints without this field, `params`.
    """
    saved = {name: value for name, value in fields.items() if jax.tree.leaves(value)}
    return {"params": saved.pop(eval_field if eval_field in saved else "params"), "training": saved}


def _saved_fields(abstract: TrainState, metadata: CheckpointMetadata) -> dict[str, Any]:
    """Returns the fields of the abstract state that a checkpoint contains. `sums` has one array per saved metric."""
    sums = [name.removeprefix("sums/") for name in metadata.arrays if name.startswith("sums/")]
    abstract_sum = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=abstract.step.sharding)
    names = {name.split("/")[0] for name in metadata.arrays} or vars(abstract)
    fields = {name: value for name, value in vars(abstract).items() if name in names}
    return {**fields, "sums": dict.fromkeys(sums, abstract_sum)}


def resolve_path(path: str | os.PathLike) -> epath.Path:
    """Returns the absolute path with symbolic links resolved. Returns URLs unchanged."""
    return epath.Path(path) if is_remote(path) else epath.Path(os.path.realpath(os.path.expanduser(path)))


def resolve_checkpoint_path(path: str | os.PathLike) -> epath.Path:
    """Resolves the path of a workdir or checkpoint. Raises a UsageError if Orbax does not support it."""
    if is_remote(path) and not str(path).startswith("gs://"):
        raise UsageError(f"unsupported checkpoint path: {path}; use a local path or gs://, or hf:ORG/NAME")
    resolved = resolve_path(path)
    if characters := sorted(_GLOB_CHARACTERS & {*str(resolved)}):
        raise UsageError(f"{resolved} contains {' '.join(characters)}, which Orbax reads as a pattern; rename it")
    return resolved


def find_checkpoint(path: str | os.PathLike) -> epath.Path:
    """Returns the folder of the checkpoint at a path.

    `path` is a workdir, the `checkpoints` folder of a workdir, or the folder of a checkpoint. Among several
    checkpoints, returns the one with the highest score, or the newest if no checkpoint has a score. Raises a UsageError
    if no checkpoint exists, and a BertjaxError if the checkpoint is incomplete.
    """

    def rank(checkpoint: epath.Path) -> tuple[float, int]:
        score = read_metadata(checkpoint).score
        return -math.inf if score is None else score, int(checkpoint.name)

    resolved = resolve_checkpoint_path(path)
    if (resolved / "params").exists():
        if not is_complete(resolved):
            raise BertjaxError(f"checkpoint {resolved} is incomplete: its save has not finished; use another one")
        return resolved
    for folder in (resolved, resolved / CHECKPOINTS):
        if folder.is_dir() and (checkpoints := _complete_checkpoints(folder)):
            return max(checkpoints, key=rank)
    raise UsageError(f"no checkpoint at {path}; use a workdir or a folder like WORKDIR/{CHECKPOINTS}/1000")


def _complete_checkpoints(folder: epath.Path) -> list[epath.Path]:
    return [child for child in folder.iterdir() if child.name.isdigit() and is_complete(child)]


def is_complete(checkpoint: epath.Path) -> bool:
    """Returns True if a checkpoint is complete. A local checkpoint is complete once it has its final name."""
    return not is_remote(checkpoint) or (checkpoint / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()


def saved_fingerprint(checkpoint: epath.Path) -> str:
    """Returns the fingerprint of a checkpoint's parameters, a hash of 16 hexadecimal digits."""
    return read_metadata(checkpoint).fingerprints["params"]


def workdir_of(checkpoint: epath.Path) -> epath.Path:
    """Returns the workdir that contains a checkpoint."""
    return checkpoint.parent.parent
