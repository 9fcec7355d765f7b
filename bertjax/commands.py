"""What each command does, from its parsed arguments to what it prints.

Everything heavy is imported inside the commands, so that `--help` and wrong flags answer at once.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from bertjax.errors import BertjaxError, UsageError


def _config(args: argparse.Namespace, start: Any = None) -> Any:
    """The config of --config; see `bertjax.building.experiment_config`."""
    from bertjax.building import experiment_config

    if not args.config:
        raise UsageError(f"`bertjax {args.command}` needs --config, such as experiments/pretrain.py:size=base")
    return experiment_config(args.config, args.overrides, start)


def _checkpoint_and_config(args: argparse.Namespace) -> tuple[Any, Any]:
    """The checkpoint, and the config of --config or, without it, of the checkpoint."""
    from bertjax.building import checkpoint_config
    from bertjax.training.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(args.checkpoint)
    return checkpoint, _config(args, checkpoint) if args.config else checkpoint_config(checkpoint, args.overrides)


def prepare(args: argparse.Namespace) -> None:
    from bertjax.corpus.prepare import prepare as run
    from bertjax.corpus.prepare import summary

    # As Ctrl-C, which cleans up; the default would leave a part of the output behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        data_dir=args.data_dir,
        overwrite=args.overwrite,
    )
    print(summary(args.output, manifest))


def inspect(args: argparse.Namespace) -> None:
    from bertjax.building import build_task
    from bertjax.corpus.store import open_corpus
    from bertjax.data.inspect import format_example, format_row, write_batches
    from bertjax.tasks.vocabulary_files import open_vocabulary

    config = _config(args)
    task = build_task(config, train=True)
    if args.steps < 1 or args.steps > task.schedule.steps:
        raise UsageError(f"--steps is {args.steps}; it must be between 1 and the config's {task.schedule.steps}")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; it must be at least 1")
    batches = _first_batches(task, args.steps)
    if "corpus" in config.data:
        vocabulary, show = open_corpus(config.data.corpus).vocabulary(), format_example
    else:
        vocabulary, show = open_vocabulary(config.data.vocabulary), format_row
    for step, batch in enumerate(batches):
        for row in range(min(args.rows, len(batch["input_ids"]))):
            print(f"step {step}, row {row}\n{show(batch, row, vocabulary)}\n")
    if args.npz:
        write_batches(batches, args.npz)
        print(f"wrote the batches of {args.steps} step(s) to {args.npz}")


def _first_batches(task: Any, count: int) -> list[dict[str, Any]]:
    from itertools import islice

    return list(islice(task.train_batches(0), count))


def describe(args: argparse.Namespace) -> None:
    from bertjax.building import build_task
    from bertjax.report.describe import describe_task

    config = _config(args)
    print(describe_task(config, build_task(config)))


def train(args: argparse.Namespace) -> None:
    from bertjax.building import build_task
    from bertjax.training.loop import train as run

    if args.distributed:
        _join_the_others()
    config = _config(args, args.init_from)
    print(json.dumps(run(config, build_task(config, train=True), args.workdir, args.init_from)))


def sweep(args: argparse.Namespace) -> None:
    from bertjax.building import experiment_config
    from bertjax.config import load_trials
    from bertjax.training.sweep import run_sweep

    if args.seeds < 1:
        raise UsageError(f"--seeds is {args.seeds}; it must be at least 1")
    config = _config(args, args.init_from)
    # What is given on the command line holds for every trial.
    given = [item for item in args.overrides if not item.startswith("--config.seed=")]

    def configure(trial: dict[str, Any]) -> Any:
        overrides = [*(f"--config.{field}={value}" for field, value in trial.items()), *given]
        return experiment_config(args.config, overrides, args.init_from)

    trials = [{**trial, "seed": config.seed + seed} for trial in load_trials(args.config) for seed in range(args.seeds)]
    print(json.dumps(run_sweep(configure, trials, args.workdir, args.init_from)))


def _join_the_others() -> None:
    """Connects the processes of a run; TPU pods and Slurm tell JAX all it needs, elsewhere three variables do."""
    import jax

    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if name in os.environ}
    try:
        if len(given) == len(names):
            address, count, index = given.values()
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise BertjaxError(
            f"--distributed found no cluster ({error}); off TPU pods and Slurm, set {', '.join(names)}"
        ) from error


def evaluate(args: argparse.Namespace) -> None:
    from bertjax.building import build_task
    from bertjax.training.evaluation import evaluate_checkpoint
    from bertjax.training.writers import say

    checkpoint, config = _checkpoint_and_config(args)
    values = evaluate_checkpoint(config, build_task(config), checkpoint)
    say(f"of checkpoint {checkpoint}")
    print(json.dumps(values))


def predict(args: argparse.Namespace) -> None:
    from bertjax.building import build_task, choose_split
    from bertjax.training.evaluation import write_predictions

    checkpoint, config = _checkpoint_and_config(args)
    choose_split(config, args.split)
    for path in write_predictions(config, build_task(config), checkpoint, args.output):
        print(path)


def submission(args: argparse.Namespace) -> None:
    from bertjax.tasks.glue_submission import collect

    for problem in collect(Path(args.predictions), Path(args.output), not args.own_wnli):
        print(f"incomplete: {problem}", file=sys.stderr)
    print(args.output)


def fill(args: argparse.Namespace) -> None:
    from bertjax.building import pretrained_task
    from bertjax.tasks.fill import fill as run
    from bertjax.tasks.vocabulary_files import workdir_vocabulary
    from bertjax.training.checkpoint import find_checkpoint, load_params, workdir_of
    from bertjax.training.evaluation import abstract_params

    checkpoint = find_checkpoint(args.checkpoint)
    task = pretrained_task(checkpoint)
    vocabulary = workdir_vocabulary(workdir_of(checkpoint))
    params = load_params(checkpoint, abstract_params(task.objective), print)
    for text in args.text:
        print(text)
        for pieces in run(task.objective.model, params, vocabulary, text, args.top):
            print("  " + "   ".join(f"{piece} {100 * probability:.1f} %" for piece, probability in pieces))


def bench_step(args: argparse.Namespace) -> None:
    from bertjax.building import build_task
    from bertjax.training.bench import bench_step as run

    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be at least 1")
    config = _config(args)
    print(json.dumps(run(config, build_task(config), args.steps)))


def bench_input(args: argparse.Namespace) -> None:
    from bertjax.corpus.store import open_corpus
    from bertjax.data.bench import bench_input as run
    from bertjax.data.settings import Masking
    from bertjax.fields import check_pretraining, phases

    config = _config(args)
    if "corpus" not in config.data:
        raise UsageError(f"`bench input` times the input of pre-training; the config's task is {config.task}")
    if not config.data.corpus:
        raise UsageError("`bench input` needs a corpus: --config FILE:corpus=DIR")
    check_pretraining(config)
    print(
        json.dumps(
            run(
                open_corpus(config.data.corpus),
                phases(config)[0],
                objective=config.data.objective,
                masking=Masking(**config.data.masking),
                seed=config.seed,
                pair_passes=config.data.pair_passes,
                seconds=args.seconds,
            )
        )
    )
