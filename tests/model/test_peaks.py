"""Peak FLOP/s of devices."""

import types

import pytest

from bertjax.estimate.topology import CHIPS
from bertjax.model.flops import peak_flops_per_second


@pytest.mark.parametrize(
    ("kind", "chip", "devices", "chips"),
    [
        # TPU v2 and v3 have two JAX devices per chip.
        ("TPU v2", "v2", 8, 4),
        ("TPU v3", "v3", 8, 4),
        ("TPU v4", "v4", 4, 4),
        ("TPU v5 lite", "v5e", 4, 4),
        ("TPU v5", "v5p", 4, 4),
        ("TPU v6 lite", "v6e", 4, 4),
    ],
)
def test_peak_flops_of_tpus_are_summed_over_chips_and_not_devices(kind, chip, devices, chips):
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    peak, source = peak_flops_per_second([device] * devices)
    assert peak == chips * CHIPS[chip].flops_per_second
    assert source.startswith(f"{devices} x {kind}, ")


def test_peak_flops_of_an_unknown_device_are_zero():
    unknown = types.SimpleNamespace(platform="gpu", device_kind="RTX 9090")
    assert peak_flops_per_second([unknown]) == (0.0, "no peak known for RTX 9090")
