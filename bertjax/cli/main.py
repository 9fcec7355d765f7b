"""Entry point of the command line: parses arguments, runs a command and maps exceptions to exit codes."""

import argparse
import faulthandler
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from bertjax.cli import bench, convert, doctor, features, inspect, predict, prepare, reproduce, train
from bertjax.cli.parser import Parser
from bertjax.errors import INTERRUPTED, BertjaxError, UsageError, first_line, shortened
from bertjax.utils.devices import skip_missing_tpu, use_huge_pages
from bertjax.utils.terminal import configure_logging, exit_at_once, show

logger = logging.getLogger(__name__)
# Commands by name, in the order of the help.
COMMANDS = {
    **{"prepare": prepare.prepare, "inspect": inspect.inspect, "describe": inspect.describe},
    **{"train": train.train, "sweep": train.sweep, "reproduce": reproduce.reproduce, "table": reproduce.table},
    **{"evaluate": predict.evaluate, "predict": predict.predict, "ensemble": predict.ensemble},
    **{"submission": predict.submission, "fill_mask": features.fill_mask, "features": features.features},
    **{"encode": features.encode, "mine": features.mine, "convert": convert.convert, "export": convert.export},
    **{"plan": inspect.plan, "bench step": bench.bench_step, "bench input": bench.bench_input, "doctor": doctor.doctor},
}
_MAX_MESSAGE_CHARACTERS = 2000
_NO_SPACE = "No space left on device"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of `argv` (default: the arguments of this process); see `bertjax.errors` for the exit codes.

    An unexpected exception is not caught: Python prints its traceback and exits with code 1.
    """
    if argv is None:
        use_huge_pages()
        faulthandler.enable()
        # Do not print tracebacks of the reads that Orbax abandons after another read failed.
        sys.unraisablehook = _log_unraisable
        # SIGTERM unwinds the stack like Ctrl-C, so that temporary files are removed. Training replaces this handler.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED, at_once=argv is None)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has exited. Redirect stdout, so that the final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # If all hosts raise the same error, exit normally, because JAX's barrier at exit waits for every host.
        at_once = argv is None and not getattr(error, "on_all_hosts", False)
        message, code = str(error), getattr(error, "exit_code", 1)
        if isinstance(error.__cause__, KeyboardInterrupt):  # JAX's C++ code turns an interrupt into a ValueError.
            message, code = "interrupted", INTERRUPTED
        # Match TensorFlow's exceptions (from `gs://` access) by module name, because importing TensorFlow is slow.
        elif type(error).__module__ == "tensorflow.python.framework.errors_impl":
            message = f"{first_line(error)}; check the path and the network, then run the same command again"
        # Some libraries do not raise an OSError if the disk is full.
        elif isinstance(error, OSError) or (not isinstance(error, BertjaxError) and _NO_SPACE in str(error)):
            message = f"{getattr(error, 'filename', None) or 'input or output error'}: {first_line(error)}"
        elif not isinstance(error, BertjaxError):
            raise
        logger.debug("traceback of the error:", exc_info=error)
        _fail(message, code, at_once)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands."""
    parser = Parser(
        prog="bertjax",
        description="Pre-training and fine-tuning of BERT and newer encoders in JAX and Flax, on CPU, GPU and TPU.",
        epilog="`bertjax COMMAND --help` shows the options of a command and an example.",
        allow_abbrev=False,
    )
    version = f"bertjax {doctor.installed_version('bertjax')}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    groups = {"": commands}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            bench = commands.add_parser(group, help="Times the train step or the input pipeline.", allow_abbrev=False)
            groups[group] = bench.add_subparsers(dest="what", metavar="step|input", required=True)
        command.add_parser(groups[group], word)
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parses arguments. The attribute `overrides` of the result contains the overrides of config fields."""
    # Join `--config.FIELD VALUE` to `--config.FIELD=VALUE`. Other functions search for this form, and argparse would
    # parse a separate VALUE as an input text of `predict`.
    items: list[str] = []
    for item in argv:
        previous = items[-1] if items else ""
        if previous.startswith("--config.") and "=" not in previous and not re.match("--?[A-Za-z]", item):
            items[-1] += f"={item}"
        else:
            items.append(item)
    args, overrides = build_parser().parse_known_args(items)
    for item in overrides:
        if not hasattr(args, "overrides") or not item.startswith("--config."):
            is_value = hasattr(args, "overrides") and not item.startswith("-")
            fix = "set config fields with --config.FIELD=VALUE, or " if is_value else ""
            raise UsageError(f"unknown argument {item}; {fix}see `{args.prog} --help`")
    args.overrides = overrides
    return args


def _run(argv: list[str]) -> None:
    # TensorFlow, which bertjax uses only to read data, reads these variables on import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # This variable skips the import of Keras, which takes a third of TensorFlow's import time.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal cannot encode.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = parse_args(argv)
    configure_logging(args.log_level)
    if args.log_level != "debug":
        # Orbax logs warnings in normal operation. After an error, it logs tracebacks of the raised exception and of
        # unfinished reads. Hide all of these lines.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Block signals, because an interrupt during the import of JAX's native modules may be lost or crash the process.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    skip_missing_tpu()  # imports JAX
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    args.run(args)
    # Flush, so that a BrokenPipeError is raised here instead of at interpreter exit.
    sys.stdout.flush()


def _log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    logger.debug("exception ignored in %r", unraisable.object, exc_info=unraisable.exc_value)


def _fail(message: str, exit_code: int, at_once: bool) -> NoReturn:
    show(f"bertjax: {shortened(message, _MAX_MESSAGE_CHARACTERS)}", sys.stderr)
    if at_once:  # Do not wait for Orbax's threads, which run for 20 minutes after a failed save.
        exit_at_once(exit_code)
    sys.exit(exit_code)
