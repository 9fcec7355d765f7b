"""The device mesh: positions of devices, and sizes that do not fit."""

import types

import jax
import numpy as np
import pytest

from bertjax.config.mesh import MeshConfig
from bertjax.errors import UsageError
from bertjax.training import sharding
from bertjax.training.sharding import MULTISLICE_OPTIONS, TPU_OPTIONS, compiler_options, make_mesh


def chips(slices: int, size: tuple[int, int]) -> list[types.SimpleNamespace]:
    """Returns stand-ins for the chips of TPU v5e slices, in JAX's order; each slice is a grid of this size."""
    columns, rows = size
    return [
        types.SimpleNamespace(
            platform="tpu", device_kind="TPU v5 lite", coords=(x, y, 0), core_on_chip=0, slice_index=slice_index,
            process_index=0, id=0,
        )
        for slice_index in range(slices)
        for y in range(rows)
        for x in range(columns)
    ]  # fmt: skip


def device_grid(config: MeshConfig, devices: list[types.SimpleNamespace], monkeypatch) -> np.ndarray:
    monkeypatch.setattr(sharding, "Mesh", lambda grid, axes: grid)
    return make_mesh(config, devices)


def test_tensor_axis_is_a_row_or_column_of_the_chip_grid(monkeypatch):
    grid = device_grid(MeshConfig(data=4, fsdp=1, tensor=4), chips(1, (4, 4)), monkeypatch)
    for group in grid[:, 0]:
        columns, rows = ({device.coords[axis] for device in group} for axis in (0, 1))
        # The devices of each tensor-parallel group are a whole row or column of the grid.
        assert sorted((len(columns), len(rows))) == [1, 4]


def test_slices_are_blocks_of_the_data_axis(monkeypatch):
    grid = device_grid(MeshConfig(data=4, fsdp=4, tensor=2), chips(2, (4, 4)), monkeypatch)
    assert grid.shape == (4, 4, 2)
    assert [{device.slice_index for device in row.flat} for row in grid] == [{0}, {0}, {1}, {1}]
    assert len({id(device) for device in grid.flat}) == 32


def test_compiler_options_depend_on_platform_and_slices():
    meshes = [types.SimpleNamespace(devices=np.array(chips(slices, (2, 2)))) for slices in (1, 2)]
    assert [*map(compiler_options, meshes)] == [TPU_OPTIONS, TPU_OPTIONS | MULTISLICE_OPTIONS]
    assert compiler_options(make_mesh(MeshConfig())) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=1, fsdp=8, tensor=4), "does not fit 32 devices.*a multiple of 2 for mesh.data"),
        (MeshConfig(fsdp=0), "mesh.fsdp=0, mesh.tensor=1 does not fit 32 devices"),
        (MeshConfig(data=3), "does not fit 32 devices in 2 slice.s.; use sizes with the product 32"),
    ],
)
def test_mesh_that_does_not_fit_the_chips_is_an_error(config, message, monkeypatch):
    with pytest.raises(UsageError, match=message):
        device_grid(config, chips(2, (4, 4)), monkeypatch)


@pytest.mark.devices
def test_cpu_devices_keep_their_order():
    mesh = make_mesh(MeshConfig(fsdp=2))
    assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()]
