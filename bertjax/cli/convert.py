"""`bertjax convert`: conversion of checkpoints between formats."""

import argparse

from bertjax.cli.parser import CHECKPOINT_HELP, case_options, command, flag, option
from bertjax.errors import UsageError
from bertjax.utils.hub import is_hub
from bertjax.utils.terminal import show


@command(
    "bertjax convert uncased_L-12_H-768_A-12 runs/base_uncased\n  bertjax convert runs/topic hf:ORG/topic",
    option("source", CHECKPOINT_HELP, metavar="SRC"),
    option(
        "destination",
        "destination folder, which must not exist unless --overwrite is set, or hf:ORG/NAME to upload",
        metavar="DST",
    ),
    option("--format", "format of DST: bertjax or huggingface (default: bertjax, or huggingface for an upload)"),
    case_options("keep case and accents (default: as SRC says)", "convert text to lower case (default: as SRC says)"),
    flag("--overwrite", "replace an earlier conversion or upload"),
)
def convert(args: argparse.Namespace) -> None:
    """Converts a checkpoint of bertjax, Hugging Face or TensorFlow 1 to the format of bertjax or Hugging Face."""
    from bertjax.convert.convert import BERTJAX, HUGGINGFACE, upload
    from bertjax.convert.convert import convert as run

    if is_hub(args.destination):
        if args.lower_case is not None or args.format not in (None, HUGGINGFACE):
            raise UsageError("--cased, --uncased and --format have no effect on an upload; omit them")
        show(upload(args.source, args.destination, args.overwrite))
        return
    run(args.source, args.destination, args.format or BERTJAX, args.overwrite, args.lower_case)
    show(args.destination)
