"""`bertjax convert` and `bertjax export`: conversion of checkpoints to other formats."""

import argparse

from bertjax.cli.parser import CHECKPOINT_HELP, case_options, command, flag, option
from bertjax.errors import UsageError
from bertjax.utils.hub import is_hub
from bertjax.utils.terminal import show


@command(
    "bertjax convert uncased_L-12_H-768_A-12 runs/base_uncased\n  bertjax convert runs/topic hf:ORG/topic",
    option("source SRC", CHECKPOINT_HELP),
    option("destination DST", "folder, which must not exist unless --overwrite is set, or hf:ORG/NAME to upload"),
    option("--format", "bertjax, huggingface or sentence_transformers (default: bertjax; for an upload, huggingface)"),
    case_options("keep case and accents (default: as in SRC)", "convert text to lower case (default: as in SRC)"),
    flag("--overwrite", "replace an earlier conversion or upload"),
)
def convert(args: argparse.Namespace) -> None:
    """Converts a checkpoint of bertjax, Hugging Face or TensorFlow 1 to another format."""
    from bertjax.convert.convert import BERTJAX, HUGGINGFACE, upload
    from bertjax.convert.convert import convert as run

    if is_hub(args.destination):
        if args.lower_case is not None or args.format not in (None, HUGGINGFACE):
            raise UsageError("--cased, --uncased and --format have no effect on an upload; omit them")
        show(upload(args.source, args.destination, args.overwrite))
        return
    run(args.source, args.destination, args.format or BERTJAX, args.overwrite, args.lower_case)
    show(args.destination)


@command(
    "bertjax export runs/topic topic.onnx\n  bertjax export runs/topic topic.stablehlo",
    option("source SRC", CHECKPOINT_HELP),
    option("destination FILE", "FILE.onnx or FILE.stablehlo; must not exist without --overwrite"),
    flag("--overwrite", "replace an existing file"),
)
def export(args: argparse.Namespace) -> None:
    """Exports a checkpoint to ONNX or StableHLO with its tokenizer, and compares its outputs with those of bertjax."""
    from bertjax.inference.export import export as run

    run(args.source, args.destination, args.overwrite)
    show(args.destination)
