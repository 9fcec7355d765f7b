"""The search for a batch: by a compiler that is made up here, whose memory grows with the rows."""

import jax
import pytest

from bertjax.errors import BertjaxError
from bertjax.estimate import search
from bertjax.estimate.chips import CHIPS
from bertjax.estimate.compiled import CompiledStep, CompilerError, Memory
from bertjax.estimate.cost import StepCost
from bertjax.tasks.build import parse_config
from bertjax.training.checkpoint_config import experiment_config

LIMIT = int(CHIPS["v5e"].hbm_bytes)
FIXED = LIMIT // 10
# What a row takes of the memory, and what its step takes, by remat policy; others crash.
ROW_BYTES = {"none": LIMIT // 50, "full": LIMIT // 200}
ROW_FLOPS = {"none": 3.0e12, "full": 4.0e12}


def settings_with(overrides):
    return parse_config(experiment_config("pretrain:size=L2_H128,seq_len=64", list(overrides)))


@pytest.fixture
def tried(monkeypatch):
    """(policy, rows a device) of each compilation."""
    calls = []

    def compile_step(settings, phase, topology, slices):
        policy = settings.model["remat"]
        rows = settings.data.batch_size // 4
        calls.append((policy, rows))
        if policy not in ROW_BYTES:
            raise CompilerError("crashed")
        memory = Memory(FIXED // 2, FIXED // 4, FIXED // 4, rows * ROW_BYTES[policy])
        work = (StepCost(rows * ROW_FLOPS[policy], 0, 1, ""),)
        return CompiledStep(memory, memory.total <= LIMIT, work, (), 1.0)

    monkeypatch.setattr(search, "compile_step", compile_step)
    monkeypatch.setattr(search, "tpu_devices", lambda topology, slices: jax.devices()[:4])
    return calls


@pytest.mark.devices
def test_the_largest_batch_of_each_policy_is_found_in_three_compilations(tried, capsys):
    found = search.search(settings_with, "v5e:2x2", 1)
    # 0.9 of the memory for rows, in steps of eight.
    assert [(one.rows, one.overrides[0]) for one in found] == [
        (40, "--config.model.remat=none"),
        (176, "--config.model.remat=full"),
    ]
    assert all(f"batch_size={4 * one.rows}" in one.overrides[-1] for one in found)
    assert found[0].rows_per_second > found[1].rows_per_second
    assert max(sum(policy == each for policy, _ in tried) for each in ROW_BYTES) <= 3
    assert "8 rows a device: crashed" in capsys.readouterr().err


def test_a_compiler_that_compiles_nothing_is_an_error(tried, monkeypatch):
    monkeypatch.setattr("test_search.ROW_BYTES", {})
    with pytest.raises(BertjaxError, match="nothing was found that fits and compiles"):
        search.search(settings_with, "v5e:2x2", 1)
