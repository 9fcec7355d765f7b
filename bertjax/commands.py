"""What each command does, from its parsed arguments to what it prints.

Everything heavy is imported inside the commands, so that `--help` and wrong flags answer at once.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.errors import STOPPED, UsageError
from bertjax.terminal import show


def config_of(args: argparse.Namespace, start: Any = None) -> Any:
    """The config of --config; see `bertjax.building.experiment_config`."""
    from bertjax.building import experiment_config

    if not args.config:
        raise UsageError(f"`bertjax {args.command}` needs --config, such as experiments/pretrain.py:size=base")
    return experiment_config(args.config, args.overrides, start)


@contextlib.contextmanager
def checkpoint_of(args: argparse.Namespace) -> Iterator[Any]:
    """The checkpoint of --checkpoint, whatever its format."""
    from bertjax.interop.convert import as_bertjax
    from bertjax.terminal import say
    from bertjax.training.checkpoint import find_checkpoint

    with as_bertjax(args.checkpoint, say) as path:
        yield find_checkpoint(path)


@contextlib.contextmanager
def _start(args: argparse.Namespace) -> Iterator[str | None]:
    """The checkpoint of --init_from as one of ours; one of another format is kept converted beside the run."""
    from bertjax.building import settings_of
    from bertjax.interop.convert import as_bertjax
    from bertjax.terminal import say

    if not args.init_from:
        yield None
        return
    # A conversion may take minutes.
    settings_of(config_of(args))
    shared = getattr(args, "distributed", False) or "://" in args.workdir
    keep = None if shared else Path(args.workdir).expanduser().absolute() / "init_from"
    with as_bertjax(args.init_from, say, keep) as path:
        yield path


def checkpoint_config_of(args: argparse.Namespace, checkpoint: Any) -> Any:
    """The config of --config or, without it, of the checkpoint."""
    from bertjax.building import checkpoint_config, with_labels_of
    from bertjax.training.checkpoint import workdir_of
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
    from bertjax.corpus.prepare import prepare as run
    from bertjax.corpus.prepare import summary

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

    from bertjax.building import settings_of
    from bertjax.data.share import WHOLE
    from bertjax.data.showing import write_batches
    from bertjax.tasks.run import build_task

    task = build_task(settings_of(config_of(args)), train=True)
    if args.steps < 1 or args.steps > task.schedule.steps:
        raise UsageError(f"--steps is {args.steps}; it must be between 1 and the config's {task.schedule.steps}")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; it must be at least 1")
    batches = []
    for step, batch in enumerate(islice(task.train_batches(0, WHOLE), args.steps)):
        for row in range(min(args.rows, task.batch_sizes[0])):
            show(f"step {step}, row {row}\n{task.show(batch, row)}\n")
        if args.npz:
            batches.append(batch)
    task.check_data(args.steps)
    if args.npz:
        write_batches(batches, args.npz)
        show(f"wrote the batches of {args.steps} step(s) to {args.npz}")


def describe(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.report.describe import describe_task
    from bertjax.report.fields import describe_fields
    from bertjax.tasks.run import build_task

    settings = settings_of(config_of(args))
    show(describe_fields(settings) if args.fields else describe_task(settings, build_task(settings, train=None)))


def train(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.inference.frozen import training_task
    from bertjax.training.loop import train as run
    from bertjax.training.processes import is_one_of_several, join_the_others, naming_a_lost_process

    if args.distributed or is_one_of_several():
        join_the_others(settings_of(config_of(args)).cluster)
    with naming_a_lost_process(), _start(args) as start:
        settings = settings_of(config_of(args, start))
        _end(run(settings, training_task(settings, start), args.workdir, start))


def sweep(args: argparse.Namespace) -> None:
    from bertjax.building import experiment_config, settings_of
    from bertjax.config import grid_values, load_trials
    from bertjax.experiment import cross_product, trials_of
    from bertjax.sweeps import run_sweep

    if args.seeds < 1:
        raise UsageError(f"--seeds is {args.seeds}; it must be at least 1")
    # What is given on the command line holds for every trial.
    given = [item for item in args.overrides if not item.startswith("--config.seed=")]
    with _start(args) as start:
        first = config_of(args, start).seed

        def overridden(overrides: list[str]) -> Any:
            return experiment_config(args.config, [*overrides, *given], start)

        def configure(trial: dict[str, Any]) -> Any:
            return settings_of(overridden([f"--config.{field}={value}" for field, value in trial.items()]))

        if args.grid:
            grid = cross_product(grid_values(args.grid, given, overridden))
        else:
            grid = load_trials(args.config, trials_of)
        trials = [{**trial, "seed": first + seed} for trial in grid for seed in range(args.seeds)]
        _end(run_sweep(configure, trials, args.workdir, start))


def _end(result: dict[str, Any]) -> None:
    """Prints what a run came to; one that was stopped is to be started again, which its exit code tells."""
    print(json.dumps(result))
    if result["stopped"]:
        raise SystemExit(STOPPED)


def evaluate(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.tasks.run import build_task
    from bertjax.terminal import say
    from bertjax.training.checkpoint import absolute
    from bertjax.training.evaluation import evaluate_checkpoint

    with checkpoint_of(args) as checkpoint:
        settings = settings_of(checkpoint_config_of(args, checkpoint))
        values = evaluate_checkpoint(settings, build_task(settings), checkpoint)
        say(f"of checkpoint {checkpoint if checkpoint.is_relative_to(absolute(args.checkpoint)) else args.checkpoint}")
        print(json.dumps(values))


def convert(args: argparse.Namespace) -> None:
    from bertjax.interop.convert import convert as run
    from bertjax.terminal import say

    run(args.source, args.destination, args.format, args.overwrite, say)
    show(args.destination)


def plan(args: argparse.Namespace) -> None:
    from bertjax.building import experiment_config, settings_of
    from bertjax.files import write_whole
    from bertjax.planning.plan import plan_run
    from bertjax.planning.search import search
    from bertjax.planning.showing import compare_plans, describe_plan, describe_search, read_plan
    from bertjax.planning.topology import chip_of, use_tpu_compiler
    from bertjax.tasks.run import build_task

    if args.compare:
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
        return settings_of(experiment_config(args.config, [*args.overrides, *overrides]))

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
        write_whole(Path(args.output), text + "\n")
    print(text)


def _check_output(file: Path) -> None:
    """Refuses a file that could not be written, before anything takes its time."""
    from bertjax.files import check_writable

    try:
        if file.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        check_writable(file.parent)
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --output") from error


def bench_step(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.tasks.run import build_task
    from bertjax.training.bench import bench_step as run

    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be at least 1")
    settings = settings_of(config_of(args))
    print(json.dumps(run(settings, build_task(settings, train=None), args.steps)))


def bench_input(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.corpus.local_copy import open_anywhere
    from bertjax.data.pretraining.bench import bench_input as run
    from bertjax.tasks.pretraining import Settings

    settings = settings_of(config_of(args))
    if not isinstance(settings, Settings):
        raise UsageError(f"`bench input` times the input of pre-training; the config's task is {settings.task}")
    if not settings.has_data:
        raise UsageError("`bench input` needs a corpus: --config FILE:corpus=DIR")
    figures = run(
        open_anywhere(settings.data.corpus),
        settings.phases[0],
        source=settings.source,
        masking=settings.data.masking,
        seed=settings.seed,
        pair_passes=settings.data.pair_passes,
        seconds=args.seconds,
    )
    print(json.dumps(figures))
