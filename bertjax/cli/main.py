"""The command line: runs a command, and makes one line and an exit code of what goes wrong."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from bertjax.cli.arguments import parser
from bertjax.errors import INTERRUPTED, BertjaxError, UsageError, first_line, shortened
from bertjax.utils import process
from bertjax.utils.logging import configure as configure_logging
from bertjax.utils.storage import check_answer, is_address, is_of_storage, unusable
from bertjax.utils.terminal import show

# Of an error; what is listed in one is bounded where it is made.
_MOST_CHARACTERS = 2000
# Arguments that are text, whatever is in it.
_TEXTS = ("context", "texts")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with a code of `errors`; 0 is done. Tracebacks are shown with --debug.

    Args:
      argv: None is those of the process, which then does nothing else.
    """
    if argv is None:
        process.run(lambda: _run(sys.argv[1:]), debug="--debug" in sys.argv[1:])
        return
    try:
        _run(list(argv))
    except KeyboardInterrupt:
        _die("interrupted", INTERRUPTED)


def _run(arguments: list[str]) -> None:
    debug = "--debug" in arguments
    # Before TensorFlow is imported anywhere: it has nothing to say to a user of bertjax.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # TensorFlow imports Keras, which takes a third of its time and is not used here; the older one, which it looks for
    # with this, is not installed.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Orbax warns there of what is as it should be.
    logging.getLogger("absl").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows its code instead.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    configure_logging()
    addresses: list[str] = []
    try:
        args, overrides = parser().parse_known_args([item for item in arguments if item != "--debug"])
        unknown = [item for item in overrides if not hasattr(args, "config") or _is_flag(item)]
        if unknown:
            command = " ".join(filter(None, [args.command, getattr(args, "what", None)]))
            raise UsageError(f"unknown argument {unknown[0]}; see `bertjax {command} --help`")
        args.overrides = overrides
        given = (value for name, value in vars(args).items() if name not in _TEXTS)
        addresses = [
            one for value in given for one in (value if isinstance(value, list) else [value]) if is_address(one)
        ]
        for address in addresses:
            check_answer(address)
        args.run(args)
        # While a reader that is gone can still be told apart from success.
        sys.stdout.flush()
    except BertjaxError as error:
        if debug:
            raise
        _die(str(error), error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        _die(f"{error.filename or 'reading or writing'}: {error.strerror or error}", 1)
    except MemoryError as error:
        _die(f"not enough memory: {error}", 1)
    except Exception as error:
        if debug:
            raise
        if addresses and is_of_storage(error):
            _die(str(unusable(" or ".join(addresses), error)), 1)
        text = str(error).strip()
        detail = f": {first_line(error)}" if text else ""
        _die(f"{type(error).__name__}{detail} (unexpected; run again with --debug for the traceback)", 1)


def _is_flag(item: str) -> bool:
    """Whether an argument that no command knows is a flag, and not an override of a config or the value of one."""
    return re.match("--?[A-Za-z]", item) is not None and not item.startswith("--config.")


def _die(message: str, code: int) -> NoReturn:
    show(f"bertjax: {shortened(message, _MOST_CHARACTERS)}", sys.stderr)
    sys.exit(code)
