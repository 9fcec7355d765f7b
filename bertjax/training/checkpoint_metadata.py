"""Checkpoint metadata (kind of model, architecture, fingerprints), and detection of damaged checkpoints."""

import dataclasses
import errno
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from etils import epath

from bertjax.errors import BertjaxError, first_line
from bertjax.model.config import Architecture
from bertjax.model.heads import model_kind
from bertjax.training.multihost import is_collective_error
from bertjax.utils.io import read_json_object

# Errors of memory, storage or network. They do not mean that the files of a checkpoint are damaged.
_UNAVAILABLE = re.compile(
    "RESOURCE_EXHAUSTED|Out of memory|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED"
)
_UNAVAILABLE_ERRNO = {
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EACCES,
    errno.EPERM,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
}


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, stored as JSON next to the arrays.

    Attributes:
      step: training step (0: converted checkpoint).
      model: kind of model, as `bertjax.model.heads.model_kind` returns it.
      architecture: fields of `Architecture`.
      fingerprints: hash of the arrays of each item, `params` and `training`.
      arrays: dtype and shape of each array of the train state, by name (default: {}, for converted checkpoints).
      score: evaluation score, higher is better (default: None, no score).
      metric_lines: number of lines in `metrics.jsonl` before the checkpoint (default: None, unknown).
    """

    step: int
    model: dict[str, Any]
    architecture: dict[str, Any]
    fingerprints: dict[str, str]
    arrays: dict[str, str] = dataclasses.field(default_factory=dict)
    score: float | None = None
    metric_lines: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the metadata as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "CheckpointMetadata":
        """Parses the JSON object that `as_json` returns. Missing fields of the architecture get their defaults."""
        try:
            architecture = {**dataclasses.asdict(Architecture()), **content["architecture"]}
            metadata = cls(**{**content, "architecture": architecture})
            if not isinstance(metadata.fingerprints["params"], str) or not isinstance(metadata.model["kind"], str):
                raise TypeError("wrong type of fingerprints or model")
            return metadata
        except (KeyError, TypeError) as error:
            raise BertjaxError(
                f"unknown format of checkpoint metadata: {first_line(error)}; use a checkpoint of this version"
            ) from error


def model_metadata(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the metadata fields `model` and `architecture` for a model."""
    return {"model": model_kind(model), "architecture": dataclasses.asdict(model.config.architecture)}


def array_shapes(tree: Any) -> dict[str, str]:
    """Returns dtype and shape of each array of a tree by name, such as `float32[2, 3]`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype.name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def read_metadata(checkpoint: epath.Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint directory.

    Raises:
      BertjaxError: the metadata is missing or damaged.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        return CheckpointMetadata.from_json(read_json_object(file))
    except (OSError, ValueError, BertjaxError) as error:
        raise BertjaxError(
            f"checkpoint {checkpoint} is damaged: {file} ({first_line(error)}); use another checkpoint"
        ) from error


def saved_architecture(checkpoint: epath.Path) -> Architecture:
    """Reads the architecture of a checkpoint."""
    fields = read_metadata(checkpoint).architecture
    try:
        return Architecture(**fields)
    except TypeError as error:
        raise BertjaxError(
            f"unknown architecture of checkpoint {checkpoint}: {first_line(error)}; use a checkpoint of this version"
        ) from error


def raise_unless_damage(error: Exception, checkpoint: epath.Path) -> None:
    """Raises if an error while reading a checkpoint has a cause other than damaged files.

    Raises:
      BertjaxError: memory, storage or network is unavailable.
      Exception: `error` itself, if another process of the run has died.
    """
    if is_collective_error(error):
        raise error
    cause: BaseException | None = error
    while cause is not None:
        is_errno = isinstance(cause, OSError) and cause.errno in _UNAVAILABLE_ERRNO
        if is_errno or isinstance(cause, MemoryError) or _UNAVAILABLE.search(str(cause)):
            raise BertjaxError(
                f"checkpoint {checkpoint} cannot be read ({first_line(cause)}), but is not damaged; fix the cause, "
                "then run the same command again"
            ) from error
        cause = cause.__cause__ or cause.__context__


def check_fingerprint(name: str, computed: str, metadata: CheckpointMetadata) -> None:
    """Raises a BertjaxError if the fingerprint of the restored item `name` differs from the saved one."""
    saved = metadata.fingerprints[name]
    if computed != saved:
        raise BertjaxError(f"fingerprint of {name} is {computed}, but was {saved} when saved")
