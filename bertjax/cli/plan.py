"""`bertjax plan`: estimates of memory, time and cost on TPUs, from the compiled train step."""

import argparse
import json
from pathlib import Path
from typing import Any

from bertjax.cli.common import check_topology, open_config, parse_run_config
from bertjax.cli.parser import add_command, add_init_from, add_json, add_topology
from bertjax.errors import UsageError, at_least
from bertjax.utils.terminal import show


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "plan",
        plan,
        "Compiles the train step with the TPU compiler, without a TPU, and estimates memory, time and cost.",
        "bertjax plan --config pretrain:size=large,seq_len=512 --config.model.remat=full --topology v5e:16x16",
        config=True,
    )
    add_init_from(parser)
    add_topology(parser)
    parser.add_argument("--slices", type=int, default=1, help="number of slices, connected by the data-center network")
    add_json(parser)
    parser.add_argument("--output", metavar="FILE", help="write the plan to this JSON file")


def plan(args: argparse.Namespace) -> None:
    """Runs `bertjax plan`."""
    from bertjax.estimate.plan import describe_plan, plan_run
    from bertjax.estimate.topology import use_tpu_compiler
    from bertjax.tasks.build import build_task
    from bertjax.utils.io import write_atomic

    if not args.topology:
        raise UsageError("`bertjax plan` needs --topology, such as v5e:16x16")
    at_least(args, "--", slices=1)
    check_topology(args)
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
    if args.json:
        print(text)
        return
    show(describe_plan(result))
