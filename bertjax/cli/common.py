"""Functions shared by several commands: loading configs and checkpoints, joining a cluster, printing results."""

import argparse
import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertjax.errors import STOPPED, UsageError


def command_name(args: argparse.Namespace) -> str:
    """Returns the name of a command, such as `bench step`."""
    return " ".join(filter(None, (args.command, getattr(args, "what", None))))


def require_config(args: argparse.Namespace) -> str:
    """Returns the value of `--config`. Raises a UsageError if the option is missing."""
    if not args.config:
        example = "tables/table5" if args.command == "reproduce" else "pretrain:size=base"
        run = ", or --checkpoint, such as runs/base" if hasattr(args, "checkpoint") else ""
        raise UsageError(f"`bertjax {command_name(args)}` needs --config, such as {example}{run}")
    return args.config


def parse_run_config(args: argparse.Namespace) -> Any:
    """Returns the config of `--config` with overrides applied. Fields that a checkpoint determines may be unset."""
    from bertjax.config.load import load_config
    from bertjax.tasks.build import parse_config

    return parse_config(load_config(require_config(args), args.overrides))


@contextlib.contextmanager
def open_config(args: argparse.Namespace) -> Iterator[Any]:
    """Yields the config of the run that `--checkpoint` belongs to or, without `--checkpoint`, the config of `--config`.

    With `--config`, `--init_from` supplies the architecture. A checkpoint in another format is converted to a temporary
    folder. Use the config only inside the `with` block, because it may refer to the vocabulary in the temporary folder.
    """
    from bertjax.convert.convert import BERTJAX, detect_format
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import complete
    from bertjax.utils.hub import is_hub

    if not getattr(args, "checkpoint", None):
        config = parse_run_config(args)
        with open_init_checkpoint(args) as init_from:
            yield complete(config, init_from)
        return
    fix = "use --config, such as glue, and --init_from"
    for option in ("config", "init_from"):
        if getattr(args, option):
            raise UsageError(
                f"--{option} and --checkpoint both define the run; omit --{option} to use the config of the checkpoint"
            )
    # Raise before any conversion, because a checkpoint in another format has no run config.
    if is_hub(args.checkpoint) or detect_format(args.checkpoint) != BERTJAX:
        raise UsageError(f"{args.checkpoint} is not in bertjax's format, so it has no config of a run; {fix}")
    yield config_for_checkpoint(args, find_checkpoint(args.checkpoint), fix)


def config_for_checkpoint(args: argparse.Namespace, checkpoint: Any, fix: str = "set --config, such as glue") -> Any:
    """Returns the config of `--config` or, without this option, the config saved with the checkpoint.

    For a converted checkpoint, raises a UsageError if `--config` is missing, because such a checkpoint has no task
    settings. The error message ends with `fix`.
    """
    from bertjax.training.checkpoint import workdir_of
    from bertjax.training.checkpoint_config import checkpoint_config, complete, with_labels_of
    from bertjax.training.workdir import is_converted

    if args.config:
        config = complete(parse_run_config(args), checkpoint)
        return config if getattr(config.data, "labels", "") else with_labels_of(config, checkpoint)
    if is_converted(workdir_of(checkpoint)):
        raise UsageError(f"the converted checkpoint {args.checkpoint} lacks task settings; {fix}")
    return checkpoint_config(checkpoint, args.overrides)


@contextlib.contextmanager
def open_checkpoint(args: argparse.Namespace) -> Iterator[Any]:
    """Yields the path of `--checkpoint`, converted to bertjax's format if necessary."""
    from bertjax.convert.convert import bertjax_checkpoint
    from bertjax.training.checkpoint import find_checkpoint

    with bertjax_checkpoint(args.checkpoint) as path:
        yield find_checkpoint(path)


@contextlib.contextmanager
def open_init_checkpoint(
    args: argparse.Namespace, keep_converted: bool = False, marker: str = ""
) -> Iterator[str | None]:
    """Yields the path of `--init_from`, converted to bertjax's format if necessary, or None if the option is not set.

    If `keep_converted` is True and the workdir is local, a converted checkpoint is stored in the workdir instead of a
    temporary folder. Set `keep_converted` only for runs of one process, because several processes must not write to
    the same folder. `marker` is the file or folder that identifies a workdir of the command (default: config.json).
    """
    from bertjax.convert.convert import bertjax_checkpoint
    from bertjax.training.checkpoint import resolve_checkpoint_path
    from bertjax.training.workdir import CONFIG, CONVERTED, check_unrelated_files, pinned_address

    if not args.init_from:
        yield None
        return
    workdir, source, folder = getattr(args, "workdir", ""), args.init_from, None
    if keep_converted:
        check_unrelated_files(resolve_checkpoint_path(workdir), marker or CONFIG)
    if workdir:
        source = pinned_address(source, workdir)
    if keep_converted and "://" not in workdir:
        folder = Path(workdir).expanduser().absolute() / CONVERTED
    is_new = folder is not None and not folder.parent.exists()
    with bertjax_checkpoint(source, folder) as path:
        try:
            yield path
        except UsageError:
            # Remove a new workdir that contains only the converted checkpoint, because the run has not started.
            if folder and is_new and folder.exists() and os.listdir(folder.parent) == [folder.name]:
                shutil.rmtree(folder.parent, ignore_errors=True)
            raise


def check_topology(args: argparse.Namespace) -> None:
    """Raises a UsageError if one of the options of `add_topology` is out of range."""
    from bertjax.estimate.topology import chip_of

    chip_of(args.topology)
    if not 0 < args.mfu <= 1:
        raise UsageError(f"--mfu is {args.mfu}; it must be in (0, 1]")
    if args.price_per_chip_hour is not None and not 0 <= args.price_per_chip_hour < math.inf:
        raise UsageError(f"--price_per_chip_hour is {args.price_per_chip_hour}; it must be at least 0")


def join_cluster(args: argparse.Namespace, config: Any) -> bool:
    """Connects the processes if the run is distributed; otherwise, checks the devices.

    Returns whether the run is distributed.
    """
    from bertjax.training.multihost import initialize_distributed, is_multihost_environment
    from bertjax.training.sharding import list_devices

    distributed = args.distributed or is_multihost_environment()
    if distributed:
        initialize_distributed(config)
    else:
        # Check the devices before the run creates files.
        list_devices()
    return distributed


def print_result(result: dict[str, Any]) -> None:
    """Prints the result of a run as JSON. Exits with code 42 if the run was stopped before its end."""
    print(json.dumps(result))
    if result["stopped"]:
        raise SystemExit(STOPPED)
