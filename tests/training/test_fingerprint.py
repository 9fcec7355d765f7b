"""The fingerprint of arrays: blind to no change, and the same wherever the arrays are."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bertjax.training import fingerprint as module
from bertjax.training.fingerprint import fingerprint, fingerprint_on_host


def made() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"matrix": rng.standard_normal((8, 6), np.float32), "stack": rng.standard_normal((3, 2, 4), np.float32)}


@pytest.fixture(params=[0, module._LITTLE_BYTES], ids=["on devices", "in NumPy"], autouse=True)
def little_bytes(request, monkeypatch):
    """Every test with both ways of adding up an array."""
    monkeypatch.setattr(module, "_LITTLE_BYTES", request.param)


def test_both_ways_come_to_the_same(monkeypatch):
    found = set()
    for most in (0, 1 << 20):
        monkeypatch.setattr(module, "_LITTLE_BYTES", most)
        found |= {fingerprint(jax.device_put(made())), fingerprint_on_host(made())}
    assert len(found) == 1


def flip_signs(matrix):
    matrix[1, 2], matrix[4, 5] = -matrix[1, 2], -matrix[4, 5]


def flip_top_bits_of_a_row(matrix):
    matrix[3] = -matrix[3]


def negate(matrix):
    matrix *= -1


def flip_last_bit(matrix):
    matrix.view(np.uint32)[7, 5] ^= 1


def exchange_columns(matrix):
    matrix[:, [0, 1]] = matrix[:, [1, 0]]


def exchange_rows(matrix):
    matrix[:] = matrix[::-1].copy()


def add_one_and_take_one(matrix):
    matrix.view(np.uint32)[0, 0] += 1
    matrix.view(np.uint32)[0, 1] -= 1


@pytest.mark.parametrize(
    "change",
    [flip_signs, flip_top_bits_of_a_row, negate, flip_last_bit, exchange_columns, exchange_rows, add_one_and_take_one],
)
def test_no_change_cancels_another(change):
    changed = made()
    change(changed["matrix"])
    for of in (fingerprint, fingerprint_on_host):
        assert of(changed) != of(made())


def test_every_pair_of_flipped_signs_is_seen():
    plain = made()["matrix"][:4, :4].copy()
    found = {fingerprint_on_host({"matrix": plain})}
    for first in range(16):
        for second in range(first):
            flipped = plain.copy()
            flipped.reshape(-1)[[first, second]] *= -1
            found.add(fingerprint_on_host({"matrix": flipped}))
    assert len(found) == 1 + 16 * 15 // 2


def test_names_and_shapes_count():
    tree = made()
    swapped = {"matrix": tree["stack"], "stack": tree["matrix"]}
    reshaped = {**tree, "matrix": tree["matrix"].reshape(6, 8)}
    assert len({fingerprint(each) for each in (tree, swapped, reshaped)}) == 3


@pytest.mark.devices
@pytest.mark.parametrize("spec", [(), ("x",), (None, "y"), ("x", "y")])
def test_it_is_the_same_on_any_mesh_and_on_the_host_in_slices(spec, monkeypatch):
    tree = {"matrix": made()["matrix"]}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spread = jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    whole = fingerprint_on_host(tree)
    monkeypatch.setattr(module, "_SLICE_BYTES", 3 * 6 * 4)
    assert fingerprint(spread) == fingerprint(tree) == whole == fingerprint_on_host(tree)
