"""Configs of the device mesh and of the connection between processes."""

import dataclasses

from bertjax.utils.sections import Section, bounded


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, prefix="config.mesh."):
    """Number of devices along each axis of the mesh. Only the `data` axis spans TPU slices.

    Attributes:
      data: number of devices for data parallelism with replicated parameters (default: -1, all remaining devices).
      fsdp: number of devices for data parallelism with parameters sharded along the hidden size (default: 1).
      tensor: number of devices for tensor parallelism along heads, feed-forward width and vocabulary (default: 1).
    """

    data: int = bounded(-1, at_least=-1)
    fsdp: int = bounded(1, at_least=-1)
    tensor: int = bounded(1, at_least=-1)


@dataclasses.dataclass(frozen=True)
class ClusterConfig(Section, prefix="config.cluster."):
    """Settings of distributed runs. They do not affect runs of a single process.

    Attributes:
      coordinator_port: port of process 0 if JAX detects the cluster (default: 0, automatic). On Slurm, the automatic
        port depends on the job ID. Elsewhere, it is 8476, which Google Cloud's default firewall rules allow.
      initialization_timeout_seconds: maximum seconds until all processes have connected (default: 1800, because the
        hosts of a large pod start minutes apart).
      heartbeat_timeout_seconds: seconds without a heartbeat after which a process counts as lost (default: 100).
    """

    coordinator_port: int = bounded(0, at_least=0)
    initialization_timeout_seconds: int = bounded(1800, at_least=1)
    heartbeat_timeout_seconds: int = bounded(100, at_least=10)
