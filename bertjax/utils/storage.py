"""Storage by address, such as `gs://bucket/run`: found out at the start whether it answers."""

import os
import re
import threading
from typing import Any

from bertjax.errors import BertjaxError, UsageError, first_line, shortened

_WAIT_SECONDS = 60
_ADDRESS = re.compile(r"(\w+)://\S+")
_KNOWN = ("gs", "s3")


def is_address(given: object) -> bool:
    """Whether an argument of a command is an address, and not a text that has one in it."""
    return isinstance(given, str) and _ADDRESS.fullmatch(given) is not None


def check_answer(address: str) -> None:
    """Asks storage for a file; its libraries would try again for ten minutes.

    Raises:
      UsageError: it is of no storage that is known here.
      BertjaxError: it does not answer in a minute, or refuses.
    """
    from etils import epath

    if (scheme := address.partition("://")[0]) not in _KNOWN:
        raise UsageError(f"{shortened(address)} is no address of storage; {scheme}:// is none of gs:// and s3://")
    failures: list[Exception] = []
    missing: list[bool] = []

    def ask() -> None:
        try:
            place = epath.Path(address)
            # TensorFlow would look for ever for a parent that a folder of no bucket can be made in.
            missing.append(not place.exists() and not _bucket_of(place).exists())
        except Exception as error:  # Each kind of storage has exceptions of its own.
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_SECONDS)
    if asking.is_alive():
        raise unusable(address, TimeoutError(f"no answer in {_WAIT_SECONDS} seconds"))
    if failures:
        raise unusable(address, failures[0])
    if any(missing):
        raise BertjaxError(f"cannot use {shortened(address)}: there is no such bucket; check its name, or create it")


def _bucket_of(place: Any) -> Any:
    return type(place)("/".join(os.fspath(place).split("/")[:3]))


def is_of_storage(error: Exception) -> bool:
    """Whether an exception is one that TensorFlow's file systems raise, among others of TensorFlow."""
    return type(error).__module__.startswith("tensorflow.python.framework.errors")


def unusable(address: str, error: Exception) -> BertjaxError:
    return BertjaxError(
        f"cannot use {shortened(address)} ({first_line(error)}); check its name, the network and your credentials"
    )
