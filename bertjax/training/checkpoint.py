"""Checkpoints: asynchronous, atomic, the newest N kept, and damage found before it does harm.

A checkpoint is `WORKDIR/checkpoints/STEP` with three Orbax items: `params`; `training`, which is all else a step
changes; and `meta`, which holds fingerprints of both. Orbax makes the directory appear under its name only when it is
complete. What is damaged later (a truncated copy, a bad disk) is found by the fingerprints.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from bertjax.errors import BertjaxError, UsageError
from bertjax.training.step import TrainState

CHECKPOINTS = "checkpoints"
DAMAGED = "damaged_checkpoints"
_SCORE = "score"
_SLICE_BYTES = 16 << 20
_EVEN_STEPS = (5308870, 80994, 1948062, 34726, 620018, 9002)


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """uint32 scalar that changes with any bit of any array; the same on any mesh, since integers add in any order."""

    return sum((jnp.uint32(2 * i + 1) * _leaf_sum(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))), jnp.uint32(0))


def fingerprint_on_host(tree: Any) -> int:
    """The same, of arrays on the host, a slice after the other, so that little is held twice."""
    total = 0
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        rows = max(1, _SLICE_BYTES * len(leaf) // leaf.nbytes)
        for row in range(0, len(leaf), rows):
            total += (2 * i + 1) * int(_slice_sum(leaf[row : row + rows], row))
    return total % 2**32


def _leaf_sum(x: jax.Array, first_row: int | jax.Array = 0) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    position = jnp.ones_like(bits) + jnp.uint32(first_row) * jnp.uint32(_EVEN_STEPS[0])
    for axis in range(bits.ndim):
        # Weights stay odd, so that no change of one element is lost modulo 2^32; a step of its own for each axis tells
        # swapped elements apart.
        position += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(_EVEN_STEPS[axis])
    return jnp.sum(bits * position, dtype=jnp.uint32)


_slice_sum = jax.jit(_leaf_sum)


def _split(state: TrainState) -> tuple[Any, dict[str, Any]]:
    return state.params, {
        "step": state.step,
        "opt_state": state.opt_state,
        "sums": state.sums,
        "bad_step": state.bad_step,
    }


class Checkpoints:
    """The checkpoints of one workdir; a thin layer over `orbax.checkpoint.CheckpointManager`."""

    def __init__(self, workdir: epath.Path, keep: int) -> None:
        """Opens or makes `workdir/checkpoints` and removes what killed saves have left there.

        Args:
          keep: the newest ones; of those saved with a score, the best stays as well.
        """
        self._workdir = workdir
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics[_SCORE], n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy([preservation_policy.LatestN(keep), best]),
            best_fn=lambda metrics: metrics[_SCORE],
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(workdir / CHECKPOINTS, options=options)

    def path(self, step: int) -> epath.Path:
        return self._workdir / CHECKPOINTS / str(step)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, score: float | None = None) -> None:
        """Starts saving; returns when the state has been copied from the devices. The last save is waited for first.

        Args:
          score: by which the best checkpoint is told, higher being better; None is one that cannot be the best.

        Raises:
          BertjaxError: this save or the one before it failed, for example on a full disk.
        """
        params, training = _split(state)
        step, params_print, training_print = map(
            int, jax.device_get((state.step, fingerprint(params), fingerprint(training)))
        )
        if step == self.latest_step():
            return
        meta = {"step": step, "fingerprints": {"params": params_print, "training": training_print}}
        metrics = None if score is None else {_SCORE: score}
        self._reporting(lambda: self._start(step, params, training, meta, metrics))

    def _start(
        self, step: int, params: Any, training: Any, meta: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                training=ocp.args.StandardSave(training),
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
            action()
        except Exception as error:  # Orbax passes on whatever its storage layers raise.
            good = [step for step in self._manager.all_steps() if self.path(step).exists()]
            last = f"the last good one is {self.path(max(good))}" if good else "there is none yet"
            raise BertjaxError(
                f"saving a checkpoint in {self._workdir / CHECKPOINTS} failed ({first_line(error)}); {last}. "
                "Free some space or mend the cause, then run the same command again to go on"
            ) from error

    def restore_latest(self, abstract: TrainState, warn: Callable[[str], None]) -> TrainState | None:
        """The newest whole checkpoint, on the devices `abstract` asks for; None if there never was one.

        A damaged one is named through `warn`, moved to `workdir/damaged_checkpoints` and passed over.

        Raises:
          BertjaxError: there are checkpoints and all of them are damaged.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        params, training = _split(abstract)
        for step in steps:
            try:
                params_now, training_now = self._restore(step, params, training)
            except Exception as error:  # Damage shows as any exception of Orbax and what is below it.
                aside = self._workdir / DAMAGED / str(step)
                warn(f"checkpoint {self.path(step)} is damaged ({first_line(error)}); skipped and moved to {aside}")
                self._set_aside(step, aside)
                continue
            return abstract.replace(params=params_now, **training_now)
        aside = self._workdir / DAMAGED
        if steps or (aside.exists() and any(aside.iterdir())):
            raise BertjaxError(
                f"all checkpoints of {self._workdir} are damaged (now in {DAMAGED}/); start with another --workdir, "
                "or remove this one to begin anew"
            )
        return None

    def _restore(self, step: int, params: Any, training: Any) -> tuple[Any, Any]:
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params),
                training=ocp.args.StandardRestore(training),
                meta=ocp.args.JsonRestore(),
            ),
        )
        for name in ("params", "training"):
            check_fingerprint(restored[name], restored["meta"], name)
        return restored["params"], restored["training"]

    def _set_aside(self, step: int, aside: epath.Path) -> None:
        if jax.process_index() == 0:
            aside.parent.mkdir(parents=True, exist_ok=True)
            if aside.exists():
                aside.rmtree()
            self.path(step).rename(aside)
        self._manager.reload()


def check_fingerprint(tree: Any, meta: dict[str, Any], name: str) -> None:
    """Raises a BertjaxError if an item of a checkpoint is not as it was saved."""
    check_found(int(fingerprint(tree)), meta, name)


def check_found(found: int, meta: dict[str, Any], name: str) -> None:
    """The same, from the fingerprint that was found."""
    expected = meta["fingerprints"][name]
    if found != expected:
        raise BertjaxError(f"the fingerprint of {name} is {found:08x}, saved as {expected:08x}")


def absolute(path: str | Path) -> epath.Path:
    """The path as Orbax takes it; `gs://` ones are absolute already."""
    return epath.Path(path) if "://" in str(path) else epath.Path(path).expanduser().resolve()


def find_checkpoint(path: str | Path) -> epath.Path:
    """The checkpoint a user means: a step's directory, or the best, else the newest, of a workdir.

    Raises:
      UsageError: there is none.
      BertjaxError: it has no parameters.
    """
    given = absolute(path)
    if (given / "params").exists():
        return given
    for directory in (given, given / CHECKPOINTS):
        if directory.is_dir():
            steps = [child for child in directory.iterdir() if child.name.isdigit()]
            if steps:
                chosen = max(steps, key=lambda child: (score_of(child), int(child.name)))
                if not (chosen / "params").exists():
                    raise BertjaxError(
                        f"checkpoint {chosen} is damaged (no params in it); name another one of {directory}"
                    )
                return chosen
    raise UsageError(f"no checkpoint at {path}; give a workdir or a directory like WORKDIR/{CHECKPOINTS}/1000")


def score_of(checkpoint: epath.Path) -> float:
    """The score a checkpoint was saved with; lower than any where it has none."""
    file = checkpoint / "metrics" / "metrics"
    try:
        return float(json.loads(file.read_text())[_SCORE])
    except (OSError, ValueError, KeyError):
        return -math.inf


def saved_fingerprint(checkpoint: epath.Path) -> str:
    """Hexadecimal digits that change with any bit of the parameters.

    Raises:
      BertjaxError: the checkpoint is damaged.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        return f"{json.loads(file.read_text())['fingerprints']['params']:08x}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BertjaxError(f"checkpoint {checkpoint} is damaged: {file} ({first_line(error)})") from error


def workdir_of(checkpoint: epath.Path) -> epath.Path:
    """The workdir a step's directory belongs to, where its config and vocabulary are."""
    return checkpoint.parent.parent


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, short enough to stand inside one of ours."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]
