"""What each command does, from its parsed arguments to what it prints.

Everything heavy is imported inside the commands, so that `--help` and wrong flags answer at once.
"""

import argparse
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.errors import STOPPED, UsageError
from bertjax.utils.terminal import is_first, show

logger = logging.getLogger(__name__)


def experiment_of(args: argparse.Namespace) -> str:
    """What is given with --config."""
    if not args.config:
        example = "tables/table5" if args.command == "reproduce" else "experiments/pretrain.py:size=base"
        command = " ".join(filter(None, (args.command, getattr(args, "what", None))))
        raise UsageError(f"`bertjax {command}` needs --config, such as {example}")
    return args.config


def config_of(args: argparse.Namespace, start: Any = None) -> Any:
    """The config of --config; see `bertjax.training.checkpoint_config.experiment_config`."""
    from bertjax.training.checkpoint_config import experiment_config

    return experiment_config(experiment_of(args), args.overrides, start)


@contextlib.contextmanager
def checkpoint_of(args: argparse.Namespace) -> Iterator[Any]:
    """The checkpoint of --checkpoint, whatever its format."""
    from bertjax.convert.convert import as_bertjax
    from bertjax.training.checkpoint import find_checkpoint

    with as_bertjax(args.checkpoint) as path:
        yield find_checkpoint(path)


@contextlib.contextmanager
def _start(args: argparse.Namespace, several: bool) -> Iterator[str | None]:
    """The checkpoint of --init_from as one of ours; one of another format is kept converted beside the run.

    Args:
      args: of the command.
      several: processes run it, each of which converts for itself.
    """
    from bertjax.convert.convert import as_bertjax
    from bertjax.tasks.build import parse_config
    from bertjax.training.workdir import CONVERTED

    if not args.init_from:
        yield None
        return
    # A conversion may take minutes.
    parse_config(config_of(args))
    shared = several or "://" in args.workdir
    keep = None if shared else Path(args.workdir).expanduser().absolute() / CONVERTED
    with as_bertjax(args.init_from, keep) as path:
        yield path


def checkpoint_config_of(args: argparse.Namespace, checkpoint: Any) -> Any:
    """The config of --config or, without it, of the checkpoint."""
    from bertjax.training.checkpoint import workdir_of
    from bertjax.training.checkpoint_config import checkpoint_config, with_labels_of
    from bertjax.training.workdir import is_converted

    if args.config:
        config = config_of(args, checkpoint)
        return config if config.data.get("labels") else with_labels_of(config, checkpoint)
    if is_converted(workdir_of(checkpoint)):
        raise UsageError(
            f"{args.checkpoint} does not tell what data it is for: give --config, such as experiments/glue.py"
        )
    return checkpoint_config(checkpoint, args.overrides)


def prepare(args: argparse.Namespace) -> None:
    from bertjax.data.corpus.prepare import prepare as run
    from bertjax.data.corpus.prepare import summary

    if args.cased and args.uncased:
        raise UsageError("--cased and --uncased exclude each other")
    manifest = run(
        args.input,
        args.output,
        vocabulary=args.vocab,
        vocabulary_kind=args.vocab_kind,
        vocabulary_size=args.vocab_size,
        lower_case=False if args.cased else True if args.uncased else None,
        heldout_share=args.heldout,
        workers=args.workers,
        runner=args.runner,
        runner_options=args.runner_options,
        data_dir=args.data_dir,
        overwrite=args.overwrite,
    )
    show(summary(args.output, manifest))


def inspect(args: argparse.Namespace) -> None:
    from itertools import islice

    from bertjax.data.npz import write_batches
    from bertjax.data.shard import SINGLE_SHARD
    from bertjax.tasks.build import build_task, parse_config

    task = build_task(parse_config(config_of(args)), train=True)
    if args.steps < 1 or args.steps > task.total_steps:
        raise UsageError(f"--steps is {args.steps}; it must be between 1 and the config's {task.total_steps}")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; it must be at least 1")
    batches = []
    for step, batch in enumerate(islice(task.train_batches(0, SINGLE_SHARD), args.steps)):
        # Phases, and training rows that several examples share, have as many as they have.
        for row in range(min(args.rows, len(batch["input_ids"]))):
            show(f"step {step}, row {row}\n{task.format_row(batch, row)}\n")
        if args.npz:
            batches.append(batch)
    task.check_data(args.steps)
    if args.npz:
        write_batches(batches, args.npz)
        show(f"wrote the batches of {args.steps} step(s) to {args.npz}")


def describe(args: argparse.Namespace) -> None:
    from bertjax.config.reference import describe_fields
    from bertjax.estimate.describe import describe_task
    from bertjax.tasks.build import build_task, parse_config

    settings = parse_config(config_of(args))
    show(describe_fields(settings) if args.fields else describe_task(settings, build_task(settings, train=None)))


def _joined(args: argparse.Namespace, cluster: Callable[[], Any]) -> bool:
    """Connects the processes of a run where there are several, and tells whether there are."""
    from bertjax.training.multihost import initialize_distributed, is_one_of_several

    several = args.distributed or is_one_of_several()
    if several:
        initialize_distributed(cluster())
    return several


def train(args: argparse.Namespace) -> None:
    from bertjax.inference.cached_features import training_task
    from bertjax.tasks.build import parse_config
    from bertjax.training.multihost import naming_a_lost_process
    from bertjax.training.train import train as run

    several = _joined(args, lambda: parse_config(config_of(args)).cluster)
    with naming_a_lost_process(), _start(args, several) as start:
        settings = parse_config(config_of(args, start))
        _end(run(training_task(settings, start), args.workdir, start))


def sweep(args: argparse.Namespace) -> None:
    from bertjax.tasks.build import parse_config
    from bertjax.training.multihost import naming_a_lost_process
    from bertjax.training.sweep import sweep as run

    experiment = experiment_of(args)
    several = _joined(args, lambda: parse_config(config_of(args)).cluster)
    with naming_a_lost_process(), _start(args, several) as start:
        _end(run(experiment, args.overrides, args.grid or (), args.seeds, args.workdir, start))


def reproduce(args: argparse.Namespace) -> None:
    from bertjax.config.cluster import ClusterConfig
    from bertjax.reproduce.results import read
    from bertjax.reproduce.runner import describe_plan, load_table, plan
    from bertjax.reproduce.runner import reproduce as run
    from bertjax.training.multihost import naming_a_lost_process

    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is for one run; a table's runs have the fields that its file gives them")
    table = load_table(experiment_of(args))
    if args.plan:
        show(describe_plan(plan(table, read(args.results)), args.results))
        return
    _joined(args, ClusterConfig)
    with naming_a_lost_process():
        if is_first():
            show(describe_plan(plan(table, read(args.results)), args.results))
        result = run(args.config, table, args.results)
    _end(result)
    if result["failed"]:
        raise SystemExit(1)


def table(args: argparse.Namespace) -> None:
    from etils import epath

    from bertjax.reproduce.formatting import as_markdown, as_text, draw_figure, shown
    from bertjax.reproduce.results import keep, read, together
    from bertjax.reproduce.runner import experiment_of_table, load_table

    if args.plot and "figure5" not in args.number:
        raise UsageError(f"--plot draws figure5, and {' '.join(args.number)} is asked for")
    places = [read(path) for path in args.results]
    for path, found in zip(args.results, places, strict=True):
        if not epath.Path(found.place).exists():
            logger.info(f"there is nothing at {path} yet")
    results = together(places)
    tables = {name: results.tables.get(name) or experiment_of_table(name) for name in args.number}
    loaded = {name: load_table(config) for name, config in tables.items()}
    for name, found in loaded.items():
        show((as_markdown if args.markdown else as_text)(shown(found, results)) + "\n")
        if args.plot and name == "figure5":
            draw_figure(found, results, Path(args.plot))
    if args.keep:
        runs = [run for found in loaded.values() for run in found.runs()]
        show(f"{keep(results, runs, tables, Path(args.keep))} runs are kept in {args.keep}")


def _end(result: dict[str, Any]) -> None:
    """Prints what a run came to; one that was stopped is to be started again, which its exit code tells."""
    print(json.dumps(result))
    if result["stopped"]:
        raise SystemExit(STOPPED)


def evaluate(args: argparse.Namespace) -> None:
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.checkpoint import resolved
    from bertjax.training.evaluation import evaluate_checkpoint

    with checkpoint_of(args) as checkpoint:
        settings = parse_config(checkpoint_config_of(args, checkpoint))
        values = evaluate_checkpoint(build_task(settings), checkpoint)
        logger.info(
            f"of checkpoint {checkpoint if checkpoint.is_relative_to(resolved(args.checkpoint)) else args.checkpoint}"
        )
        print(json.dumps(values))


def convert(args: argparse.Namespace) -> None:
    from bertjax.convert.convert import convert as run

    run(args.source, args.destination, args.format, args.overwrite)
    show(args.destination)


def plan(args: argparse.Namespace) -> None:
    from bertjax.estimate.plan import plan_run
    from bertjax.estimate.search import search
    from bertjax.estimate.showing import compare_plans, describe_plan, describe_search, read_plan
    from bertjax.estimate.topology import chip_of, use_tpu_compiler
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.checkpoint_config import experiment_config
    from bertjax.utils.io import write_atomic

    if args.compare:
        others = ("config", "topology", "search", "output", "price_per_chip_hour")
        if more := [f"--{name}" for name in others if getattr(args, name)] + args.overrides:
            raise UsageError(f"--compare shows two kept plans, and takes nothing else; leave out {', '.join(more)}")
        show(compare_plans(tuple(args.compare), tuple(map(read_plan, args.compare))))
        return
    if not args.topology:
        raise UsageError("`bertjax plan` needs --topology, such as v5e:16x16")
    if args.slices < 1:
        raise UsageError(f"--slices is {args.slices}; it must be at least 1")
    if args.price_per_chip_hour is not None and not 0 <= args.price_per_chip_hour < math.inf:
        raise UsageError(f"--price_per_chip_hour is {args.price_per_chip_hour}; it must be a number of at least 0")
    if args.output:
        _check_output(Path(args.output))
    chip_of(args.topology)
    config_of(args)
    use_tpu_compiler()

    def settings_with(overrides: Sequence[str]) -> Any:
        return parse_config(experiment_config(args.config, [*args.overrides, *overrides]))

    found = search(settings_with, args.topology, args.slices) if args.search else []
    if found:
        show(describe_search(found))
    best = found[0] if found else None
    chosen = best.overrides if best else ()
    settings = settings_with(chosen)
    task = build_task(settings, train=None)
    compiled = best.step if best else None
    made = plan_run(settings, task, args.topology, args.slices, args.price_per_chip_hour, compiled)
    show(describe_plan(made))
    text = json.dumps(made | {"config": args.config, "overrides": [*args.overrides, *chosen]})
    if args.output:
        write_atomic(Path(args.output), text + "\n")
    print(text)


def _check_output(file: Path) -> None:
    """Refuses a file that could not be written, before anything takes its time."""
    from bertjax.utils.io import check_writable

    try:
        if file.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        check_writable(file.parent)
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --output") from error


def bench_step(args: argparse.Namespace) -> None:
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.bench import bench_step as run

    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be at least 1")
    settings = parse_config(config_of(args))
    _say_phase(settings)
    print(json.dumps(run(build_task(settings, train=None), args.steps)))


def _say_phase(settings: Any) -> None:
    """Which phase is timed, of a pre-training that has two."""
    from bertjax.tasks.pretraining import Config

    if isinstance(settings, Config) and len(settings.phases) > 1:
        first, second = settings.phases
        logger.info(
            f"the first phase is timed, {first.batch_size} rows of {first.seq_len}; the second has "
            f"{second.batch_size} of {second.seq_len}: set config.data.seq_len and batch_size to time it"
        )


def bench_input(args: argparse.Namespace) -> None:
    from bertjax.data.corpus.local_copy import open_anywhere
    from bertjax.data.pretraining.bench import bench_input as run
    from bertjax.tasks.build import parse_config
    from bertjax.tasks.pretraining import Config

    settings = parse_config(config_of(args))
    if not isinstance(settings, Config):
        raise UsageError(f"`bench input` times the input of pre-training; the config's task is {settings.task}")
    if not settings.has_data:
        raise UsageError("`bench input` needs a corpus: --config FILE:corpus=DIR")
    _say_phase(settings)
    figures = run(
        open_anywhere(settings.data.corpus),
        settings.phases[0],
        source=settings.source,
        masking=settings.data.masking,
        seed=settings.seed,
        dupe_factor=settings.data.dupe_factor,
        seconds=args.seconds,
    )
    print(json.dumps(figures))
