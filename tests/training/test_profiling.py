"""Profiles of train steps, and the benchmark of the pre-training input pipeline."""

import jax
import pytest
from etils import epath
from helpers.small_run import make

from bertjax.training.bench import bench_input, input_table
from bertjax.training.profiling import StepProfiler


@pytest.fixture
def traces(monkeypatch):
    """Returns the list of calls that start and stop a trace, without tracing."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.mark.parametrize(
    ("steps", "traced"),
    [(range(2, 4), [2, 3]), (range(1), [0]), (range(0), []), (range(4, 9), [4, 5]), (range(7, 9), [])],
)
def test_profiler_traces_the_named_steps_or_warns(traces, tmp_path, log_lines, steps, traced):
    open_during = []
    with StepProfiler(epath.Path(tmp_path), steps) as profiler:
        for step in range(6):
            with profiler.step(step):
                open_during += [step] * (traces == [str(tmp_path)])
            profiler.step_done(step + 1, None)
    assert open_during == traced
    assert traces == ([str(tmp_path), "stop"] if traced else [])
    unused = ["no profile was saved: the run did not execute step 7"]
    assert [line for line in log_lines if "no profile" in line] == (unused if steps and not traced else [])


def test_bench_input_reports_consistent_rates(corpus):
    result = bench_input(make(corpus, data__packing=True, data__seq_len=32, data__batch_size=4), seconds=0.2)
    positions_per_second = result["positions_per_second"]
    assert positions_per_second == pytest.approx(result["batches"] * 4 * 32 / result["seconds"])
    assert result["real_tokens_per_second"] == pytest.approx(result["token_fraction"] * positions_per_second)
    assert 0.3 < result["token_fraction"] <= 1
    assert ("batch", "4 x 32", "rows x tokens") in input_table(result)
