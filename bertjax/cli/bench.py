"""`bertjax bench step` and `bertjax bench input`: benchmarks of the train step and of the input pipeline."""

import argparse
import json

from bertjax.cli.common import open_config, parse_run_config
from bertjax.cli.parser import (
    CONFIG,
    INIT_FROM,
    JSON,
    PROFILE,
    REQUIRED_CONFIG,
    RUN_CHECKPOINT,
    command,
    number,
    option,
)
from bertjax.errors import UsageError
from bertjax.utils.terminal import format_table


@command(
    "bertjax bench step --config pretrain:size=base,batch=sequences --config.data.batch_size=8",
    *(CONFIG, INIT_FROM, RUN_CHECKPOINT),
    option(
        "--steps", "number of timed steps, after one step for compilation", type=number(int, at_least=1), default=10
    ),
    *(JSON, PROFILE),
)
def bench_step(args: argparse.Namespace) -> None:
    """Times train steps on one batch of the first training phase."""
    from bertjax.tasks.build import build_task
    from bertjax.training.bench import bench_step as run
    from bertjax.training.bench import step_table

    with open_config(args) as config:
        task = build_task(config, train=None)
    result = run(task, args.steps, args.profile)
    print(json.dumps(result) if args.json else format_table(step_table(result)))


@command(
    "bertjax bench input --config pretrain:corpus=runs/corpus --seconds 10",
    REQUIRED_CONFIG,
    option(
        "--seconds",
        "duration of the measurement in seconds",
        type=number(float, at_least=0, at_most=86_400),
        default=10.0,
    ),
    JSON,
)
def bench_input(args: argparse.Namespace) -> None:
    """Times the input pipeline of the first pre-training phase."""
    from bertjax.tasks.build import build_task
    from bertjax.tasks.pretraining.config import PretrainingConfig
    from bertjax.tasks.pretraining.task import PretrainingTask
    from bertjax.training.bench import bench_input as run
    from bertjax.training.bench import input_table
    from bertjax.training.checkpoint_config import fill_unset_fields

    config = fill_unset_fields(parse_run_config(args))
    # Build no task for other configs, because `build_task` would read their data before the error below.
    task = build_task(config) if isinstance(config, PretrainingConfig) and config.has_data else None
    if not isinstance(task, PretrainingTask):
        raise UsageError("`bench input` needs a pre-training config with a corpus; set --config NAME:corpus=DIR")
    result = run(task, args.seconds)
    print(json.dumps(result) if args.json else format_table(input_table(result)))
