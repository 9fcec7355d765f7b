"""Metadata of checkpoints (kind of model, architecture), and fingerprints of their arrays, which detect damage."""

import dataclasses
import errno
import hashlib
import json
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bertjax.errors import BertjaxError, UnavailableError, first_line
from bertjax.model.config import Architecture
from bertjax.model.models import model_description
from bertjax.training.multihost import is_collective_error
from bertjax.utils.io import read_json_object

# Memory, storage and network errors, which do not mean that the files of a checkpoint are damaged.
_UNAVAILABLE = re.compile(
    "RESOURCE_EXHAUSTED|Out of memory|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED"
)
_UNAVAILABLE_ERRNO = frozenset(
    (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ECONNRESET)
)
# Number of independent 32-bit sums of a fingerprint, each with its own seed.
_NUM_SUMS = 2
# Arrays of up to this many bytes are hashed with NumPy, which needs no compilation.
_SMALL_BYTES = 1 << 20
# Larger NumPy arrays are hashed in slices of this many bytes, to save memory.
_SLICE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, stored as JSON next to the arrays."""

    step: int  # training step (0: converted checkpoint)
    model: dict[str, Any]  # description of the model, as `bertjax.model.models.model_description` returns it
    architecture: dict[str, Any]  # fields of `Architecture`
    fingerprints: dict[str, str]  # fingerprint of each Orbax item, `params` and `training`, keyed by item name
    # Dtype and shape of each array of the train state, keyed by name (default: {}, for converted checkpoints).
    arrays: dict[str, str] = dataclasses.field(default_factory=dict)
    score: float | None = None  # evaluation score, higher is better (default: None, no score)
    # Hash of the lines of `metrics.jsonl` when the checkpoint was saved (default: "", unknown).
    metrics_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and their checksum, `sha256`."""
        fields = dataclasses.asdict(self)
        return {**fields, "sha256": _checksum(fields)}

    def check_fingerprint(self, name: str, tree: Any) -> None:
        """Raises a BertjaxError if the fingerprint of the restored item `name` differs from the saved one."""
        if (computed := fingerprint(tree)) != self.fingerprints[name]:
            raise BertjaxError(f"fingerprint of {name} is {computed}, but was {self.fingerprints[name]} when saved")


def model_metadata(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the fields `model` and `architecture` of `CheckpointMetadata` for a Flax module."""
    return {"model": model_description(model), "architecture": dataclasses.asdict(model.config.architecture)}


def read_metadata(checkpoint: epath.Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint. Missing fields of the architecture get their defaults.

    Raises a BertjaxError if the metadata is missing or damaged.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        fields = read_json_object(file)
        if fields.pop("sha256", None) not in (None, _checksum(fields)):  # Earlier versions wrote no checksum.
            raise ValueError("wrong checksum")
        fields["architecture"] = {**dataclasses.asdict(Architecture()), **fields["architecture"]}
        _ = fields["fingerprints"]["params"], fields["model"]["kind"]  # required
        return CheckpointMetadata(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_unless_damage(error, checkpoint)
        message = f"checkpoint {checkpoint} has damaged metadata: {first_line(error)}"
        raise BertjaxError(f"{message}; use another checkpoint") from error


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def saved_architecture(checkpoint: epath.Path) -> Architecture:
    """Reads the architecture of a checkpoint."""
    try:
        return Architecture(**read_metadata(checkpoint).architecture)
    except TypeError as error:
        message = f"unknown architecture of checkpoint {checkpoint}: {first_line(error)}"
        raise BertjaxError(f"{message}; use the version that wrote it") from error


def raise_unless_damage(error: Exception, checkpoint: epath.Path) -> None:
    """Raises if `error`, which occurred while reading a checkpoint, has a cause other than damaged files.

    Such causes are the death of another process of the run, and unavailable memory, storage or network. The run may
    also have replaced the checkpoint by a newer one in the meantime.
    """
    if is_collective_error(error) or isinstance(error, UnavailableError):
        raise error
    if not checkpoint.exists():
        message = f"checkpoint {checkpoint} was removed while it was read"
        raise UnavailableError(f"{message}; run the same command again to use a newer one") from error
    cause: BaseException | None = error
    while cause is not None:
        is_errno = isinstance(cause, OSError) and cause.errno in _UNAVAILABLE_ERRNO
        if is_errno or isinstance(cause, MemoryError) or _UNAVAILABLE.search(str(cause)):
            message = f"checkpoint {checkpoint} cannot be read ({first_line(cause)}), but is not damaged"
            raise UnavailableError(f"{message}; fix the cause, then run the same command again") from error
        cause = cause.__cause__ or cause.__context__


def fingerprint(tree: Any) -> str:
    """Returns a hash of arrays: 16 hexadecimal digits that change with any bit, name, shape or dtype.

    The hash is equal for NumPy arrays, arrays on one device and arrays on any mesh. The bits of each element are mixed
    with the element's index, and the results are summed, so the order of computation does not matter. The mixing is
    nonlinear, so that changes such as two swapped elements do not cancel. Elements must have 4 bytes.
    """
    total = np.zeros(_NUM_SUMS, np.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"{jax.tree_util.keystr(path)} {tuple(leaf.shape)} {leaf.dtype.name}"
        digest = hashlib.blake2b(name.encode(), digest_size=4 * _NUM_SUMS).digest()
        seeds = np.frombuffer(digest, "<u4").astype(np.uint32)
        if leaf.nbytes <= _SMALL_BYTES and getattr(leaf, "is_fully_addressable", True):
            bits = np.ascontiguousarray(leaf).reshape(-1).view(np.uint32)
            index = np.arange(bits.size, dtype=np.uint32)
            total += np.array([np.sum(_mix(bits ^ _mix(index ^ seed)), dtype=np.uint32) for seed in seeds])
        elif isinstance(leaf, np.ndarray):
            rows = max(1, _SLICE_BYTES * len(leaf) // leaf.nbytes)
            for row in range(0, len(leaf), rows):
                first = np.uint32(row * (leaf.size // len(leaf)) % 2**32)
                total += jax.device_get(_device_sum(leaf[row : row + rows], seeds, first))
        else:
            # Fetch each sum before the next one starts, because concurrent all-reduces on one CPU can deadlock.
            total += jax.device_get(_device_sum(leaf, seeds, np.uint32(0)))
    return "".join(f"{int(value):08x}" for value in total)


# Jit per array instead of per tree, so that arrays of the same shape share one compilation.
@jax.jit
def _device_sum(x: jax.Array, seeds: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the hash sums of `x`, uint32 [`_NUM_SUMS`]. `first` is the flat index of `x[0]` in the entire array."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    index = jnp.full_like(bits, first)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.stack([jnp.sum(_mix(bits ^ _mix(index ^ seed)), dtype=jnp.uint32) for seed in seeds])


def _mix(x: Any) -> Any:
    """Applies the finalizer of MurmurHash3 (32 bits), a permutation in which each input bit affects all output bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
