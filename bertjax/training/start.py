"""Start of a run from a checkpoint: checks of a resumed run, and the state of a new run with `--init_from`."""

import logging

from etils import epath

from bertjax.errors import UsageError
from bertjax.model.models import EmbeddingModel
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import restore_opt_state, saved_fingerprint, workdir_of
from bertjax.training.compatibility import reusable_outputs, source_of
from bertjax.training.new_pieces import NewPieces
from bertjax.training.parameters import load_params
from bertjax.training.step import TrainState
from bertjax.training.workdir import saved_init_fingerprint

logger = logging.getLogger(__name__)


def check_resume(task: Task, workdir: epath.Path, step: int, init_from: epath.Path | None) -> None:
    """Logs that a run is resumed. Raises a UsageError if `init_from` would change its cached features."""
    note = ""
    if init_from:
        note = "; the parameters of --init_from are not loaded"
        if saved_fingerprint(init_from) != saved_init_fingerprint(workdir):
            if task.uses_frozen_features:
                problem = "started from different parameters than --init_from, so cached features would differ"
                raise UsageError(f"the run in {workdir} {problem}; use the original --init_from or another --workdir")
            note += ", and the run started from different parameters"
    logger.info(f"resumed {workdir} at step {step:,}{note}")


def init_from_checkpoint(
    checkpoint: epath.Path, state: TrainState, task: Task, new_pieces: NewPieces | None, shapes: TrainState | None
) -> TrainState:
    """Returns `state` with the parameters of a checkpoint and, if `shapes` is not None, its optimizer state.

    `shapes` are the shapes and shardings of the state. `new_pieces` are vocabulary pieces that the checkpoint lacks.
    """
    outputs = reusable_outputs(task, checkpoint)
    state = state.with_initial_params(load_params(checkpoint, state.params, task.output_params, outputs, new_pieces))
    if shapes is not None:
        state = state.replace(opt_state=restore_opt_state(checkpoint, shapes, task.config.optimizer.name))
    restored = "parameters and optimizer state" if shapes is not None else "parameters"
    logger.info(f"starting at step 0 with the {restored} of {source_of(checkpoint)}")
    if (workdir_of(checkpoint) / "modules.json").exists() and not isinstance(task.objective.model, EmbeddingModel):
        logger.warning("dropped the sentence-transformers modules, because training changes their input hidden states")
    if new_pieces:
        count = len(new_pieces.parts)
        logger.info(f"initialized {count:,} new vocabulary pieces with the mean embedding of their old pieces")
    return state
