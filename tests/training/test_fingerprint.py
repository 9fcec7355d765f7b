"""Fingerprints of arrays: sensitive to every change, and independent of devices and sharding."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.training import checkpoint_metadata as module
from bertjax.training.checkpoint_metadata import fingerprint

# Checkpoints store fingerprints, so they must not change.
EXPECTED = "75a9942a47f5266f"


def make_tree() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"matrix": rng.standard_normal((8, 6), np.float32), "stack": rng.standard_normal((3, 2, 4), np.float32)}


@pytest.fixture(params=[0, module._SMALL_BYTES], ids=["on devices", "in NumPy"])
def each_implementation(request, monkeypatch):
    """Runs a test twice: with fingerprints computed on devices, and in NumPy."""
    monkeypatch.setattr(module, "_SMALL_BYTES", request.param)


@pytest.mark.parametrize(
    "change",
    [
        lambda matrix: np.where(np.arange(8)[:, None] == 3, -matrix, matrix),
        lambda matrix: -matrix,
        lambda matrix: np.nextafter(matrix, np.inf, where=np.arange(6) == 5, out=matrix.copy()),
        lambda matrix: matrix[:, [1, 0, 2, 3, 4, 5]],
        lambda matrix: matrix[::-1],
        lambda matrix: (matrix.view(np.uint32) + np.array([1, 2**32 - 1, 0, 0, 0, 0], np.uint32)).view(np.float32),
    ],
    ids=["signs of a row", "all signs", "last bits", "columns", "rows", "increment and decrement"],
)
@pytest.mark.usefixtures("each_implementation")
def test_changes_that_could_cancel_out_change_the_fingerprint(change):
    tree = make_tree()
    changed = {**tree, "matrix": np.ascontiguousarray(change(tree["matrix"]))}
    for put in (jax.device_put, lambda tree: tree):
        assert fingerprint(put(tree)) == EXPECTED != fingerprint(put(changed))


@pytest.mark.usefixtures("each_implementation")
def test_every_pair_of_flipped_signs_changes_the_fingerprint():
    matrix = make_tree()["matrix"][:4, :4].copy()
    fingerprints = {fingerprint({"matrix": matrix})}
    for first in range(16):
        for second in range(first):
            flipped = matrix.copy()
            flipped.reshape(-1)[[first, second]] *= -1
            fingerprints.add(fingerprint({"matrix": flipped}))
    assert len(fingerprints) == 1 + 16 * 15 // 2


@pytest.mark.usefixtures("each_implementation")
def test_fingerprint_depends_on_names_and_shapes():
    tree = make_tree()
    swapped = {"matrix": tree["stack"], "stack": tree["matrix"]}
    reshaped = {**tree, "matrix": tree["matrix"].reshape(6, 8)}
    assert len({fingerprint(variant) for variant in (tree, swapped, reshaped)}) == 3


@pytest.mark.devices
@pytest.mark.parametrize("spec", [(), ("x",), (None, "y"), ("x", "y")])
def test_fingerprint_depends_on_neither_mesh_nor_slice_size(spec, monkeypatch):
    tree = {"matrix": make_tree()["matrix"]}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharded = jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    expected = fingerprint(tree)
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    assert fingerprint(sharded) == expected
    monkeypatch.setattr(module, "_SLICE_BYTES", 3 * 6 * 4)
    assert fingerprint(sharded) == fingerprint(tree) == expected
