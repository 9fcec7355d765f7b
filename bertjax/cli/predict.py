"""What the commands do that ask a trained model: texts or data in, answers out.

Everything heavy is imported inside them, so that `--help` and wrong flags answer at once.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertjax.cli.commands import checkpoint_config_of, checkpoint_of
from bertjax.errors import UsageError
from bertjax.utils.terminal import show


def predict(args: argparse.Namespace) -> None:
    from bertjax.inference.predict_files import write_predictions
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.checkpoint_config import choose_split

    if args.texts or args.text:
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
    with checkpoint_of(args) as checkpoint:
        settings = parse_config(choose_split(checkpoint_config_of(args, checkpoint), args.split or "test"))
        for path in write_predictions(settings, build_task(settings), checkpoint, args.output, args.logits, columns):
            show(path)


def _predict_texts(args: argparse.Namespace) -> None:
    from itertools import chain

    from bertjax.inference.load import load_trained
    from bertjax.inference.predict import answers, check_model, described
    from bertjax.inference.texts import STANDARD_INPUT, lines_of

    for name in ("config", "output", "split", "columns"):
        if getattr(args, name) or (name == "config" and args.overrides):
            raise UsageError(f"--{name} is for predictions of the task's data, not of texts")
    if "" in args.texts:
        raise UsageError("a text is empty; give one, or a file of them with --text")
    if args.context and args.context_file:
        raise UsageError("--context and --context_file exclude each other")
    if args.texts == [STANDARD_INPUT]:
        args.texts, args.text = [], STANDARD_INPUT
    texts: Iterable[str] = chain(args.texts, lines_of(args.text) if args.text else ())
    context = "\n".join(lines_of(args.context_file)) if args.context_file else args.context
    trained = load_trained(args.checkpoint)
    check_model(trained, context)
    asked, told = itertools.tee(texts)
    found = answers(trained, asked, context=context or "", seq_len=args.seq_len, logits=args.logits)
    for number, (text, record) in enumerate(zip(told, found, strict=True), 1):
        if args.json:
            # ASCII alone, so that it is the same for any terminal and locale.
            print(json.dumps({"line": number, "text": text, **record}))
        else:
            show(described(text, record))


def ensemble(args: argparse.Namespace) -> None:
    from bertjax.inference.ensemble import ensemble as run
    from bertjax.tasks.build import parse_config
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import choose_split

    checkpoints = [find_checkpoint(path) for path in args.checkpoint]

    def settings_for(checkpoint: Any) -> Any:
        return parse_config(choose_split(checkpoint_config_of(args, checkpoint), args.split))

    print(json.dumps(run(checkpoints, settings_for, args.output)))


def submission(args: argparse.Namespace) -> None:
    from bertjax.inference.glue_submission import collect

    for line in collect(Path(args.predictions), Path(args.output), not args.own_wnli, args.partial):
        show(line, file=sys.stderr)
    show(args.output)


def fill_mask(args: argparse.Namespace) -> None:
    from bertjax.inference.fill_mask import check_texts
    from bertjax.inference.fill_mask import fill_mask as run
    from bertjax.inference.load import load_trained

    check_texts(args.texts, args.top)
    trained = load_trained(args.checkpoint)
    for text in args.texts:
        show(text)
        for pieces in run(trained, text, args.top):
            show("  " + "   ".join(f"{piece} {100 * probability:.1f} %" for piece, probability in pieces))


def features(args: argparse.Namespace) -> None:
    from functools import partial
    from itertools import chain, islice

    from bertjax.inference.features import Request, described, parse_layers, shards, texts_in
    from bertjax.inference.load import load_trained
    from bertjax.inference.shards import write_shards
    from bertjax.inference.texts import lines_of

    if not args.texts and not args.input:
        raise UsageError("give texts, or a file of them with --input")
    if not 0 <= args.show <= sys.maxsize:
        raise UsageError(f"--show is {args.show}; it must be at least 0, and a number that fits in 64 bits")
    layers = parse_layers(args.layers)
    texts = chain(args.texts, lines_of(args.input) if args.input else ())
    trained = load_trained(args.checkpoint)
    most = trained.config.max_position_embeddings if args.seq_len is None else args.seq_len
    request = Request(trained, layers, most)
    shards_of = partial(shards, request)
    if args.output:
        head: list[str] = []
        texts = _remembered(texts, head, args.show)
        written = write_shards(Path(args.output), request.about(), shards_of, texts)
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
