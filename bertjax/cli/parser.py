"""Declaration of commands and their options, and the argument parser, which reports errors as `UsageError`."""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from bertjax.errors import UsageError
from bertjax.estimate import DEFAULT_MFU
from bertjax.utils.sections import bounds_problem
from bertjax.utils.terminal import LOG_LEVELS

# Function that adds options to a parser or to an option group.
Option = Callable[[Any], object]
# Metavars of options whose values are paths. Such options reject empty values.
PATH_METAVARS = ("DIR", "FILE", "NAME", "CKPT", "SRC", "DST")
CHECKPOINT_HELP = (
    "workdir, checkpoint in a workdir, hf:ORG/NAME[@REVISION], Hugging Face folder or TensorFlow 1 checkpoint"
)
_CONFIG_HELP = (
    "experiment and its arguments, such as pretrain:size=base,seq_len=128 or FILE.py:ARGUMENTS, or config.json of a "
    "workdir"
)
TOPOLOGY_HELP = "topology of one slice, such as v3:4x4, v4:4x4x4 or v5e:16x16"
_OVERRIDES_NOTE = "--config.FIELD=VALUE overrides a field, such as --config.optimizer.learning_rate=1e-3"


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors as `UsageError`."""

    def error(self, message: str) -> NoReturn:
        """Raises the message as a `UsageError`."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that prints default values and keeps the line breaks of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False, "", []) else action.help


class Command(NamedTuple):
    """`bertjax` command, created by the decorator `command`: its function, help text, example and options."""

    run: Callable[[argparse.Namespace], None]
    description: str
    example: str
    options: tuple[Option, ...]

    def add_parser(self, commands: Any, name: str) -> None:
        """Adds the parser of the command to the subparsers of `bertjax` or `bertjax bench`."""
        parser = commands.add_parser(
            name,
            help=self.description,
            description=self.description,
            epilog=f"example:\n  {self.example}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=self.run, prog=parser.prog)
        for add_option in self.options:
            add_option(parser)
        parser.add_argument("--log_level", choices=LOG_LEVELS, default="info", help="minimum level of log messages")


def command(example: str, *options: Option) -> Callable[[Callable[[argparse.Namespace], None]], Command]:
    """Wraps a function as a `Command`, without registering it. The function's docstring is the help text."""
    return lambda run: Command(run, run.__doc__ or "", example, options)


def option(name: str, help: str, **settings: Any) -> Option:
    """Declares an option or argument, such as `--output DIR`. `settings` are parameters of `add_argument`."""
    name, _, metavar = name.partition(" ")
    if metavar:
        settings["metavar"] = metavar
    if metavar.partition("[")[0] in PATH_METAVARS:
        settings.setdefault("type", _path)
    return lambda parser: parser.add_argument(name, help=help, **settings)


def flag(name: str, help: str) -> Option:
    """Declares an option without a value, which is False unless it is set."""
    return option(name, help, action="store_true")


def exclusive(*options: Option) -> Option:
    """Declares mutually exclusive options."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for add_option in options:
            add_option(group)

    return add


def number(kind: type[int] | type[float], **bounds: Any) -> Callable[[str], float]:
    """Returns an argparse type that parses and checks a number. `bounds` are arguments of `bounds_problem`."""

    def parse(text: str) -> float:
        value = kind(text)
        if problem := bounds_problem(value, **bounds):
            raise argparse.ArgumentTypeError(f"{value} is out of range; {problem}")
        return value

    # argparse shows this name in its message about a ValueError.
    parse.__name__ = kind.__name__
    return parse


def count(name: str, help: str, default: int | None = None, at_least: int = 1) -> Option:
    """Declares an option whose value is an integer of at least `at_least`."""
    return option(name, help, type=number(int, at_least=at_least, at_most=2**31 - 1), default=default)


def step_range(text: str) -> range:
    """Parses `START:STOP` as the steps START to STOP - 1, counted from 0. An empty string means no steps."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if text and not steps:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps; use START:STOP, such as 10:20")
    return steps


def _path(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; set a path or omit the option")
    return text


def config_option(required: bool = False) -> Option:
    """Declares `--config` and the overrides of config fields, `--config.FIELD=VALUE`."""

    def add(parser: Any) -> None:
        option("--config NAME[:ARGS]", _CONFIG_HELP, required=required)(parser)
        parser.epilog += f"\n\n{_OVERRIDES_NOTE}"
        parser.set_defaults(overrides=())

    return add


def case_options(cased: str, uncased: str) -> Option:
    """Declares `--cased` and `--uncased`, which set `lower_case` (default: None). The parameters are help texts."""
    return exclusive(
        option("--cased", cased, dest="lower_case", action="store_const", const=False),
        option("--uncased", uncased, dest="lower_case", action="store_const", const=True),
    )


CONFIG, REQUIRED_CONFIG = config_option(), config_option(required=True)
CHECKPOINT = option("--checkpoint CKPT", CHECKPOINT_HELP, required=True)
INIT_FROM = option(
    "--init_from CKPT", f"checkpoint with the initial parameters, architecture and vocabulary: {CHECKPOINT_HELP}"
)
# Sources of the config for commands that describe a run but do not train.
RUN = (
    *(CONFIG, INIT_FROM),
    option("--checkpoint CKPT", "workdir or checkpoint in it, instead of --config and --init_from"),
)
JSON = flag("--json", "print JSON instead of a table")
DISTRIBUTED = flag("--distributed", "require several processes (default: run as one process if no others are detected)")
PROFILE = option("--profile START:STOP", "profile steps START to STOP - 1 for TensorBoard", type=step_range, default="")
COST = (
    option(
        "--mfu",
        "model-FLOPs utilization assumed for the step time, in (0, 1]",
        type=number(float, above=0, at_most=1),
        default=DEFAULT_MFU,
    ),
    option(
        "--price_per_chip_hour",
        "price of a chip-hour in any currency, to print the cost",
        type=number(float, at_least=0, below=1e9),
    ),
)
