"""Released checkpoints, from which tables are fine-tuned without pre-training."""

import dataclasses
import functools
import hashlib

from bertjax.convert.convert import bertjax_checkpoint, local_checkpoint
from bertjax.model.config import Architecture
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.utils import hub
from bertjax.utils.io import cache_dir


@dataclasses.dataclass(frozen=True)
class Released:
    """Released checkpoint in bertjax's format.

    Attributes:
      path: local path of the checkpoint.
      fingerprint: fingerprint of the parameters.
      architecture: architecture of the model.
    """

    path: str
    fingerprint: str
    architecture: Architecture

    @property
    def size(self) -> str:
        """Size for messages, such as `12 layers, hidden size 768`."""
        return f"{self.architecture.num_hidden_layers} layers, hidden size {self.architecture.hidden_size}"


@functools.cache
def load(checkpoint: str) -> Released:
    """Opens a checkpoint of any format, or at an address of the hub. A conversion is kept in the machine's cache."""
    key = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
    with bertjax_checkpoint(checkpoint, cache_dir() / "released" / key) as path:
        found = find_checkpoint(path)
        return Released(path, saved_fingerprint(found), saved_architecture(found))


def with_commits(config: str) -> str:
    """Returns `FILE:ARGUMENTS` with the current commit in each address of the hub, so that runs share one commit."""
    file, colon, arguments = config.partition(":")
    return file + colon + ",".join(map(_with_commit, arguments.split(",")))


def _with_commit(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not hub.is_hub(value):
        return argument
    commit = local_checkpoint(value).rstrip("/").rpartition("/")[2]
    return f"{name}{equals}{hub.PREFIX}{hub.parse(value)[0]}@{commit}"
