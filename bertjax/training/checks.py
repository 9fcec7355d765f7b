"""Checks during training: loss and gradients are finite, the loss does not diverge, the data is undamaged."""

import contextlib
import math
from collections.abc import Iterator

import jax

from bertjax.errors import BertjaxError
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import Checkpoints
from bertjax.training.multihost import raise_on_all_hosts
from bertjax.training.state import TrainState


class DivergenceError(BertjaxError):
    """Error for a loss that diverges, or for a loss or gradient that is not finite."""

    # All hosts raise this error, because loss and gradients are replicated.
    on_all_hosts = True


@contextlib.contextmanager
def explain_divergence(checkpoints: Checkpoints) -> Iterator[None]:
    """Adds the last good checkpoint and advice to the message of a `DivergenceError` that the block raises."""
    try:
        yield
    except DivergenceError as error:
        checkpoints.wait()
        raise DivergenceError(
            f"{error}; {checkpoints.describe_last()}; use a lower optimizer.learning_rate or a longer warm-up, "
            "in a new --workdir"
        ) from error


def check_steps_finite(state: TrainState) -> None:
    """Waits for all dispatched steps. Raises if the loss or gradient of any step was not finite."""
    bad_step = int(jax.device_get(state.bad_step))
    if bad_step >= 0:
        raise DivergenceError(f"the loss or gradient of step {bad_step:,} is not finite")


def check_evaluation(values: dict[str, float], step: int) -> None:
    """Raises if the evaluation loss is not finite."""
    if not math.isfinite(values.get("loss", 0.0)):
        raise DivergenceError(f"the evaluation loss at step {step:,} is not finite")


def check_loss(loss: float, first_loss: float, step: int, factor: float) -> None:
    """Raises if the training loss exceeds `factor` times the first logged loss."""
    if loss > factor * first_loss:
        raise DivergenceError(f"the loss diverged at step {step:,}: {loss:.4g} (first logged loss: {first_loss:.4g})")


def check_data_files(task: Task, *, wait: bool) -> None:
    """Raises on all hosts if any host has found damaged data. With `wait`, verifies all data first."""

    def check() -> None:
        try:
            task.check_data_files(wait)
        except BertjaxError as error:
            raise BertjaxError(
                f"{error}; checkpoints of this run may be affected, so train in a new --workdir"
            ) from error

    raise_on_all_hosts(check)
