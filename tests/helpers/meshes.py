"""Abstract meshes of platforms that the test machine does not have."""

import jax


def one_device(platform: str, kind: str = "") -> jax.sharding.AbstractMesh:
    """Returns an abstract mesh with one device of a platform."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
