"""`bertjax fill_mask`: prediction of masked tokens."""

import argparse
from typing import Any

from bertjax.cli.parser import add_checkpoint, add_command
from bertjax.utils.terminal import show


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "fill_mask",
        fill_mask,
        "Prints the most probable tokens for each [MASK] of a text.",
        'bertjax fill_mask --checkpoint runs/mini "Paris is the [MASK] of France."',
    )
    parser.add_argument("texts", nargs="+", metavar="text")
    add_checkpoint(parser)
    parser.add_argument("--top", type=int, default=5, help="number of tokens to print per mask")


def fill_mask(args: argparse.Namespace) -> None:
    """Runs `bertjax fill_mask`."""
    from bertjax.inference.fill_mask import check_texts
    from bertjax.inference.fill_mask import fill_mask as run
    from bertjax.inference.load import load_model

    check_texts(args.texts, args.top)
    model = load_model(args.checkpoint)
    for text in args.texts:
        show(text)
        for tokens in run(model, text, args.top):
            show("  " + "   ".join(f"{token} {100 * probability:.1f} %" for token, probability in tokens))
