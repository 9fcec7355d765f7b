"""The peaks that a model's FLOPs are held against."""

import types

import pytest

from bertjax.estimate.chips import CHIPS
from bertjax.model.flops import peak_flops_per_second


@pytest.mark.parametrize(
    ("kind", "chip", "devices", "chips"),
    [
        # Of v2 and v3 JAX sees two devices a chip.
        ("TPU v2", "v2", 8, 4),
        ("TPU v3", "v3", 8, 4),
        ("TPU v4", "v4", 4, 4),
        ("TPU v5 lite", "v5e", 4, 4),
        ("TPU v5", "v5p", 4, 4),
        ("TPU v6 lite", "v6e", 4, 4),
    ],
)
def test_devices_have_together_what_their_chips_have(kind, chip, devices, chips):
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    peak, source = peak_flops_per_second([device] * devices)
    assert peak == chips * CHIPS[chip].flops_per_second
    assert source.startswith(f"{devices} x {kind}, ")


def test_without_a_figure_there_is_none():
    unknown = types.SimpleNamespace(platform="gpu", device_kind="of tomorrow")
    assert peak_flops_per_second([unknown]) == (0.0, "no peak known for of tomorrow")
