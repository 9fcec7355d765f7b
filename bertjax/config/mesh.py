"""How the devices are arranged."""

import dataclasses

from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes all that are left.

    Attributes:
      data: devices that a batch is spread over, and each of which has all parameters; -1 is all that are left.
      fsdp: devices that a batch is spread over, and the parameters too, along the hidden size.
      tensor: devices that parameters are spread over, along heads, feed-forward width and vocabulary.
      slices: TPU slices, which a slower network connects; `data` is spread over them, the other axes lie within each.
        -1 is as many as there are.

    Raises:
      UsageError: a size is none.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    slices: int = -1

    def __post_init__(self) -> None:
        sizes = [self.data, self.fsdp, self.tensor]
        if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in (*sizes, self.slices)):
            shown = (
                f"mesh.data={self.data}, mesh.fsdp={self.fsdp}, mesh.tensor={self.tensor}, mesh.slices={self.slices}"
            )
            raise UsageError(
                f"{shown}: each must be at least 1, or -1 for all that are left; of the first three only one may be -1"
            )
