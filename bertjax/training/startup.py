"""Start of a run: opens its workdir, then resumes its newest checkpoint or initializes its state."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.errors import DivergenceError, UsageError
from bertjax.model.models import EmbeddingModel
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training import workdir as workdirs
from bertjax.training.checkpoint import Checkpoints, restore_opt_state, saved_fingerprint, workdir_of
from bertjax.training.checkpoint_metadata import model_metadata
from bertjax.training.compatibility import check_vocabulary, has_output_layer_of, source_of
from bertjax.training.multihost import assert_same_run, assert_shared_workdir
from bertjax.training.optimizer import Optimizer
from bertjax.training.parameters import load_params
from bertjax.training.step import TrainState, make_init_state, random_key
from bertjax.utils.io import check_free_space, write_atomic

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_workdir(
    task: Task, path: str, init_from: epath.Path | None, state_shapes: TrainState
) -> Iterator[tuple[epath.Path, Checkpoints, Callable[[], None]]]:
    """Creates and locks the workdir, checks that it belongs to this run, and opens its checkpoints.

    `init_from` is the checkpoint with the initial parameters of a new run (None: random parameters). `state_shapes` is
    used to check that checkpoints fit on the disk.

    Yields:
      The workdir, its checkpoints, and a function that raises if another run has taken over the workdir.
    """
    config: dict[str, Any] = dataclasses.asdict(task.config)
    if init_from:
        check_vocabulary(task, init_from, task.objective.can_add_pieces)
    init_fingerprint = saved_fingerprint(init_from) if init_from else ""
    # Compare the contents of vocabulary and labels, because their paths may differ between hosts.
    files = {name: json.loads(task.workdir_files[name]) for name in (ENTRY, OUTPUT_LAYER) if name in task.workdir_files}
    assert_same_run({"config": config, "data": task.data_hash, "started_from": init_fingerprint, "files": files})
    workdir = workdirs.create(path)
    assert_shared_workdir(workdir)
    if config["data"].get("vocabulary"):  # The original file may be in the temporary folder of a converted checkpoint.
        config["data"]["vocabulary"] = str(workdir / ENTRY)
    with workdirs.acquire_lock(workdir):
        workdirs.check_config(workdir, config, task.data_hash)
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state_shapes))
        check_free_space(workdir, 2 * state_bytes, "two checkpoints", "choose another --workdir")
        if jax.process_index() == 0:
            workdirs.write_config(workdir, config, task.data_hash, init_from)
            for name, content in task.workdir_files.items():
                write_atomic(workdir / name, content)
        check_still_owner = workdirs.take_ownership(workdir)
        keep, every = task.config.keep_checkpoints, task.checkpoint_every
        checkpoints = Checkpoints(workdir, keep, lambda step: model_metadata(task.objective_at(step).model), every)
        with contextlib.closing(checkpoints):
            try:
                yield workdir, checkpoints, check_still_owner
            except DivergenceError as error:
                checkpoints.wait()
                remedy = "use a lower optimizer.learning_rate or a longer warm-up, in a new --workdir"
                raise DivergenceError(f"{error}; {checkpoints.describe_last()}; {remedy}") from error


def restore_or_init(
    task: Task,
    optimizer: Optimizer,
    mesh: Mesh,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    state_shapes: TrainState,
    init_from: epath.Path | None,
    keep_optimizer: bool,
) -> TrainState:
    """Restores the newest checkpoint of the workdir, or initializes a new state if there are no checkpoints."""

    def init() -> TrainState:
        return make_init_state(task.objective, optimizer, mesh)(random_key(task.config.seed, "init"))

    state = checkpoints.restore_latest(state_shapes, init)
    if state is not None:
        ignored = "; --init_from is ignored" if init_from else ""
        if init_from and saved_fingerprint(init_from) != workdirs.saved_init_fingerprint(workdir):
            if task.has_cached_features:
                raise UsageError(
                    f"the run of {workdir} started from different parameters than --init_from, so cached features "
                    "would differ; use the original --init_from or another --workdir"
                )
            ignored += ", and the run started from different parameters"
        logger.info(f"resumed {workdir} at step {int(state.step):,}{ignored}")
        return state
    state = init()
    if init_from is None:
        logger.info("starting at step 0 with random parameters, because --init_from is not set")
        return state
    reinit_params = () if has_output_layer_of(task, init_from) else task.reinit_params
    # With `keep_optimizer`, pieces cannot be added, because the saved optimizer state lacks their moments.
    new_pieces = check_vocabulary(task, init_from, task.objective.can_add_pieces and not keep_optimizer)
    state = state.with_initial_params(load_params(init_from, state.params, reinit_params, new_pieces))
    if keep_optimizer:
        state = state.replace(opt_state=restore_opt_state(init_from, state_shapes, task.config.optimizer.name))
    restored = "parameters and optimizer state" if keep_optimizer else "parameters"
    logger.info(f"starting at step 0 with the {restored} of {source_of(init_from)}")
    if (workdir_of(init_from) / "modules.json").exists() and not isinstance(task.objective.model, EmbeddingModel):
        logger.warning("dropped the sentence-transformers modules, because training changes the states that they pool")
    if new_pieces:
        count = len(new_pieces.parts)
        logger.info(f"initialized the embeddings of {count:,} new vocabulary pieces as means over their old pieces")
    return state
