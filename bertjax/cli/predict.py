"""`bertjax evaluate`, `predict`, `ensemble` and `submission`: metrics and predictions of trained models."""

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from bertjax.cli.common import config_for_checkpoint, open_checkpoint
from bertjax.cli.parser import CHECKPOINT, CONFIG, command, count, exclusive, flag, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)
_TASK_SPLIT = "split of the task's data: dev or test"


@command(
    "bertjax evaluate --checkpoint runs/mini",
    *(CONFIG, CHECKPOINT),
    option("--split", "labeled split of the task's data: dev or test (default: dev)"),
)
def evaluate(args: argparse.Namespace) -> None:
    """Prints the metrics of a checkpoint on held-out data."""
    from bertjax.tasks.build import build_task
    from bertjax.tasks.embedding.task import EmbedTask
    from bertjax.training.checkpoint import resolve_path
    from bertjax.training.checkpoint_config import choose_split
    from bertjax.training.evaluation import evaluate_checkpoint
    from bertjax.training.results import log_results

    with open_checkpoint(args) as checkpoint:
        config = config_for_checkpoint(args, checkpoint)
        task = build_task(choose_split(config, args.split, uses_labels=True) if args.split else config)
        metrics = evaluate_checkpoint(task, checkpoint)
        if isinstance(task, EmbedTask):
            log_results(metrics, {}, task.baseline())
        # A converted checkpoint is in a temporary folder, so log the path or address that the user gave.
        is_converted = not checkpoint.is_relative_to(resolve_path(args.checkpoint))
        logger.info(f"evaluated checkpoint {args.checkpoint if is_converted else checkpoint}")
        print(json.dumps(metrics))


@command(
    'bertjax predict --checkpoint runs/sst2 "a good film" "a film"\n'
    '  bertjax predict --checkpoint runs/squad --context_file passage.txt "who wrote it?"\n'
    "  bertjax predict --checkpoint runs/mrpc --output runs/glue --columns index",
    CONFIG,
    option("texts text", "sentence, words to tag or question; ||| separates the texts of an example", nargs="*"),
    CHECKPOINT,
    option("--text FILE", "file with one text per line (-: standard input)"),
    exclusive(
        option("--context TEXT", "passage that contains the answers"),
        option("--context_file FILE", "file with the passage that contains the answers"),
    ),
    count("--seq_len", "maximum tokens per row (default: as in training, or the model's maximum)"),
    flag("--json", "print one JSON object per text"),
    flag("--logits", "add logits to the output"),
    option(
        "--output DIR",
        "folder for predictions of the task's data, in the official format and as .jsonl; existing files are replaced",
    ),
    option("--split", f"{_TASK_SPLIT} (default: test)"),
    option("--columns NAME,NAME", "columns of the task's data to copy to the .jsonl files"),
)
def predict(args: argparse.Namespace) -> None:
    """Prints predictions for texts, or writes predictions for the task's data in the official format."""
    from bertjax.inference.predict import build_prediction_task, create_output, write_outputs
    from bertjax.training.checkpoint_config import choose_split
    from bertjax.training.evaluation import evaluate_batches, load_for_task

    if args.texts or args.text:
        _predict_texts(args)
        return
    if not args.output:
        raise UsageError("nothing to predict; pass texts, --text FILE, or --output DIR to predict the task's data")
    _reject(args, ("context", "context_file", "json", "seq_len"), "only to texts")
    columns = [name for name in (args.columns or "").split(",") if name]
    with open_checkpoint(args) as checkpoint:
        task = build_prediction_task(choose_split(config_for_checkpoint(args, checkpoint), args.split or "test"))
        mesh, params = load_for_task(task, checkpoint)
        create_output(task, args.output, columns)
        for path in write_outputs(task, evaluate_batches(task, mesh, params)[1], args.output, args.logits, columns):
            show(path)


def _reject(args: argparse.Namespace, options: Iterable[str], scope: str) -> None:
    for name in options:
        if getattr(args, name):
            option = args.overrides[0] if name == "overrides" else f"--{name}"
            raise UsageError(f"{option} applies {scope}; omit it")


def _predict_texts(args: argparse.Namespace) -> None:
    from bertjax.inference.inputs import read_texts, split_line
    from bertjax.inference.load import load_model
    from bertjax.inference.predict import format_record, predict_texts
    from bertjax.tasks.records import to_json

    _reject(args, ("config", "output", "split", "columns", "overrides"), "to the task's data only")
    if "" in args.texts:
        raise UsageError("a text is empty; pass nonempty texts or --text FILE")
    texts, lines = itertools.tee(read_texts(args.texts, args.text))
    context = "\n".join(read_texts((), args.context_file)) if args.context_file else args.context or ""
    model = load_model(args.checkpoint)
    inputs = (split_line(line, model.output_kind) for line in lines)
    records = predict_texts(model, inputs, context=context, seq_len=args.seq_len, logits=args.logits)
    for line, (text, record) in enumerate(zip(texts, records, strict=True), 1):
        if args.json:
            # `to_json` returns ASCII, which every terminal and locale can print.
            print(to_json({"line": line, "text": text, **record}))
        else:
            show(format_record(text, record))


@command(
    "bertjax ensemble --checkpoint runs/squad1 --checkpoint runs/squad2 --output runs/ensemble",
    CONFIG,
    option(
        "--checkpoint CKPT",
        "fine-tuned checkpoint; repeat the option for each checkpoint",
        required=True,
        action="append",
    ),
    option("--split", _TASK_SPLIT, default="dev"),
    option("--output DIR", "folder for predictions and results.json", required=True),
)
def ensemble(args: argparse.Namespace) -> None:
    """Averages the logits of several fine-tuned checkpoints, writes predictions and prints metrics."""
    from bertjax.inference.ensemble import ensemble as run
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import choose_split

    checkpoints = [find_checkpoint(path) for path in args.checkpoint]
    configs = [choose_split(config_for_checkpoint(args, checkpoint), args.split) for checkpoint in checkpoints]
    print(json.dumps(run(checkpoints, configs, args.output)))


@command(
    "bertjax submission --predictions runs/submission --output runs/submission.zip",
    option("--predictions DIR", "folder with the prediction files of all tasks", required=True),
    option("--output FILE", "archive to write", required=True),
    flag("--own_wnli", "use WNLI.tsv from the predictions folder instead of predicting the majority class for WNLI"),
    flag("--partial", "write the archive even if files or rows are missing; the GLUE server rejects such an archive"),
)
def submission(args: argparse.Namespace) -> None:
    """Packs GLUE predictions into the archive for the GLUE server."""
    from bertjax.inference.glue_submission import write_submission

    for line in write_submission(Path(args.predictions), Path(args.output), not args.own_wnli, args.partial):
        show(line, file=sys.stderr)
    show(args.output)
