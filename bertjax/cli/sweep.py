"""`bertjax sweep`: training runs over a grid of hyperparameters and random seeds."""

import argparse

from bertjax.cli.common import join_cluster, open_init_checkpoint, parse_run_config, print_result
from bertjax.cli.parser import DISTRIBUTED, INIT_FROM, REQUIRED_CONFIG, command, number, option


@command(
    "bertjax sweep --config glue:task=rte,path=glue_data --init_from runs/base --workdir runs/rte "
    "--grid optimizer.learning_rate=1e-4,3e-4 --grid data.batch_size=16,32",
    REQUIRED_CONFIG,
    option("--workdir", "sweep folder; resumed if it exists", required=True, metavar="DIR"),
    *(INIT_FROM, DISTRIBUTED),
    option("--seeds", "number of seeds per setting; each seed is one trial", type=number(int, at_least=1), default=1),
    option(
        "--grid",
        "comma-separated values of a config field; repeat the option for more fields, to run all combinations "
        "(default: the settings from the experiment's `sweep` function, or the named grid in the experiment's argument "
        "`grid`)",
        action="append",
        metavar="FIELD=VALUE,VALUE",
    ),
)
def sweep(args: argparse.Namespace) -> None:
    """Trains all settings of a grid, with one or more seeds each, and selects the best trial on the dev set."""
    from bertjax.inference.guide import add_guide_vectors
    from bertjax.training.multihost import exit_on_host_error
    from bertjax.training.sweep import TRIALS
    from bertjax.training.sweep import sweep as run

    distributed = join_cluster(args, parse_run_config(args).cluster)
    with exit_on_host_error(), open_init_checkpoint(args, keep_converted=not distributed, marker=TRIALS) as init_from:
        grid = args.grid or ()
        results = run(args.config, args.overrides, grid, args.seeds, args.workdir, init_from, add_guide_vectors)
        print_result(results)
