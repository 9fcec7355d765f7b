"""`bertjax inspect` and `bertjax describe`: printouts of a run's training batches, model and config."""

import argparse
import logging
from itertools import islice

from bertjax.cli.common import open_config
from bertjax.cli.parser import CONFIG, INIT_FROM, RUN_CHECKPOINT, command, flag, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


@command(
    "bertjax inspect --config pretrain:corpus=runs/corpus --rows 2\n"
    "  bertjax inspect --config text:train=train.csv,dev=dev.csv --init_from runs/base\n"
    "  bertjax inspect --checkpoint runs/topic",
    *(CONFIG, INIT_FROM, RUN_CHECKPOINT),
    option("--steps", "number of batches to print, starting at step 0", type=number(int, at_least=1), default=1),
    option("--rows", "number of rows to print per batch", type=number(int, at_least=1), default=3),
    option("--npz", "write the complete batches to this file", metavar="FILE"),
)
def inspect(args: argparse.Namespace) -> None:
    """Prints training batches as text."""
    from bertjax.data.inspection import write_batches
    from bertjax.data.shard import SINGLE_SHARD
    from bertjax.tasks.build import build_task

    with open_config(args) as config:
        task = build_task(config, train=True)
    if args.steps > task.total_steps:
        raise UsageError(f"--steps={args.steps} exceeds the {task.total_steps} steps of the run; reduce it")
    for note in task.notes:
        logger.info(note)
    batches = []
    for step, batch in enumerate(islice(task.train_batches(0, SINGLE_SHARD), args.steps)):
        # The number of rows varies with the phase and with packing.
        for row in range(min(args.rows, len(batch["input_ids"]))):
            show(f"step {step}, row {row}\n{task.format_row(batch, row)}\n")
        if args.npz:
            batches.append(batch)
    task.check_data_files(wait=True)
    if args.npz:
        write_batches(batches, args.npz)
        show(f"wrote the batches of {args.steps} step(s) to {args.npz}")


@command(
    "bertjax describe --config pretrain:size=large,phases=2\n  bertjax describe --checkpoint runs/base",
    *(CONFIG, INIT_FROM, RUN_CHECKPOINT),
    flag("--fields", "print only the config fields and their meanings"),
)
def describe(args: argparse.Namespace) -> None:
    """Prints parameter counts by module, FLOPs per token, batch and schedule."""
    from bertjax.config.fields import describe_fields
    from bertjax.estimate.describe import describe_task
    from bertjax.tasks.build import build_task

    with open_config(args) as config:
        if args.fields:
            show(describe_fields(config))
        else:
            show(describe_task(build_task(config, train=None)))
