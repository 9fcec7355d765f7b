"""`bertjax inspect`, `describe` and `plan`: commands that print a run's batches, its model, or estimates for TPUs."""

import argparse
import json
import logging
from itertools import islice
from pathlib import Path

from bertjax.cli.common import open_config, parse_run_config
from bertjax.cli.parser import COST, INIT_FROM, JSON, REQUIRED_CONFIG, RUN, TOPOLOGY_HELP, command, count, flag, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


@command(
    "bertjax inspect --config pretrain:corpus=runs/corpus --rows 2\n"
    "  bertjax inspect --config text:train=train.csv,dev=dev.csv --init_from runs/base\n"
    "  bertjax inspect --checkpoint runs/topic",
    *RUN,
    count("--steps", "number of batches to print, starting at step 0", default=1),
    count("--rows", "number of rows to print per batch", default=3),
    option("--npz FILE", "write the complete batches to this file"),
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
    *RUN,
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


@command(
    "bertjax plan --config pretrain:size=large,seq_len=512 --config.model.remat=full --topology v5e:16x16",
    *(REQUIRED_CONFIG, INIT_FROM, *COST),
    option("--topology GENERATION:SIZE", TOPOLOGY_HELP, required=True),
    count("--slices", "number of slices, connected by the data-center network", default=1),
    *(JSON, option("--output FILE", "write the plan to this JSON file")),
)
def plan(args: argparse.Namespace) -> None:
    """Compiles the train step with the TPU compiler, without a TPU, and estimates memory, time and cost."""
    from bertjax.estimate.plan import describe_plan, plan_run
    from bertjax.estimate.topology import use_tpu_compiler
    from bertjax.tasks.build import build_task
    from bertjax.utils.io import write_atomic

    if args.output and not Path(args.output).absolute().parent.is_dir():
        # Check the path first, because compilation may take an hour.
        raise UsageError(f"no folder for --output: {Path(args.output).absolute().parent}; create it first")
    parse_run_config(args)  # Report an invalid config even if the TPU compiler is missing.
    use_tpu_compiler()
    with open_config(args) as config:
        task = build_task(config, train=None)
        result = plan_run(task, args.topology, args.slices, args.mfu, args.price_per_chip_hour)
    text = json.dumps(result | {"config": args.config, "overrides": args.overrides})
    if args.output:
        write_atomic(Path(args.output), text + "\n")
    show(text if args.json else describe_plan(result))
