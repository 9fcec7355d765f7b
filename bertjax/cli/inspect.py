"""`bertjax inspect` and `bertjax describe`: printouts of a run's training batches, model and config."""

import argparse
import logging
from itertools import islice
from typing import Any

from bertjax.cli.common import open_config
from bertjax.cli.parser import add_command, add_model_source
from bertjax.errors import UsageError, at_least
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Adds the parsers of `inspect` and `describe`."""
    parser = add_command(
        commands,
        "inspect",
        inspect,
        "Prints training batches as text.",
        "bertjax inspect --config pretrain:corpus=runs/corpus --rows 2\n"
        "  bertjax inspect --config text:train=train.csv,dev=dev.csv --init_from runs/base\n"
        "  bertjax inspect --checkpoint runs/topic",
        config=True,
    )
    add_model_source(parser)
    parser.add_argument("--steps", type=int, default=1, help="number of batches to print, starting at step 0")
    parser.add_argument("--rows", type=int, default=3, help="number of rows to print per batch")
    parser.add_argument("--npz", metavar="FILE", help="write the complete batches to this file")

    parser = add_command(
        commands,
        "describe",
        describe,
        "Prints parameter counts by module, FLOPs per token, batch and schedule.",
        "bertjax describe --config pretrain:size=large,phases=2\n  bertjax describe --checkpoint runs/base",
        config=True,
    )
    add_model_source(parser)
    parser.add_argument("--fields", action="store_true", help="print only the config fields and their meanings")


def inspect(args: argparse.Namespace) -> None:
    """Runs `bertjax inspect`."""
    from bertjax.data.inspection import write_batches
    from bertjax.data.shard import SINGLE_SHARD
    from bertjax.tasks.build import build_task

    with open_config(args) as config:
        task = build_task(config, train=True)
    if not 1 <= args.steps <= task.total_steps:
        raise UsageError(
            f"--steps is {args.steps}; it must be between 1 and {task.total_steps}, the number of steps of the run"
        )
    at_least(args, "--", rows=1)
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


def describe(args: argparse.Namespace) -> None:
    """Runs `bertjax describe`."""
    from bertjax.config.fields import describe_fields
    from bertjax.estimate.describe import describe_task
    from bertjax.tasks.build import build_task

    with open_config(args) as config:
        if args.fields:
            show(describe_fields(config))
        else:
            show(describe_task(build_task(config, train=None)))
