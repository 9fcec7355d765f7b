"""`bertjax bench step` and `bertjax bench input`: benchmarks of the train step and of the input pipeline."""

import argparse
import json

from bertjax.cli.common import open_config, parse_run_config
from bertjax.cli.parser import JSON, PROFILE, REQUIRED_CONFIG, RUN, command, count, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import format_table


@command(
    "bertjax bench step --config pretrain:size=base,batch=sequences --config.data.batch_size=8",
    *RUN,
    count("--steps", "number of timed steps, after one step for compilation", default=10),
    *(JSON, PROFILE),
)
def bench_step(args: argparse.Namespace) -> None:
    """Times train steps on one batch of the first training phase."""
    from bertjax.tasks.build import build_task
    from bertjax.training import bench

    with open_config(args) as config:
        task = build_task(config, train=None)
    result = bench.bench_step(task, args.steps, args.profile)
    print(json.dumps(result) if args.json else format_table(bench.step_table(result)))


@command(
    "bertjax bench input --config pretrain:corpus=runs/corpus --seconds 10",
    REQUIRED_CONFIG,
    option("--seconds", "duration in seconds", type=number(float, at_least=0, at_most=86_400), default=10.0),
    JSON,
)
def bench_input(args: argparse.Namespace) -> None:
    """Times the input pipeline of the first pre-training phase."""
    from bertjax.tasks.build import build_task
    from bertjax.tasks.pretraining.config import PretrainingConfig
    from bertjax.tasks.pretraining.task import PretrainingTask
    from bertjax.training import bench
    from bertjax.training.checkpoint_config import fill_unset_fields

    config = fill_unset_fields(parse_run_config(args))
    # Build no task for other configs, because `build_task` would read their data before the error below.
    task = build_task(config) if isinstance(config, PretrainingConfig) and config.has_data else None
    if not isinstance(task, PretrainingTask):
        raise UsageError("`bench input` needs a pre-training config with a corpus; set --config NAME:corpus=DIR")
    result = bench.bench_input(task, args.seconds)
    print(json.dumps(result) if args.json else format_table(bench.input_table(result)))
