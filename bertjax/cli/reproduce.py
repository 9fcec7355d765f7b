"""`bertjax reproduce` and `bertjax table`: commands that train the runs of the paper's tables and print the results."""

import argparse
import logging
from pathlib import Path
from typing import Any

from bertjax.cli.common import join_cluster, print_result
from bertjax.cli.parser import COST, DISTRIBUTED, TOPOLOGY_HELP, command, flag, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import duration, is_first, show

logger = logging.getLogger(__name__)


@command(
    "bertjax reproduce --config tables/table5:scale=small,corpus=runs/corpus,glue=glue_data "
    "--results runs/tables --plan",
    option("--config NAME[:ARGS]", "table and its arguments, such as tables/table5:scale=small", required=True),
    option("--results DIR", "folder for all runs; a run that several tables share is trained once", required=True),
    flag("--plan", "print the runs and their estimated time, then exit"),
    option("--topology GENERATION:SIZE", TOPOLOGY_HELP),
    *(*COST, DISTRIBUTED),
)
def reproduce(args: argparse.Namespace) -> None:
    """Runs all experiments of a table of the paper. Skips finished runs and resumes interrupted runs."""
    from bertjax.config.mesh import ClusterConfig
    from bertjax.reproduce import runner
    from bertjax.reproduce.results import load_results
    from bertjax.reproduce.runs import with_commits
    from bertjax.training.multihost import exit_on_host_error

    config = with_commits(args.config)
    loaded = runner.load_table(config)
    if not args.plan:
        join_cluster(args, ClusterConfig())
    with exit_on_host_error():
        results = load_results([args.results])
        plan = runner.plan_table(loaded, results)
        if is_first():
            show(runner.describe_plan(plan, args.results))
            if args.topology:
                show(_topology_line(plan, args))
        if args.plan:
            return
        result = runner.reproduce(config, loaded, results, plan)
    print_result(result)
    if result["failed"]:
        raise SystemExit(1)


def _topology_line(plan: Any, args: argparse.Namespace) -> str:
    """Returns one line with the estimated time and cost of the pending runs on `--topology`."""
    from bertjax.estimate.topology import chip_of, chips_in

    chip, chips = chip_of(args.topology), chips_in(args.topology)
    hours = sum(run.flops for run in plan.pending) / (chips * chip.flops_per_second * args.mfu) / 3600
    cost = "" if args.price_per_chip_hour is None else f", cost {hours * chips * args.price_per_chip_hour:,.2f}"
    time = f"time {duration(3600 * hours)}, {hours * chips:,.2f} chip-hours"
    return f"on {args.topology}: {time}{cost}, if the MFU is {args.mfu:.0%}"


@command(
    "bertjax table 5 --results runs/tables",
    option("number", "table to print: 1 to 8, figure3, figure5, modern or the name of a custom table", nargs="+"),
    option(
        "--results DIR",
        "folder of `bertjax reproduce` or file of --keep; repeat the option to search several in this order",
        action="append",
        required=True,
    ),
    flag("--markdown", "print Markdown instead of aligned columns"),
    option("--plot FILE", "plot figure5 to this PNG file"),
    option("--keep FILE", "write the results of these tables to one JSON file"),
)
def table(args: argparse.Namespace) -> None:
    """Prints the paper's numbers next to the reproduced numbers, and the commands of missing runs."""
    from etils import epath

    from bertjax.reproduce.formatting import as_markdown, as_text, format_table, plot_figure5
    from bertjax.reproduce.results import load_results, save_results
    from bertjax.reproduce.runner import load_table

    if args.plot and "figure5" not in args.number:
        raise UsageError(f"--plot draws figure5, not {' '.join(args.number)}; add figure5, or omit --plot")
    results = load_results(args.results)
    packaged = {name: f"tables/table{name}" if name.isdigit() else f"tables/{name}" for name in args.number}
    experiments = {name: results.tables.get(name) or experiment for name, experiment in packaged.items()}
    tables = {name: load_table(config) for name, config in experiments.items()}
    for path, (source, _) in zip(args.results, results.sources, strict=True):
        if not epath.Path(source).exists():
            logger.info(f"no results in {path} yet")
    for name, loaded in tables.items():
        show((as_markdown if args.markdown else as_text)(format_table(loaded, results)) + "\n")
        if args.plot and name == "figure5":
            plot_figure5(loaded, results, Path(args.plot))
    if args.keep:
        runs = [run for loaded in tables.values() for run in loaded.runs()]
        show(f"wrote {save_results(results, runs, experiments, Path(args.keep))} runs to {args.keep}")
