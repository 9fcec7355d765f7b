"""Benchmark of the pre-training input pipeline."""

import pytest
from small_run import make

from bertjax.training.bench import bench_input, input_table


@pytest.mark.parametrize("packing", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_bench_input_reports_consistent_rates(corpus, packing):
    result = bench_input(make(corpus, data__packing=packing, data__seq_len=32, data__batch_size=4), seconds=0.2)
    positions_per_second = result["positions_per_second"]
    assert positions_per_second == pytest.approx(result["batches"] * 4 * 32 / result["seconds"])
    assert result["real_tokens_per_second"] == pytest.approx(result["token_fraction"] * positions_per_second)
    assert 0.3 < result["token_fraction"] <= 1
    assert ("batch", "4 x 32", "rows x tokens") in input_table(result)
