"""`bertjax convert`: conversion of checkpoints between formats."""

import argparse
from typing import Any

from bertjax.cli.parser import CHECKPOINT_HELP, add_command, chosen_case
from bertjax.errors import UsageError
from bertjax.utils.hub import is_hub
from bertjax.utils.terminal import show


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "convert",
        convert,
        "Converts a checkpoint of bertjax, Hugging Face or TensorFlow 1 to the format of bertjax or Hugging Face.",
        "bertjax convert uncased_L-12_H-768_A-12 runs/base_uncased\n  bertjax convert runs/topic hf:ORG/topic",
    )
    parser.add_argument("source", metavar="SRC", help=CHECKPOINT_HELP)
    parser.add_argument(
        "destination",
        metavar="DST",
        help="destination folder, which must not exist unless --overwrite is set, or hf:ORG/NAME to upload",
    )
    parser.add_argument(
        "--format",
        help="format of DST: bertjax or huggingface (default: bertjax, or huggingface for an upload)",
    )
    parser.add_argument("--cased", action="store_true", help="keep case and accents (default: as SRC says)")
    parser.add_argument("--uncased", action="store_true", help="convert text to lower case (default: as SRC says)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion or upload")


def convert(args: argparse.Namespace) -> None:
    """Runs `bertjax convert`."""
    from bertjax.convert.convert import BERTJAX, HUGGINGFACE, upload
    from bertjax.convert.convert import convert as run

    lower_case = chosen_case(args)
    if is_hub(args.destination):
        if lower_case is not None:
            raise UsageError("--cased and --uncased have no effect on an upload; convert to a folder first")
        if args.format not in (None, HUGGINGFACE):
            raise UsageError(f"an upload has the format {HUGGINGFACE}, not {args.format}; omit --format")
        show(upload(args.source, args.destination, args.overwrite))
        return
    run(args.source, args.destination, args.format or BERTJAX, args.overwrite, lower_case)
    show(args.destination)
