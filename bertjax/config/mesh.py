"""Configs of the device mesh and of the processes of a distributed run."""

import dataclasses

from bertjax.config.fields import at_least
from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis of the mesh.

    Attributes:
      data: devices of data parallelism, which replicate the parameters (default: -1, all remaining devices).
      fsdp: devices of data parallelism that also shard parameters along the hidden size (default: 1).
      tensor: devices of tensor parallelism, which shards heads, feed-forward width and vocabulary (default: 1).
      slices: TPU slices connected by the data-center network; only the `data` axis spans slices (default: -1, all).
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    slices: int = -1

    def __post_init__(self) -> None:
        sizes = [self.data, self.fsdp, self.tensor]
        if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in (*sizes, self.slices)):
            raise UsageError(
                f"invalid mesh.data={self.data}, mesh.fsdp={self.fsdp}, mesh.tensor={self.tensor}, "
                f"mesh.slices={self.slices}; sizes must be positive or -1 (inferred), and only one of data, fsdp and "
                "tensor may be -1"
            )


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Settings of distributed runs. They have no effect on a single process.

    Attributes:
      coordinator_port: port of process 0 (default: 0, chosen automatically: 8476 on TPUs, which Google Cloud's default
        firewall rules allow; on Slurm derived from the job ID).
      initialization_timeout_seconds: seconds to wait until all processes have connected (default: 1800; the hosts of a
        large pod start minutes apart).
      heartbeat_timeout_seconds: seconds without a heartbeat after which a process counts as lost (default: 100).
    """

    coordinator_port: int = 0
    initialization_timeout_seconds: int = 1800
    heartbeat_timeout_seconds: int = 100

    def __post_init__(self) -> None:
        minimums = {"coordinator_port": 0, "initialization_timeout_seconds": 1, "heartbeat_timeout_seconds": 10}
        at_least(self, "config.cluster", **minimums)
