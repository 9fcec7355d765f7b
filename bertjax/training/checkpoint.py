"""Checkpoints: asynchronous, atomic, the newest N kept, and damage found before it does harm.

A checkpoint is `WORKDIR/checkpoints/STEP` with three Orbax items: `params`; `training`, which is all else a step
changes; and `meta`, which holds fingerprints of both and what else decides a model's answers (see `identity.py`). Orbax
makes the directory appear under its name only when it is complete; at an address, where no directory can be renamed, it
is complete when its last file is there. What is damaged or edited later is found by these.
"""

import dataclasses
import errno
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from bertjax.config.fields import differences
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.training.checkpoint_metadata import check_identity, read_meta, sealed, unsealed
from bertjax.training.fingerprint import fingerprint
from bertjax.training.multihost import naming_a_lost_process, tells_of_a_lost_process
from bertjax.training.step import TrainState
from bertjax.utils.io import is_remote

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
DAMAGED = "damaged_checkpoints"
# Of an array that several devices hold whole, each writes a part, unless the whole is smaller than this.
_LEAST_SHARED_BYTES = 1 << 20
_SCORE = "score"
_METRIC_LINES = "metric_lines"
# The library under Orbax takes a path with one of these for a pattern, and finds nothing there.
_PATTERN_CHARACTERS = frozenset("[]*?\\")
# What a reader lacks, as Python and the libraries below Orbax say it.
_LACKS = re.compile("RESOURCE_EXHAUSTED|Out of memory|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED")
_LACKING = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ECONNRESET}


def _split(state: TrainState) -> tuple[Any, dict[str, Any]]:
    return state.params, {
        "step": state.step,
        "opt_state": state.opt_state,
        "sums": state.sums,
        "bad_step": state.bad_step,
    }


@dataclasses.dataclass(frozen=True)
class NewestOnTime(preservation_policy.PreservationPolicy):
    """Keeps `keep` checkpoints: the newest, and before it the newest of those at multiples of `every` steps.

    So one that was saved at a stop, or for its score, pushes none of these out, and goes when a newer one is there.
    """

    keep: int
    every: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        on_time = [step for step in steps[:-1] if step % self.every == 0]
        kept = {*steps[-1:], *on_time[len(on_time) - self.keep + 1 if self.keep <= len(on_time) else 0 :]}
        return [step in kept for step in steps]


class Checkpoints:
    """The checkpoints of one workdir; a thin layer over `orbax.checkpoint.CheckpointManager`."""

    def __init__(self, workdir: epath.Path, keep: int, identity: dict[str, Any], every: int = 1) -> None:
        """Opens or makes `workdir/checkpoints` and removes what killed saves have left there.

        Args:
          keep: so many, the newest first; of those saved with a score, the best stays as well.
          identity: of the model that is saved and restored, from `identity_of`.
          every: steps between two that are saved on time; others go when a newer one is there.

        Raises:
          UsageError: a file lies where a checkpoint may belong.
          BertjaxError: the checkpoints cannot be listed.
        """
        self._workdir, self._identity = workdir, identity
        for child in (workdir / CHECKPOINTS).iterdir() if (workdir / CHECKPOINTS).is_dir() else ():
            if child.name.isdigit() and not child.is_dir():
                raise UsageError(f"{child} is no folder, and a checkpoint may belong there; move it elsewhere")
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics[_SCORE], n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy([NewestOnTime(keep, every), best]),
            best_fn=lambda metrics: metrics[_SCORE],
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        handlers = {
            "params": _array_handler(),
            "training": _array_handler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        try:
            self._manager = ocp.CheckpointManager(workdir / CHECKPOINTS, options=options, item_handlers=handlers)
        except Exception as error:  # Of damage in what Orbax notes of a step, which it reads here.
            raise BertjaxError(
                f"{workdir / CHECKPOINTS} cannot be listed ({first_line(error)}); move the newest step elsewhere if it "
                "is damaged, or choose another --workdir"
            ) from error

    def path(self, step: int) -> epath.Path:
        return self._workdir / CHECKPOINTS / str(step)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, score: float | None = None, metric_lines: int | None = None) -> None:
        """Starts saving; returns when the state has been copied from the devices. The last save is waited for first.

        Args:
          score: by which the best checkpoint is told, higher being better; None is one that cannot be the best.
          metric_lines: written before it, by which a run that goes on knows whether they are all there.

        Raises:
          BertjaxError: this save or the one before it failed, for example on a full disk.
        """
        params, training = _split(state)
        step = int(jax.device_get(state.step))
        if step == self.latest_step():
            return
        prints = {"params": fingerprint(params), "training": fingerprint(training)}
        lines = {} if metric_lines is None else {_METRIC_LINES: metric_lines}
        meta = sealed({"step": step, _SCORE: score, "fingerprints": prints, "identity": self._identity, **lines})
        metrics = None if score is None else {_SCORE: score}
        self._reporting(lambda: self._start(step, params, training, meta, metrics))

    def _start(
        self, step: int, params: Any, training: Any, meta: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(params),
                training=ocp.args.PyTreeSave(training),
                meta=ocp.args.JsonSave(meta),
            ),
            metrics=metrics,
        )

    def best(self) -> epath.Path:
        """The checkpoint with the highest score, the newest where none has one."""
        return find_checkpoint(self._workdir)

    def wait(self) -> None:
        """Waits until the last save is complete on disk.

        Raises:
          BertjaxError: the save failed.
        """
        self._reporting(self._manager.wait_until_finished)

    def close(self) -> None:
        self._reporting(self._manager.close)

    def _reporting(self, action: Callable[[], Any]) -> None:
        try:
            with naming_a_lost_process():
                action()
        except BertjaxError:
            raise
        except Exception as error:  # Orbax passes on whatever its storage layers raise.
            raise BertjaxError(
                f"saving a checkpoint in {self._workdir / CHECKPOINTS} failed ({first_line(error)}); "
                f"{self._last_good()}. Free some space or mend the cause, then run the same command again to go on"
            ) from error

    def _last_good(self) -> str:
        try:
            good = [step for step in self._manager.all_steps() if is_whole(self.path(step))]
        except Exception:  # Of storage that has just failed to save.
            return "which is the last good one cannot be read either"
        return f"the last good one is {self.path(max(good))}" if good else "there is none yet"

    def restore_latest(self, abstract: TrainState) -> TrainState | None:
        """The newest whole checkpoint, on the devices `abstract` asks for; None if there never was one.

        A damaged one is named through `warn`, moved to `workdir/damaged_checkpoints` and passed over.

        Raises:
          BertjaxError: there are checkpoints and all of them are damaged, or the newest is of another model or cannot
            be read for another reason than damage.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        params, training = _split(abstract)
        for step in steps:
            try:
                params_now, training_now, identity = self._restore(step, params, training)
            except Exception as error:  # Damage shows as any exception of Orbax and what is below it.
                raise_unless_damage(error, self.path(step))
                aside = self._workdir / DAMAGED / str(step)
                logger.info(
                    f"checkpoint {self.path(step)} is damaged ({first_line(error)}); skipped and moved to {aside}"
                )
                self._set_aside(step, aside)
                continue
            if identity != self._identity:
                shown = "; ".join(differences(identity, self._identity))
                raise BertjaxError(
                    f"checkpoint {self.path(step)} is of another model than this run trains ({shown}); choose another "
                    "--workdir, or go back to that model"
                )
            return abstract.replace(params=params_now, **training_now)
        aside = self._workdir / DAMAGED
        if steps or (aside.exists() and any(aside.iterdir())):
            raise BertjaxError(
                f"all checkpoints of {self._workdir} are damaged (now in {DAMAGED}/); start with another --workdir, "
                "or remove this one to begin anew"
            )
        return None

    def _restore(self, step: int, params: Any, training: Any) -> tuple[Any, Any, dict[str, Any]]:
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=_restored_as(params), training=_restored_as(training), meta=ocp.args.JsonRestore()
            ),
        )
        meta = unsealed(restored["meta"])
        for name in ("params", "training"):
            check_fingerprint(fingerprint(restored[name]), meta, name)
        return restored["params"], restored["training"], meta["identity"]

    def _set_aside(self, step: int, aside: epath.Path) -> None:
        if jax.process_index() == 0:
            aside.parent.mkdir(parents=True, exist_ok=True)
            if aside.exists():
                aside.rmtree()
            self.path(step).rename(aside)
        self._manager.reload()


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_SHARED_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _restored_as(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))


def raise_unless_damage(error: Exception, checkpoint: epath.Path) -> None:
    """Raises what ended the reading of a checkpoint again, where that says nothing of its files.

    Raises:
      BertjaxError: there is no memory for it, or no way to it.
      Exception: that of a collective operation which another process has left.
    """
    if tells_of_a_lost_process(error):
        raise error
    seen: BaseException | None = error
    while seen is not None:
        is_errno = isinstance(seen, OSError) and seen.errno in _LACKING
        if is_errno or isinstance(seen, MemoryError) or _LACKS.search(str(seen)):
            raise BertjaxError(
                f"checkpoint {checkpoint} cannot be read ({first_line(seen)}), which is no damage; mend the cause, "
                "then run the same command again"
            ) from error
        seen = seen.__cause__ or seen.__context__


def check_fingerprint(found: str, meta: dict[str, Any], name: str) -> None:
    """Raises a BertjaxError if an item of a checkpoint has another fingerprint than it was saved with."""
    expected = meta["fingerprints"][name]
    if found != expected:
        raise BertjaxError(f"the fingerprint of {name} is {found}, saved as {expected}")


def resolved(path: str | Path) -> epath.Path:
    """The same place from any folder and without links."""
    return epath.Path(path) if is_remote(path) else epath.Path(os.path.realpath(os.path.expanduser(path)))


def absolute(path: str | Path) -> epath.Path:
    """The path of a workdir or of something in it, as Orbax takes it; `gs://` ones are absolute already.

    Raises:
      UsageError: checkpoints would be lost under it, or are not read from there.
    """
    if is_remote(path) and not str(path).startswith("gs://"):
        raise UsageError(f"checkpoints lie on disks and at gs:// addresses, not at {path}; choose another place")
    whole = resolved(path)
    odd = sorted(_PATTERN_CHARACTERS & {*str(whole)})
    if odd:
        raise UsageError(
            f"{whole} has {' '.join(odd)} in it, which the reader of checkpoints takes for a pattern; choose a place "
            "without any of [ ] * ? \\ in its path"
        )
    return whole


def find_checkpoint(path: str | Path) -> epath.Path:
    """The checkpoint a user means: a step's directory, or the best, else the newest, of a workdir.

    Raises:
      UsageError: there is none.
      BertjaxError: it is damaged, or files of its workdir have been changed since it was saved.
    """
    found = _find(path)
    check_identity(found, read_meta(found))
    return found


def _find(path: str | Path) -> epath.Path:
    given = absolute(path)
    if (given / "params").exists():
        if not is_whole(given):
            raise BertjaxError(
                f"checkpoint {given} is not whole: it is being saved, or that was cut short; name another one of "
                f"{given.parent}"
            )
        return given
    for directory in (given, given / CHECKPOINTS):
        if directory.is_dir():
            steps = [child for child in directory.iterdir() if child.name.isdigit() and is_whole(child)]
            if steps:
                chosen = max(steps, key=lambda child: (score_of(child), int(child.name)))
                if not (chosen / "params").exists():
                    raise BertjaxError(
                        f"checkpoint {chosen} is damaged (no params in it); name another one of {directory}"
                    )
                return chosen
    raise UsageError(f"no checkpoint at {path}; give a workdir or a directory like WORKDIR/{CHECKPOINTS}/1000")


def is_whole(checkpoint: epath.Path) -> bool:
    """Whether a step's directory was saved to its end; on a disk it has its name only then."""
    return not is_remote(checkpoint) or (checkpoint / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()


def score_of(checkpoint: epath.Path) -> float:
    """The score a checkpoint was saved with; lower than any where it has none.

    Raises:
      BertjaxError: the checkpoint is damaged.
    """
    score = read_meta(checkpoint)[_SCORE]
    return -math.inf if score is None else score


def saved_fingerprint(checkpoint: epath.Path) -> str:
    """Hexadecimal digits that change with any bit of the parameters.

    Raises:
      BertjaxError: the checkpoint is damaged.
    """
    return read_meta(checkpoint)["fingerprints"]["params"]


def saved_metric_lines(checkpoint: epath.Path) -> int | None:
    """How many lines of metrics a run had written before a checkpoint; None where that is not known.

    Raises:
      BertjaxError: the checkpoint is damaged.
    """
    return read_meta(checkpoint).get(_METRIC_LINES)


def workdir_of(checkpoint: epath.Path) -> epath.Path:
    """The workdir a step's directory belongs to, where its config and vocabulary are."""
    return checkpoint.parent.parent
