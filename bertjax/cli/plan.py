"""`bertjax plan`: compiles the train step for a TPU and estimates memory, time and cost."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertjax.cli.common import load_config_dict
from bertjax.cli.parser import add_command
from bertjax.errors import UsageError
from bertjax.utils.terminal import show


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "plan",
        plan,
        "Compiles the train step for a TPU, without one, and prints whether it fits, its speed and its cost.",
        "bertjax plan --config pretrain:size=large,seq_len=512 --config.model.remat=full --topology v5e:16x16",
        config=True,
    )
    parser.add_argument(
        "--topology", metavar="GENERATION:SIZE", help="chips of one slice: v3:4x4, v4:4x4x4, v5e:16x16, ..."
    )
    parser.add_argument("--slices", type=int, default=1, help="number of slices, connected by the data-center network")
    parser.add_argument("--price_per_chip_hour", type=float, help="price in any currency; prints the cost of the run")
    parser.add_argument(
        "--search", action="store_true", help="search the largest batch and the best remat policy first"
    )
    parser.add_argument("--output", metavar="FILE", help="write the plan to this JSON file")
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="compare two files of --output instead")


def plan(args: argparse.Namespace) -> None:
    """Runs `bertjax plan`."""
    from bertjax.estimate.plan import plan_run
    from bertjax.estimate.search import search
    from bertjax.estimate.showing import compare_plans, describe_plan, describe_search, read_plan
    from bertjax.estimate.topology import chip_of, use_tpu_compiler
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.checkpoint_config import experiment_config
    from bertjax.utils.io import write_atomic

    if args.compare:
        others = ("config", "topology", "search", "output", "price_per_chip_hour")
        if extra := [f"--{name}" for name in others if getattr(args, name)] + args.overrides:
            raise UsageError(f"--compare takes no other options: {', '.join(extra)}; omit them")
        show(compare_plans(tuple(args.compare), tuple(map(read_plan, args.compare))))
        return
    if not args.topology:
        raise UsageError("`bertjax plan` needs --topology, such as v5e:16x16")
    if args.slices < 1:
        raise UsageError(f"--slices is {args.slices}; it must be at least 1")
    if args.price_per_chip_hour is not None and not 0 <= args.price_per_chip_hour < math.inf:
        raise UsageError(f"--price_per_chip_hour is {args.price_per_chip_hour}; it must be at least 0")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        # Compilation may take an hour.
        raise UsageError(f"no directory for --output: {Path(args.output).absolute().parent}; create it first")
    chip_of(args.topology)
    load_config_dict(args)
    use_tpu_compiler()

    def config_with(overrides: Sequence[str]) -> Any:
        return parse_config(experiment_config(args.config, [*args.overrides, *overrides]))

    candidates = search(config_with, args.topology, args.slices) if args.search else []
    if candidates:
        show(describe_search(candidates))
    best = candidates[0] if candidates else None
    overrides = best.overrides if best else ()
    config = config_with(overrides)
    task = build_task(config, train=None)
    compiled = best.step if best else None
    result = plan_run(config, task, args.topology, args.slices, args.price_per_chip_hour, compiled)
    show(describe_plan(result))
    text = json.dumps(result | {"config": args.config, "overrides": [*args.overrides, *overrides]})
    if args.output:
        write_atomic(Path(args.output), text + "\n")
    print(text)
