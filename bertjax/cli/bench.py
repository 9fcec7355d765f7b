"""`bertjax bench step` and `bertjax bench input`: benchmarks of the train step and of the input pipeline."""

import argparse
import json
from typing import Any

from bertjax.cli.common import open_config, parse_run_config
from bertjax.cli.parser import HelpFormatter, add_command, add_json, add_model_source, add_profile
from bertjax.errors import UsageError, at_least
from bertjax.utils.terminal import format_table


def add_parser(commands: Any) -> None:
    """Adds the parsers of `bench step` and `bench input`."""
    parser = commands.add_parser(
        "bench",
        help="Times the train step or the input pipeline.",
        epilog="example:\n  bertjax bench step --config pretrain:size=tiny,quick=true",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    benchmarks = parser.add_subparsers(dest="what", metavar="step|input", required=True)
    parser = add_command(
        benchmarks,
        "step",
        bench_step,
        "Times train steps on one batch of the first training phase.",
        "bertjax bench step --config pretrain:size=base,batch=sequences --config.data.batch_size=8",
        config=True,
    )
    add_model_source(parser)
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps, after one step for compilation")
    add_json(parser)
    add_profile(parser)
    parser = add_command(
        benchmarks,
        "input",
        bench_input,
        "Times the input pipeline of the first pre-training phase.",
        "bertjax bench input --config pretrain:corpus=runs/corpus --seconds 10",
        config=True,
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement in seconds")
    add_json(parser)


def bench_step(args: argparse.Namespace) -> None:
    """Runs `bertjax bench step`."""
    from bertjax.tasks.build import build_task
    from bertjax.training.bench import bench_step as run
    from bertjax.training.bench import step_table
    from bertjax.training.profiling import parse_steps

    at_least(args, "--", steps=1)
    with open_config(args) as config:
        task = build_task(config, train=None)
    result = run(task, args.steps, parse_steps(args.profile))
    print(json.dumps(result) if args.json else format_table(step_table(result)))


def bench_input(args: argparse.Namespace) -> None:
    """Runs `bertjax bench input`."""
    from bertjax.tasks.build import build_task
    from bertjax.tasks.objectives.config import PretrainingConfig
    from bertjax.tasks.pretraining import PretrainingTask
    from bertjax.training.bench import bench_input as run
    from bertjax.training.bench import input_table
    from bertjax.training.checkpoint_config import complete

    config = complete(parse_run_config(args))
    if isinstance(config, PretrainingConfig) and not config.has_data:
        raise UsageError("`bench input` needs a corpus; set --config NAME:corpus=DIR")
    # Do not build tasks that are rejected below, because `build_task` reads their data.
    task = build_task(config) if isinstance(config, PretrainingConfig) else None
    if not isinstance(task, PretrainingTask):
        raise UsageError(f"`bench input` does not support task {config.task}; use a pre-training config")
    result = run(task, args.seconds)
    print(json.dumps(result) if args.json else format_table(input_table(result)))
