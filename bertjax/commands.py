"""What each command does, from its parsed arguments to what it prints.

Everything heavy is imported inside the commands, so that `--help` and wrong flags answer at once.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError
from bertjax.terminal import show


def _config(args: argparse.Namespace, start: Any = None) -> Any:
    """The config of --config; see `bertjax.building.experiment_config`."""
    from bertjax.building import experiment_config

    if not args.config:
        raise UsageError(f"`bertjax {args.command}` needs --config, such as experiments/pretrain.py:size=base")
    return experiment_config(args.config, args.overrides, start)


@contextlib.contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[Any]:
    """The checkpoint of --checkpoint, whatever its format."""
    from bertjax.interop.convert import as_bertjax
    from bertjax.terminal import say
    from bertjax.training.checkpoint import find_checkpoint

    with as_bertjax(args.checkpoint, say) as path:
        yield find_checkpoint(path)


@contextlib.contextmanager
def _start(args: argparse.Namespace) -> Iterator[str | None]:
    """The checkpoint of --init_from as one of ours; one of another format is kept converted beside the run."""
    from bertjax.interop.convert import as_bertjax
    from bertjax.terminal import say

    if not args.init_from:
        yield None
        return
    shared = getattr(args, "distributed", False) or "://" in args.workdir
    keep = None if shared else Path(args.workdir).expanduser().absolute() / "init_from"
    with as_bertjax(args.init_from, say, keep) as path:
        yield path


def _checkpoint_config(args: argparse.Namespace, checkpoint: Any) -> Any:
    """The config of --config or, without it, of the checkpoint."""
    from bertjax.building import checkpoint_config, with_labels_of
    from bertjax.training.checkpoint import workdir_of
    from bertjax.training.workdir import is_converted

    if args.config:
        config = _config(args, checkpoint)
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

    task = build_task(settings_of(_config(args)), train=True)
    if args.steps < 1 or args.steps > task.schedule.steps:
        raise UsageError(f"--steps is {args.steps}; it must be between 1 and the config's {task.schedule.steps}")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; it must be at least 1")
    batches = []
    for step, batch in enumerate(islice(task.train_batches(0, WHOLE), args.steps)):
        for row in range(min(args.rows, len(batch["input_ids"]))):
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

    settings = settings_of(_config(args))
    show(describe_fields(settings) if args.fields else describe_task(settings, build_task(settings, train=None)))


def train(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.tasks.run import build_task
    from bertjax.training.loop import train as run
    from bertjax.training.processes import join_the_others, naming_a_lost_process

    if args.distributed:
        join_the_others()
    with naming_a_lost_process(), _start(args) as start:
        settings = settings_of(_config(args, start))
        print(json.dumps(run(settings, build_task(settings, train=True), args.workdir, start)))


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
        first = _config(args, start).seed

        def overridden(overrides: list[str]) -> Any:
            return experiment_config(args.config, [*overrides, *given], start)

        def configure(trial: dict[str, Any]) -> Any:
            return settings_of(overridden([f"--config.{field}={value}" for field, value in trial.items()]))

        if args.grid:
            grid = cross_product(grid_values(args.grid, given, overridden))
        else:
            grid = load_trials(args.config, trials_of)
        trials = [{**trial, "seed": first + seed} for trial in grid for seed in range(args.seeds)]
        print(json.dumps(run_sweep(configure, trials, args.workdir, start)))


def evaluate(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.tasks.run import build_task
    from bertjax.terminal import say
    from bertjax.training.checkpoint import absolute
    from bertjax.training.evaluation import evaluate_checkpoint

    with _checkpoint(args) as checkpoint:
        settings = settings_of(_checkpoint_config(args, checkpoint))
        values = evaluate_checkpoint(settings, build_task(settings), checkpoint)
        say(f"of checkpoint {checkpoint if checkpoint.is_relative_to(absolute(args.checkpoint)) else args.checkpoint}")
        print(json.dumps(values))


def predict(args: argparse.Namespace) -> None:
    from bertjax.building import choose_split, settings_of
    from bertjax.inference.predictions import write_predictions
    from bertjax.tasks.run import build_task

    if args.given or args.text:
        _predict_texts(args)
        return
    if not args.output:
        raise UsageError(
            "give texts, or a file of them with --text, or --output DIR for predictions of the task's data"
        )
    for name in ("context", "context_file", "json", "seq_len"):
        if getattr(args, name):
            raise UsageError(f"--{name} is for texts; the task's data has its own")
    columns = [name for name in (args.columns or "").split(",") if name]
    with _checkpoint(args) as checkpoint:
        settings = settings_of(choose_split(_checkpoint_config(args, checkpoint), args.split or "test"))
        for path in write_predictions(settings, build_task(settings), checkpoint, args.output, args.logits, columns):
            show(path)


def _predict_texts(args: argparse.Namespace) -> None:
    from itertools import chain

    from bertjax.inference.answers import answers, check_model, described
    from bertjax.inference.texts import STANDARD_INPUT, lines_of
    from bertjax.loading import load_trained
    from bertjax.terminal import say

    for name in ("config", "output", "split", "columns"):
        if getattr(args, name) or (name == "config" and args.overrides):
            raise UsageError(f"--{name} is for predictions of the task's data, not of texts")
    if "" in args.given:
        raise UsageError("a text is empty; give one, or a file of them with --text")
    if args.context and args.context_file:
        raise UsageError("--context and --context_file exclude each other")
    if args.given == [STANDARD_INPUT]:
        args.given, args.text = [], STANDARD_INPUT
    texts: Iterable[str] = chain(args.given, lines_of(args.text) if args.text else ())
    context = "\n".join(lines_of(args.context_file)) if args.context_file else args.context
    trained = load_trained(args.checkpoint, tell=say)
    check_model(trained, context)
    asked, told = itertools.tee(texts)
    found = answers(trained, asked, context=context or "", seq_len=args.seq_len or 0, logits=args.logits)
    for number, (text, record) in enumerate(zip(told, found, strict=True), 1):
        if args.json:
            # ASCII alone, so that it is the same for any terminal and locale.
            print(json.dumps({"line": number, "text": text, **record}))
        else:
            show(described(text, record))


def submission(args: argparse.Namespace) -> None:
    from bertjax.inference.glue_submission import collect

    for line in collect(Path(args.predictions), Path(args.output), not args.own_wnli, args.partial):
        show(line, file=sys.stderr)
    show(args.output)


def fill(args: argparse.Namespace) -> None:
    from bertjax.inference.fill import check_texts
    from bertjax.inference.fill import fill as run
    from bertjax.loading import load_trained
    from bertjax.terminal import say

    check_texts(args.text, args.top)
    trained = load_trained(args.checkpoint, tell=say)
    for text in args.text:
        show(text)
        for pieces in run(trained, text, args.top):
            show("  " + "   ".join(f"{piece} {100 * probability:.1f} %" for piece, probability in pieces))


def features(args: argparse.Namespace) -> None:
    from functools import partial
    from itertools import chain, islice

    from bertjax.inference.features import Request, described, parse_layers, shards, texts_in
    from bertjax.inference.shards import write_shards
    from bertjax.inference.texts import lines_of
    from bertjax.loading import load_trained
    from bertjax.terminal import say

    if not args.text and not args.input:
        raise UsageError("give texts, or a file of them with --input")
    if not 0 <= args.show <= sys.maxsize:
        raise UsageError(f"--show is {args.show}; it must be at least 0, and a number that fits in 64 bits")
    layers = parse_layers(args.layers)
    texts = chain(args.text, lines_of(args.input) if args.input else ())
    trained = load_trained(args.checkpoint, tell=say)
    request = Request(trained, layers, args.seq_len or trained.config.max_positions)
    shards_of = partial(shards, request)
    if args.output:
        head: list[str] = []
        texts = _remembered(texts, head, args.show)
        written = write_shards(Path(args.output), request.about(), shards_of, texts, say)
    else:
        head = list(islice(texts, args.show))
        written = ((0, shard) for shard in shards_of(head))
    for before, shard in written:
        for index in range(min(texts_in(shard), max(0, args.show - before))):
            show(described(head[before + index], shard, index, layers))
    if args.output:
        show(args.output)


def _remembered(texts: Iterable[str], head: list[str], count: int) -> Iterator[str]:
    """The texts, of which the first few are also put into `head`."""
    for text in texts:
        if len(head) < count:
            head.append(text)
        yield text


def convert(args: argparse.Namespace) -> None:
    from bertjax.interop.convert import convert as run
    from bertjax.terminal import say

    run(args.source, args.destination, args.format, args.overwrite, say)
    show(args.destination)


def bench_step(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.tasks.run import build_task
    from bertjax.training.bench import bench_step as run

    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be at least 1")
    settings = settings_of(_config(args))
    print(json.dumps(run(settings, build_task(settings, train=None), args.steps)))


def bench_input(args: argparse.Namespace) -> None:
    from bertjax.building import settings_of
    from bertjax.corpus.store import open_corpus
    from bertjax.data.pretraining.bench import bench_input as run
    from bertjax.tasks.pretraining import Settings

    settings = settings_of(_config(args))
    if not isinstance(settings, Settings):
        raise UsageError(f"`bench input` times the input of pre-training; the config's task is {settings.task}")
    if not settings.has_data:
        raise UsageError("`bench input` needs a corpus: --config FILE:corpus=DIR")
    figures = run(
        open_corpus(settings.data.corpus),
        settings.phases[0],
        source=settings.source,
        masking=settings.data.masking,
        seed=settings.seed,
        pair_passes=settings.data.pair_passes,
        seconds=args.seconds,
    )
    print(json.dumps(figures))
