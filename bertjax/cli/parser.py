"""Argument parser of the commands, and options shared by several commands."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from bertjax.errors import UsageError, shortened
from bertjax.estimate import DEFAULT_MFU
from bertjax.utils.terminal import LOG_LEVELS

# Metavars of options whose values are paths. Such options reject empty values.
PATH_METAVARS = ("DIR", "FILE", "NAME", "CKPT", "SRC", "DST")
CHECKPOINT_HELP = (
    "workdir, checkpoint in a workdir, hf:ORG/NAME[@REVISION], Hugging Face folder or TensorFlow 1 checkpoint"
)
_CONFIG_HELP = (
    "experiment and its arguments, such as pretrain:size=base,seq_len=128 or FILE.py:ARGUMENTS, or config.json of a "
    "workdir"
)
_MAX_INTEGER = 2**31 - 1


def _path(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; set a path or omit the option")
    return text


def _integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not an integer: {shortened(repr(text))}") from None
    if abs(number) > _MAX_INTEGER:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is out of range; use a magnitude of at most {_MAX_INTEGER:,}"
        )
    return number


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors as `UsageError`, and rejects empty paths and integers beyond 32 bits."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument. Paths and integers are checked when they are parsed."""
        if options.get("metavar", "").partition("[")[0] in PATH_METAVARS:
            options.setdefault("type", _path)
        if options.get("type") is int:
            options["type"] = _integer
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raises the message as a `UsageError`."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


class Version(argparse.Action):
    """Action that prints the version of the installed package."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        # Import here, because this import takes as long as the rest of `bertjax --help`.
        import importlib.metadata

        print(f"bertjax {importlib.metadata.version('bertjax')}")
        sys.exit()


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that prints default values and keeps the line breaks of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False, "", []) else action.help


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], None],
    description: str,
    example: str,
    config: bool = False,
) -> argparse.ArgumentParser:
    """Adds a command to the subparsers of `bertjax` or `bertjax bench`, and returns its parser.

    If `config` is True, the command takes `--config` and overrides of config fields.
    """
    parser = commands.add_parser(
        name,
        help=description,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    if config:
        parser.add_argument("--config", metavar="NAME[:ARGS]", help=_CONFIG_HELP)
        parser.epilog += "\n\n--config.FIELD=VALUE overrides a field, such as --config.optimizer.learning_rate=1e-3"
    parser.add_argument("--log_level", choices=LOG_LEVELS, default="info", help="minimum level of log messages")
    return parser


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Adds the options of time and cost estimates for TPUs. `check_topology` checks their values."""
    parser.add_argument(
        "--topology", metavar="GENERATION:SIZE", help="topology of one slice, such as v3:4x4, v4:4x4x4 or v5e:16x16"
    )
    parser.add_argument(
        "--mfu", type=float, default=DEFAULT_MFU, help="model-FLOPs utilization assumed for the step time, in (0, 1]"
    )
    parser.add_argument(
        "--price_per_chip_hour",
        type=float,
        help="price of a chip-hour in any currency, to print the cost",
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds `--checkpoint`."""
    parser.add_argument("--checkpoint", required=True, metavar="CKPT", help=CHECKPOINT_HELP)


def add_init_from(parser: argparse.ArgumentParser) -> None:
    """Adds `--init_from` for commands that describe a run but do not train."""
    parser.add_argument(
        "--init_from",
        metavar="CKPT",
        help="initial checkpoint, which sets the architecture and the default vocabulary of the run, as in `train`: "
        f"{CHECKPOINT_HELP}",
    )


def add_model_source(parser: argparse.ArgumentParser) -> None:
    """Adds `--init_from` and `--checkpoint` for commands that describe a run but do not train."""
    add_init_from(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="CKPT",
        help="workdir, or a checkpoint in it; its config is used, so --config and --init_from must not be set",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Adds `--distributed`."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="require several processes, and fail if there is only one (default: detect processes automatically)",
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Adds `--profile`."""
    parser.add_argument(
        "--profile",
        default="",
        metavar="START:STOP",
        help="profile steps START to STOP - 1 with jax.profiler, for TensorBoard or xprof",
    )


def chosen_case(args: argparse.Namespace) -> bool | None:
    """Returns False for `--cased`, True for `--uncased`, and None if neither is set."""
    if args.cased and args.uncased:
        raise UsageError("--cased and --uncased are both set; set only one")
    return False if args.cased else True if args.uncased else None
