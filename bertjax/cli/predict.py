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
from bertjax.cli.parser import add_checkpoint, add_command
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Adds the parsers of `evaluate`, `predict`, `ensemble` and `submission`."""
    parser = add_command(
        commands,
        "evaluate",
        evaluate,
        "Prints the metrics of a checkpoint on held-out data.",
        "bertjax evaluate --checkpoint runs/mini",
        config=True,
    )
    add_checkpoint(parser)
    parser.add_argument("--split", help="labeled split of the task's data: dev or test (default: dev)")

    parser = add_command(
        commands,
        "predict",
        predict,
        "Prints predictions for texts, or writes predictions for the task's data in the official format.",
        'bertjax predict --checkpoint runs/sst2 "a good film" "a film"\n'
        '  bertjax predict --checkpoint runs/squad --context_file passage.txt "who wrote it?"\n'
        "  bertjax predict --checkpoint runs/mrpc --output runs/glue --columns index",
        config=True,
    )
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="text",
        help="sentence, words to tag, or question; ||| separates the texts of a pair, or a context and its endings",
    )
    add_checkpoint(parser)
    parser.add_argument("--text", metavar="FILE", help="file with one text per line (-: standard input)")
    parser.add_argument("--context", metavar="TEXT", help="passage that contains the answers")
    parser.add_argument("--context_file", metavar="FILE", help="file with the passage that contains the answers")
    parser.add_argument(
        "--seq_len", type=int, help="maximum tokens per row (default: as in training, or the model's maximum)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per text")
    parser.add_argument("--logits", action="store_true", help="add logits to the output")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for predictions of the task's data: files in the official format, and .jsonl files with the "
        "line number, prediction and probabilities of each example. Existing files are replaced",
    )
    parser.add_argument("--split", help="split of the task's data: dev or test (default: test)")
    parser.add_argument("--columns", metavar="NAME,NAME", help="columns of the task's data to copy to the .jsonl files")

    parser = add_command(
        commands,
        "ensemble",
        ensemble,
        "Averages the logits of several fine-tuned checkpoints, writes predictions and prints metrics.",
        "bertjax ensemble --checkpoint runs/squad1 --checkpoint runs/squad2 --output runs/ensemble",
        config=True,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        action="append",
        metavar="CKPT",
        help="fine-tuned checkpoint of the ensemble; repeat the option for each checkpoint",
    )
    parser.add_argument("--split", default="dev", help="split of the task's data: dev or test")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for predictions and results.json")

    parser = add_command(
        commands,
        "submission",
        submission,
        "Packs GLUE predictions into the archive for the GLUE server.",
        "bertjax submission --predictions runs/submission --output runs/submission.zip",
    )
    parser.add_argument(
        "--predictions", required=True, metavar="DIR", help="folder with the prediction files of all tasks"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="archive to write")
    parser.add_argument(
        "--own_wnli",
        action="store_true",
        help="use WNLI.tsv from the predictions folder instead of predicting the majority class for WNLI",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="write the archive even if files or rows are missing; the GLUE server rejects such an archive",
    )


def evaluate(args: argparse.Namespace) -> None:
    """Runs `bertjax evaluate`."""
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


def predict(args: argparse.Namespace) -> None:
    """Runs `bertjax predict`."""
    from bertjax.inference.predict import write_predictions
    from bertjax.tasks.build import build_task
    from bertjax.training.checkpoint_config import choose_split

    if args.texts or args.text:
        _predict_texts(args)
        return
    if not args.output:
        raise UsageError("nothing to predict; pass texts, --text FILE, or --output DIR to predict the task's data")
    for name in ("context", "context_file", "json", "seq_len"):
        if getattr(args, name):
            raise UsageError(f"--{name} applies only to texts; omit it to predict the task's data")
    columns = [name for name in (args.columns or "").split(",") if name]
    with open_checkpoint(args) as checkpoint:
        task = build_task(choose_split(config_for_checkpoint(args, checkpoint), args.split or "test"))
        for path in write_predictions(task, checkpoint, args.output, args.logits, columns):
            show(path)


def _predict_texts(args: argparse.Namespace) -> None:
    from bertjax.data.finetuning.tables import FORMATS
    from bertjax.inference.inputs import read_lines, split_line
    from bertjax.inference.load import load_model
    from bertjax.inference.predict import check_model, format_record, predict_texts

    for name in ("config", "output", "split", "columns"):
        if getattr(args, name):
            raise UsageError(f"--{name} applies to the task's data only; omit it to predict texts")
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} applies to the task's data only; omit it to predict texts")
    if "" in args.texts:
        raise UsageError("a text is empty; pass nonempty texts or --text FILE")
    form = Path(args.text or "").suffix.removeprefix(".").lower()
    if form in FORMATS:
        raise UsageError(
            f"--text={args.text} is a {form} table, not one text per line; write its texts to a .txt file, or predict "
            "the file with --output DIR --config.data.test_file=FILE"
        )
    if args.context and args.context_file:
        raise UsageError("--context and --context_file are both set; set only one")
    texts: Iterable[str] = itertools.chain(args.texts, read_lines(args.text) if args.text else ())
    context = "\n".join(read_lines(args.context_file)) if args.context_file else args.context
    model = load_model(args.checkpoint)
    kind = check_model(model, context).kind
    texts, lines = itertools.tee(texts)
    inputs = (split_line(line, kind) for line in lines)
    records = predict_texts(model, inputs, context=context or "", seq_len=args.seq_len, logits=args.logits)
    for number, (text, record) in enumerate(zip(texts, records, strict=True), 1):
        if args.json:
            # `json.dumps` writes ASCII only, which every terminal and locale can print.
            print(json.dumps({"line": number, "text": text, **record}))
        else:
            show(format_record(text, record))


def ensemble(args: argparse.Namespace) -> None:
    """Runs `bertjax ensemble`."""
    from bertjax.inference.ensemble import ensemble as run
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import choose_split

    checkpoints = [find_checkpoint(path) for path in args.checkpoint]

    def config_of(checkpoint: Any) -> Any:
        return choose_split(config_for_checkpoint(args, checkpoint), args.split)

    print(json.dumps(run(checkpoints, config_of, args.output)))


def submission(args: argparse.Namespace) -> None:
    """Runs `bertjax submission`."""
    from bertjax.inference.glue_submission import write_submission

    for line in write_submission(Path(args.predictions), Path(args.output), not args.own_wnli, args.partial):
        show(line, file=sys.stderr)
    show(args.output)
