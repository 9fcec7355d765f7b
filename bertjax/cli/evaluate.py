"""`bertjax evaluate`: metrics of a checkpoint."""

import argparse
import json
import logging
from typing import Any

from bertjax.cli.common import checkpoint_config_dict, open_checkpoint
from bertjax.cli.parser import add_checkpoint, add_command

logger = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "evaluate",
        evaluate,
        "Prints the metrics of a checkpoint on held-out data.",
        "bertjax evaluate --checkpoint runs/mini",
        config=True,
    )
    add_checkpoint(parser)
    parser.add_argument("--split", help="split of the task's data: dev or test, which must have labels (default: dev)")


def evaluate(args: argparse.Namespace) -> None:
    """Runs `bertjax evaluate`."""
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.checkpoint import resolve_path
    from bertjax.training.checkpoint_config import choose_evaluation
    from bertjax.training.evaluation import evaluate_checkpoint

    with open_checkpoint(args) as checkpoint:
        config_dict = checkpoint_config_dict(args, checkpoint)
        config = parse_config(choose_evaluation(config_dict, args.split) if args.split else config_dict)
        metrics = evaluate_checkpoint(build_task(config), checkpoint)
        # A converted checkpoint is in a temporary directory, so log the path of `--checkpoint`.
        is_converted = not checkpoint.is_relative_to(resolve_path(args.checkpoint))
        logger.info(f"evaluated checkpoint {args.checkpoint if is_converted else checkpoint}")
        print(json.dumps(metrics))
