"""`bertjax convert`: conversion of checkpoints between formats."""

import argparse
from typing import Any

from bertjax.cli.parser import CHECKPOINT_HELP, add_command
from bertjax.utils.terminal import show


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "convert",
        convert,
        "Converts a checkpoint between the formats of bertjax, Hugging Face and TensorFlow 1.",
        "bertjax convert uncased_L-12_H-768_A-12 runs/base_uncased",
    )
    parser.add_argument("source", metavar="SRC", help=CHECKPOINT_HELP)
    parser.add_argument("destination", metavar="DST", help="destination directory; must not exist without --overwrite")
    parser.add_argument("--format", default="bertjax", help="format of DST: bertjax, huggingface or tensorflow")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")


def convert(args: argparse.Namespace) -> None:
    """Runs `bertjax convert`."""
    from bertjax.convert.convert import convert as run

    run(args.source, args.destination, args.format, args.overwrite)
    show(args.destination)
