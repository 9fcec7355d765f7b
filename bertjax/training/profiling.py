"""Profiles of train steps for TensorBoard and xprof."""

import contextlib
import logging
import os

import jax
from etils import epath

logger = logging.getLogger(__name__)

# TensorBoard's profile plugin reads this subfolder of a log folder.
_PROFILES = "plugins/profile"


class StepProfiler(contextlib.ExitStack):
    """Context manager that writes a profile of a range of steps to a log folder. On exit, ends an open trace."""

    def __init__(self, log_dir: epath.Path, steps: range) -> None:
        super().__init__()
        self._log_dir, self._steps, self._has_traced = log_dir, steps, False
        if steps:
            self.callback(self._log_result)

    def step(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Returns the annotation of a step, counted from 0, and starts the trace before the first traced step."""
        if self._steps and step == self._steps.start:
            jax.profiler.start_trace(os.fspath(self._log_dir))
            self.callback(jax.profiler.stop_trace)
            self._has_traced = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def step_done(self, step: int, state: object) -> None:
        """After the last traced step, waits until the devices have finished it, and ends the trace."""
        if self._steps and step == self._steps.stop:
            jax.block_until_ready(state)
            self.close()

    def _log_result(self) -> None:
        if self._has_traced:
            logger.info(f"saved {self._log_dir / _PROFILES}; open it with: tensorboard --logdir {self._log_dir}")
        else:
            logger.warning(f"no profile was saved: the run did not execute step {self._steps.start}")
