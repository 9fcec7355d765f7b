"""How the devices are arranged."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes all that are left.

    Attributes:
      data: devices that a batch is spread over, and each of which has all parameters; -1 is all that are left.
      fsdp: devices that a batch is spread over, and the parameters too, along the hidden size.
      tensor: devices that parameters are spread over, along heads, feed-forward width and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
