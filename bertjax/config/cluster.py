"""How the processes of a run find each other, and notice that one is gone."""

import dataclasses

from bertjax.config.fields import at_least


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """What only runs of several processes heed.

    Attributes:
      coordinator_port: of process 0, which the others call; 0 is 8476 on TPUs, which the automatic firewall rule of
        Google Cloud lets through, and on Slurm one that JAX takes from the job's number.
      initialization_timeout_seconds: for all processes to be there; machines of a large pod start minutes apart.
      heartbeat_timeout_seconds: without a word from a process, after which it counts as gone.

    Raises:
      UsageError: a value is out of its range.
    """

    coordinator_port: int = 0
    initialization_timeout_seconds: int = 1800
    heartbeat_timeout_seconds: int = 100

    def __post_init__(self) -> None:
        limits = {"coordinator_port": 0, "initialization_timeout_seconds": 1, "heartbeat_timeout_seconds": 10}
        at_least(self, "config.cluster", **limits)
