"""Functions shared by several commands: loading configs and checkpoints, joining a cluster, printing results."""

import argparse
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertjax.errors import STOPPED, UsageError
from bertjax.utils.hub import is_hub

logger = logging.getLogger(__name__)


def parse_run_config(args: argparse.Namespace) -> Any:
    """Returns the config of `--config` with overrides applied. Fields that a checkpoint determines may be unset."""
    from bertjax.config.load import load_config
    from bertjax.tasks.build import parse_config

    return parse_config(load_config(args.config, args.overrides))


@contextlib.contextmanager
def open_config(args: argparse.Namespace) -> Iterator[Any]:
    """Yields the run config saved with `--checkpoint`, or the config that `--config` and `--init_from` define.

    Use the config only inside the `with` block, because its vocabulary may be in a temporary folder.
    """
    from bertjax.convert.convert import BERTJAX, detect_format
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import fill_unset_fields

    checkpoint = getattr(args, "checkpoint", None)
    if checkpoint and (args.config or args.init_from):
        raise UsageError("--checkpoint already defines the run; omit it, or omit --config and --init_from")
    if checkpoint:
        # Reject a checkpoint in another format before converting it, because it has no run config.
        if is_hub(checkpoint) or detect_format(checkpoint) != BERTJAX:
            raise UsageError(f"{checkpoint} has no run config; use --config and --init_from instead of --checkpoint")
        yield config_for_checkpoint(args, find_checkpoint(checkpoint))
        return
    if not args.config:
        raise UsageError("no config; set --config, such as pretrain:size=base, or --checkpoint, such as runs/base")
    config = parse_run_config(args)
    with open_init_checkpoint(args) as init_from:
        yield fill_unset_fields(config, init_from)


def config_for_checkpoint(args: argparse.Namespace, checkpoint: Any) -> Any:
    """Returns the config of `--config` or, without this option, the config saved with the checkpoint."""
    from bertjax.training.checkpoint import workdir_of
    from bertjax.training.checkpoint_config import checkpoint_config
    from bertjax.training.workdir import is_converted

    if not args.config and is_converted(workdir_of(checkpoint)):
        fix = "set --config to the experiment of its task, such as text, ner or squad"
        raise UsageError(f"the converted checkpoint {args.checkpoint} lacks task settings; {fix}")
    return checkpoint_config(checkpoint, args.overrides, args.config or "")


@contextlib.contextmanager
def open_checkpoint(args: argparse.Namespace) -> Iterator[Any]:
    """Yields the path of `--checkpoint`, converted to bertjax's format if necessary."""
    from bertjax.convert.convert import bertjax_checkpoint
    from bertjax.training.checkpoint import find_checkpoint

    with bertjax_checkpoint(args.checkpoint) as path:
        yield find_checkpoint(path)


@contextlib.contextmanager
def open_init_checkpoint(args: argparse.Namespace, keep_converted: bool = False, marker: str = "") -> Iterator[Any]:
    """Yields the checkpoint of `--init_from`, converted to bertjax's format if necessary.

    Yields None if the option is not set, or if the checkpoint is missing but the workdir can resume without it.
    `keep_converted` stores the converted checkpoint in a local workdir. Set it only in runs of one process. `marker` is
    the file or folder that identifies the command's workdirs (default: config.json).
    """
    from bertjax.convert.convert import bertjax_checkpoint
    from bertjax.training.checkpoint import find_checkpoint, resolve_checkpoint_path
    from bertjax.training.workdir import CONFIG, CONVERTED, check_unrelated_files, has_checkpoints, pinned_address

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
    is_missing = "://" not in source and not is_hub(source) and not os.path.exists(os.path.expanduser(source))
    has_copy = folder is not None and folder.exists()
    if is_missing and not has_copy and workdir and has_checkpoints(resolve_checkpoint_path(workdir)):
        logger.info(f"{source} does not exist, but resuming {workdir} does not need it")
        yield None
        return
    with bertjax_checkpoint(source, folder) as path:
        try:
            yield find_checkpoint(path)
        except UsageError:
            # Remove a new workdir that contains only the converted checkpoint, because the run has not started.
            if folder and is_new and folder.exists() and os.listdir(folder.parent) == [folder.name]:
                shutil.rmtree(folder.parent, ignore_errors=True)
            raise


def join_cluster(args: argparse.Namespace, config: Any) -> bool:
    """Connects the processes if the run is distributed, else checks the devices. Returns whether it is distributed."""
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
