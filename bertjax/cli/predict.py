"""`bertjax evaluate`, `predict`, `ensemble` and `submission`: metrics and predictions of trained models."""

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bertjax.cli.common import config_for_checkpoint, open_checkpoint
from bertjax.cli.parser import CHECKPOINT, CONFIG, command, exclusive, flag, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


_TASK_SPLIT = "split of the task's data: dev or test"


@command(
    "bertjax evaluate --checkpoint runs/mini",
    *(CONFIG, CHECKPOINT),
    option("--split", help="labeled split of the task's data: dev or test (default: dev)"),
)
def evaluate(args: argparse.Namespace) -> None:
    """Prints the metrics of a checkpoint on held-out data."""
    from bertjax.tasks.build import build_task
    from bertjax.training.checkpoint import resolve_path
    from bertjax.training.checkpoint_config import choose_evaluation
    from bertjax.training.evaluation import evaluate_checkpoint

    with open_checkpoint(args) as checkpoint:
        config = config_for_checkpoint(args, checkpoint)
        if args.split:
            config = choose_evaluation(config, args.split)
        metrics = evaluate_checkpoint(build_task(config), checkpoint)
        # If `--checkpoint` was converted, `checkpoint` is in a temporary folder, so log `--checkpoint` instead.
        is_converted = not checkpoint.is_relative_to(resolve_path(args.checkpoint))
        logger.info(f"evaluated checkpoint {args.checkpoint if is_converted else checkpoint}")
        print(json.dumps(metrics))


@command(
    'bertjax predict --checkpoint runs/sst2 "a good film" "a film"\n'
    '  bertjax predict --checkpoint runs/squad --context_file passage.txt "who wrote it?"\n'
    "  bertjax predict --checkpoint runs/mrpc --output runs/glue --columns index",
    CONFIG,
    option(
        "texts",
        nargs="*",
        metavar="text",
        help="sentence, words to tag, or question; ||| separates the texts of a pair, or a context and its endings",
    ),
    CHECKPOINT,
    option("--text", metavar="FILE", help="file with one text per line (-: standard input)"),
    exclusive(
        option("--context", metavar="TEXT", help="passage that contains the answers"),
        option("--context_file", metavar="FILE", help="file with the passage that contains the answers"),
    ),
    option(
        "--seq_len", type=number(int), help="maximum tokens per row (default: as in training, or the model's maximum)"
    ),
    flag("--json", "print one JSON object per text"),
    flag("--logits", "add logits to the output"),
    option(
        "--output",
        metavar="DIR",
        help="folder for predictions of the task's data: files in the official format, and .jsonl files with the "
        "line number, prediction and probabilities of each example. Existing files are replaced",
    ),
    option("--split", help=f"{_TASK_SPLIT} (default: test)"),
    option("--columns", metavar="NAME,NAME", help="columns of the task's data to copy to the .jsonl files"),
)
def predict(args: argparse.Namespace) -> None:
    """Prints predictions for texts, or writes predictions for the task's data in the official format."""
    from bertjax.inference.predict import write_predictions
    from bertjax.tasks.build import build_task
    from bertjax.training.checkpoint_config import choose_split

    if args.texts or args.text:
        _predict_texts(args)
        return
    if not args.output:
        raise UsageError("nothing to predict; pass texts, --text FILE, or --output DIR to predict the task's data")
    _reject(args, ("context", "context_file", "json", "seq_len"), "the task's data")
    columns = [name for name in (args.columns or "").split(",") if name]
    with open_checkpoint(args) as checkpoint:
        task = build_task(choose_split(config_for_checkpoint(args, checkpoint), args.split or "test"))
        for path in write_predictions(task, checkpoint, args.output, args.logits, columns):
            show(path)


def _reject(args: argparse.Namespace, options: Iterable[str], predicted: str) -> None:
    for name in options:
        if getattr(args, name):
            raise UsageError(f"--{name} has no effect on predictions of {predicted}; omit it")


def _predict_texts(args: argparse.Namespace) -> None:
    from bertjax.data.finetuning.tables import FORMATS
    from bertjax.inference.inputs import read_lines, split_line
    from bertjax.inference.load import load_model
    from bertjax.inference.predict import check_model, format_record, predict_texts

    _reject(args, ("config", "output", "split", "columns"), "texts")
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} has no effect on predictions of texts; omit it")
    if "" in args.texts:
        raise UsageError("a text is empty; pass nonempty texts or --text FILE")
    if Path(args.text or "").suffix.removeprefix(".").lower() in FORMATS:
        raise UsageError(
            f"--text={args.text} is a table, not one text per line; use --output DIR --config.data.test_file=FILE"
        )
    texts: Iterable[str] = itertools.chain(args.texts, read_lines(args.text) if args.text else ())
    context = "\n".join(read_lines(args.context_file)) if args.context_file else args.context
    model = load_model(args.checkpoint)
    kind = check_model(model, context).kind
    texts, lines = itertools.tee(texts)
    inputs = (split_line(text, kind) for text in lines)
    records = predict_texts(model, inputs, context=context or "", seq_len=args.seq_len, logits=args.logits)
    for line, (text, record) in enumerate(zip(texts, records, strict=True), 1):
        if args.json:
            # `json.dumps` writes ASCII only, which every terminal and locale can print.
            print(json.dumps({"line": line, "text": text, **record}))
        else:
            show(format_record(text, record))


@command(
    "bertjax ensemble --checkpoint runs/squad1 --checkpoint runs/squad2 --output runs/ensemble",
    CONFIG,
    option(
        "--checkpoint",
        required=True,
        action="append",
        metavar="CKPT",
        help="fine-tuned checkpoint of the ensemble; repeat the option for each checkpoint",
    ),
    option("--split", default="dev", help=_TASK_SPLIT),
    option("--output", required=True, metavar="DIR", help="folder for predictions and results.json"),
)
def ensemble(args: argparse.Namespace) -> None:
    """Averages the logits of several fine-tuned checkpoints, writes predictions and prints metrics."""
    from bertjax.inference.ensemble import ensemble as run
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import choose_split

    checkpoints = [find_checkpoint(path) for path in args.checkpoint]

    def config_of(checkpoint: Any) -> Any:
        return choose_split(config_for_checkpoint(args, checkpoint), args.split)

    print(json.dumps(run(checkpoints, config_of, args.output)))


@command(
    "bertjax submission --predictions runs/submission --output runs/submission.zip",
    option("--predictions", required=True, metavar="DIR", help="folder with the prediction files of all tasks"),
    option("--output", required=True, metavar="FILE", help="archive to write"),
    flag("--own_wnli", "use WNLI.tsv from the predictions folder instead of predicting the majority class for WNLI"),
    flag("--partial", "write the archive even if files or rows are missing; the GLUE server rejects such an archive"),
)
def submission(args: argparse.Namespace) -> None:
    """Packs GLUE predictions into the archive for the GLUE server."""
    from bertjax.inference.glue_submission import write_submission

    for line in write_submission(Path(args.predictions), Path(args.output), not args.own_wnli, args.partial):
        show(line, file=sys.stderr)
    show(args.output)
