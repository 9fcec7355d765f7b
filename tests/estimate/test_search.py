"""`bertjax plan --search` with a fake compiler, whose programs need memory linear in the rows per device."""

import jax
import pytest

from bertjax.errors import BertjaxError
from bertjax.estimate import search
from bertjax.estimate.compiled import CompiledStep, CompilerError, Memory
from bertjax.estimate.topology import CHIPS
from bertjax.tasks.build import parse_config
from bertjax.training.checkpoint_config import experiment_config

LIMIT = int(CHIPS["v5e"].hbm_bytes)
FIXED = LIMIT // 10
# Bytes per row by remat policy; the fake compiler crashes on other policies.
ROW_BYTES = {"none": LIMIT // 50, "full": LIMIT // 200}


def config_with(overrides):
    return parse_config(experiment_config("pretrain:size=L2_H128,seq_len=64", list(overrides)))


@pytest.fixture
def compilations(monkeypatch):
    """Replaces the compiler with a fake one, and returns the (remat policy, rows per device) of each compilation."""
    calls = []

    def compile_step(settings, phase, topology, slices):
        policy = settings.model["remat"]
        rows = settings.data.batch_size // 4
        calls.append((policy, rows))
        if policy not in ROW_BYTES:
            raise CompilerError("crashed")
        memory = Memory(FIXED // 2, FIXED // 4, FIXED // 4, rows * ROW_BYTES[policy])
        return CompiledStep(memory, memory.total <= LIMIT, 1.0)

    monkeypatch.setattr(search, "compile_step", compile_step)
    monkeypatch.setattr(search, "tpu_devices", lambda topology, slices: jax.devices()[:4])
    return calls


@pytest.mark.devices
def test_search_finds_largest_batch_with_three_compilations(compilations, caplog):
    caplog.set_level("INFO")
    candidates = search.search(config_with, "v5e:2x2", 1)
    # Parameters, optimizer and batch take 10 % of the memory; rows are multiples of eight.
    assert [(each.rows, each.overrides[0]) for each in candidates] == [
        (40, "--config.model.remat=none"),
        (176, "--config.model.remat=full"),
    ]
    assert all(f"batch_size={4 * each.rows}" in each.overrides[-1] for each in candidates)
    assert max(sum(policy == each for policy, _ in compilations) for each in ROW_BYTES) <= 3
    assert "8 rows per device: crashed" in caplog.text


def test_search_without_any_fitting_batch_is_an_error(compilations, monkeypatch):
    monkeypatch.setattr("test_search.ROW_BYTES", {})
    with pytest.raises(BertjaxError, match="does not fit into memory with any batch size"):
        search.search(config_with, "v5e:2x2", 1)
