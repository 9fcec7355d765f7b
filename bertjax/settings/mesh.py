"""How the devices are arranged."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes all that are left.

    Attributes:
      data: a batch is spread over them, and each has all parameters.
      fsdp: a batch is spread over them, and so are the parameters, along the hidden size.
      tensor: parameters are spread over them, along heads, feed-forward width and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
