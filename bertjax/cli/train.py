"""`bertjax train` and `bertjax sweep`: one training run, or runs over a grid of hyperparameters and random seeds.

`@command` attaches the options of a command to its function. `main.py` lists the commands.
"""

import argparse
import logging

from bertjax.cli.common import join_cluster, open_init_checkpoint, parse_run_config, print_result
from bertjax.cli.parser import DISTRIBUTED, INIT_FROM, PROFILE, REQUIRED_CONFIG, command, count, flag, option
from bertjax.errors import UsageError

logger = logging.getLogger(__name__)


@command(
    "bertjax train --config pretrain:size=mini,corpus=runs/corpus --workdir runs/mini",
    REQUIRED_CONFIG,
    option("--workdir DIR", "folder of checkpoints, metrics and curves; resumed if it exists", required=True),
    INIT_FROM,
    DISTRIBUTED,
    PROFILE,
    flag("--keep_optimizer", "start pre-training with the optimizer state of --init_from, at step 0 of the schedule"),
    option(
        "--tracker",
        "experiment tracker for metrics; repeat for both",
        action="append",
        default=[],
        choices=("wandb", "trackio"),
    ),
)
def train(args: argparse.Namespace) -> None:
    """Trains a model, or resumes training from the last checkpoint of the workdir."""
    from bertjax.convert.huggingface import export_problem
    from bertjax.inference.encode import add_guide_vectors
    from bertjax.tasks.build import build_task
    from bertjax.training import train as loop
    from bertjax.training.cached_features import add_cached_features
    from bertjax.training.checkpoint_config import fill_unset_fields
    from bertjax.training.multihost import exit_on_host_error

    config = parse_run_config(args)
    if args.keep_optimizer and not args.init_from:
        raise UsageError("--keep_optimizer continues pre-training; use it with --init_from")
    # `jax.distributed.initialize` must run before any other use of JAX.
    distributed = join_cluster(args, config.cluster)
    # Save a converted --init_from in a local workdir, unless several processes would write it.
    with exit_on_host_error(), open_init_checkpoint(args, keep_converted=not distributed) as init_from:
        # Unset fields of the model come from the checkpoint, or from the run that is resumed.
        config = fill_unset_fields(config, init_from, args.workdir)
        task = build_task(config, train=True)
        # Both functions modify `task` only if its config needs cached features or a guide, which is another embedder.
        add_cached_features(task, init_from)
        add_guide_vectors(task)
        layer = task.output_layer()
        if problem := export_problem(task.objective.model, layer.kind if layer else ""):
            logger.info(f"checkpoints of this run cannot be exported: {problem}")
        result = loop.train(
            task,
            args.workdir,
            init_from,
            profile_steps=args.profile,
            trackers=args.tracker,
            keep_optimizer=args.keep_optimizer,
        )
        print_result(result)


@command(
    "bertjax sweep --config glue:task=rte,path=glue_data --init_from runs/base --workdir runs/rte "
    "--grid optimizer.learning_rate=1e-4,3e-4 --grid data.batch_size=16,32",
    REQUIRED_CONFIG,
    option("--workdir DIR", "sweep folder; resumed if it exists", required=True),
    INIT_FROM,
    DISTRIBUTED,
    count("--seeds", "number of seeds per setting; each seed is one trial", default=1),
    option(
        "--grid FIELD=VALUE,VALUE",
        "values of a config field; repeat the option to run all combinations (default: the experiment's function "
        "`sweep` or argument `grid`)",
        action="append",
        default=[],
    ),
)
def sweep(args: argparse.Namespace) -> None:
    """Trains all settings of a grid, with one or more seeds each, and selects the best trial on the dev set."""
    from bertjax.inference.encode import add_guide_vectors
    from bertjax.training import sweep as sweeps
    from bertjax.training.multihost import exit_on_host_error

    distributed = join_cluster(args, parse_run_config(args).cluster)
    keep_converted = not distributed
    with exit_on_host_error(), open_init_checkpoint(args, keep_converted, marker=sweeps.TRIALS) as init_from:
        # `sweep` adds cached features itself. It cannot import `inference`, so pass this function.
        result = sweeps.sweep(
            args.config, args.overrides, args.grid, args.seeds, args.workdir, init_from, prepare=add_guide_vectors
        )
        print_result(result)
