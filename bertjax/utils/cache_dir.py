"""A folder for what is made once a machine: copies of corpora from storage, features of frozen encoders."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bertjax.errors import BertjaxError
from bertjax.utils.io import is_ours
from bertjax.utils.temporary import shared_place

# Names the folder; one that all processes of a machine see, and no other machine.
STAGING = "BERTJAX_STAGING"
_LOOK_SECONDS = 0.5


def machine_folder() -> Path:
    """The folder, which is made where it is not there.

    Raises:
      BertjaxError: it cannot be made, or is of somebody else.
    """
    given = os.environ.get(STAGING)
    folder = Path(os.path.abspath(os.path.expanduser(given))) if given else shared_place() / f"bertjax-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BertjaxError(f"cannot make {folder} ({error.strerror}); name another folder in {STAGING}") from error
    # Where anybody may make folders, this one's name can be guessed.
    if not given and not is_ours(os.lstat(folder)):
        raise BertjaxError(f"{folder} is of another user; name a folder in {STAGING}")
    return folder


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in the block; a killed one is not."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Not in one call that waits: a request to end would be heard after it alone.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(file)
