"""Model FLOPs, and peak FLOP/s of devices."""

import types

import pytest
from helpers.tiny_config import tiny_config

from bertjax.estimate.topology import CHIPS
from bertjax.model import flops
from bertjax.model.flops import attention_flops_per_position, flops_per_position, peak_flops_per_second
from bertjax.tasks.objectives.step_cost import StepCost


def test_training_flops_per_position_are_three_times_those_of_the_matrix_products():
    config = tiny_config(vocab_size=100)  # 2 layers, hidden size 16, intermediate size 32
    matrices = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    attention = 2 * (8 * 16) + 2 * (8 * 16)  # scores and weighted sums of values, over 8 positions
    head = 2 * (16 * 16 + 16 * 100)
    assert flops_per_position(config, seq_len=8) == 3 * 2 * (matrices + attention)
    assert flops_per_position(config, 8, num_predictions=2) == 3 * (2 * (matrices + attention) + 2 / 8 * head)
    assert attention_flops_per_position(config, context=8) == 3 * 2 * attention


def test_token_flops_count_neither_padding_nor_attention_to_padding():
    cost = StepCost(rows=1, positions=8, flops=1000.0, attention_flops=200.0)
    assert cost.token_flops(token_fraction=0.5, attention_fraction=0.25) == 0.5 * 800 + 0.25 * 200


# TPU v2 and v3 have two JAX devices per chip.
@pytest.mark.parametrize(("kind", "chip", "devices"), [("TPU v3", "v3", 8), ("TPU v5 lite", "v5e", 4)])
def test_peak_flops_of_tpus_are_summed_over_chips_and_not_devices(kind, chip, devices):
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    peak, source = peak_flops_per_second([device] * devices)
    assert peak == 4 * CHIPS[chip].flops_per_second
    assert source.startswith(f"{devices} x {kind}, ")


@pytest.mark.parametrize(("kind", "tflops"), [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756)])
def test_peak_flops_of_a_gpu_depend_on_its_form(kind, tflops):
    device = types.SimpleNamespace(platform="gpu", device_kind=kind)
    assert peak_flops_per_second([device])[0] == tflops * 1e12


def test_peak_flops_of_an_unknown_device_are_zero():
    unknown = types.SimpleNamespace(platform="gpu", device_kind="RTX 9090")
    assert peak_flops_per_second([unknown]) == (0.0, "no peak known for RTX 9090")


@pytest.mark.parametrize(("has_units", "product"), [(True, "bfloat16"), (False, "NumPy float32")])
def test_peak_of_a_cpu_is_measured_in_the_dtype_that_it_multiplies_fastest(has_units, product, monkeypatch):
    monkeypatch.setattr(flops, "has_bfloat16_units", lambda: has_units)
    peak, source = flops.matmul_flops_per_second.__wrapped__()
    assert peak > 1e9 and source == f"measured {product} matrix product"
