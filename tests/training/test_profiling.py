"""Profiles of train steps."""

import jax
import pytest
from etils import epath
from small_run import make

from bertjax.errors import UsageError
from bertjax.training import train as loop
from bertjax.training.profiling import StepProfiler, parse_steps


def test_parse_steps_returns_a_range():
    assert parse_steps("10:20") == range(10, 20)
    assert parse_steps("") == range(0)


@pytest.mark.parametrize("text", ["20:10", "5:5", "5", "a:b", "-1:3", "1:2:3", "1:"])
def test_invalid_profile_steps_are_an_error(text):
    with pytest.raises(UsageError, match=f"--profile '{text}' is not a range of steps; use START:STOP, such as 10:20"):
        parse_steps(text)


@pytest.fixture
def traces(monkeypatch):
    """Returns the list of calls that start and stop a trace, without tracing."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.mark.parametrize(("steps", "started_at", "stopped_at"), [(range(2, 4), 2, 4), (range(0, 1), 0, 1)])
def test_profiler_traces_the_named_steps(traces, tmp_path, steps, started_at, stopped_at):
    num_calls = []
    with StepProfiler(epath.Path(tmp_path), steps) as profiler:
        for step in range(6):
            with profiler.step(step):
                num_calls.append(len(traces))
            profiler.step_done(step + 1, {})
    assert traces == [str(tmp_path), "stop"]
    assert (num_calls.index(1), num_calls.index(2)) == (started_at, stopped_at)


def test_profiler_ends_an_unfinished_trace(traces, tmp_path):
    with pytest.raises(ZeroDivisionError), StepProfiler(epath.Path(tmp_path), range(1, 9)) as profiler:
        for step in range(3):
            with profiler.step(step):
                _ = 1 / (2 - step)
    assert traces == [str(tmp_path), "stop"]


def test_profiler_without_steps_does_not_trace(traces, tmp_path):
    with StepProfiler(epath.Path(tmp_path), range(0)) as profiler, profiler.step(0):
        profiler.step_done(1, {})
    assert traces == []


def test_profiler_warns_if_the_run_does_not_execute_the_steps(traces, tmp_path, log_lines):
    with StepProfiler(epath.Path(tmp_path), range(5, 8)) as profiler:
        for step in range(3):
            with profiler.step(step):
                pass
            profiler.step_done(step + 1, None)
    assert log_lines == ["saved no profile: the run did not execute step 5"]


@pytest.mark.slow
def test_train_writes_a_profile_to_the_workdir(corpus, tmp_path):
    loop.train(make(corpus, steps=3, eval_every=3), str(tmp_path / "run"), profile_steps=range(1, 2))
    assert [*(tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")]
