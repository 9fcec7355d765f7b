"""Checks of commands in documents and in the help, without running them."""

from pathlib import Path

from bertjax.cli.main import parse_args
from bertjax.config.load import load_config
from bertjax.errors import UsageError
from bertjax.presets import grid_values, load_settings
from bertjax.reproduce.runner import load_table
from bertjax.training.checkpoint_config import experiment_config

EXPERIMENTS = sorted(file.stem for file in (Path(__file__).parents[2] / "experiments").glob("*.py"))


def check_command(arguments: list[str]) -> None:
    """Raises an error if a bertjax command is invalid or overrides a field that no experiment has."""
    args = parse_args(arguments)
    if args.command == "reproduce":
        assert load_table(args.config).runs() and not args.overrides
    elif getattr(args, "config", None):
        experiment_config(args.config, args.overrides)
        if args.command == "sweep":
            assert args.grid or load_settings(args.config)
            grid_values(
                args.grid or [], args.overrides, lambda more: load_config(args.config, [*args.overrides, *more])
            )
    else:
        # Without --config, the overrides apply to the config of a checkpoint, whose task is unknown here.
        check_fields(args.overrides)


def check_fields(overrides: list[str]) -> None:
    """Raises a UsageError if no experiment has all fields of the overrides."""
    errors: list[UsageError] = []
    for name in EXPERIMENTS if overrides else ():
        try:
            load_config(name, overrides)
        except UsageError as error:
            errors.append(error)
    if errors and len(errors) == len(EXPERIMENTS):
        raise errors[0]
