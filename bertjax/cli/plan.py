"""`bertjax plan`: estimates of memory, time and cost on TPUs, from the compiled train step."""

import argparse
import json
from pathlib import Path

from bertjax.cli.common import open_config, parse_run_config
from bertjax.cli.parser import INIT_FROM, JSON, MFU, PRICE, REQUIRED_CONFIG, command, number, option, topology_option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show


@command(
    "bertjax plan --config pretrain:size=large,seq_len=512 --config.model.remat=full --topology v5e:16x16",
    *(REQUIRED_CONFIG, INIT_FROM, topology_option(required=True), MFU, PRICE),
    option(
        "--slices", "number of slices, connected by the data-center network", type=number(int, at_least=1), default=1
    ),
    JSON,
    option("--output", "write the plan to this JSON file", metavar="FILE"),
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
