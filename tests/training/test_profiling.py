"""Profiles of train steps."""

import jax
import pytest
from etils import epath
from small_run import make

from bertjax.errors import UsageError
from bertjax.training import train as loop
from bertjax.training.profiling import StepProfiler, parse_steps


@pytest.mark.parametrize("text", ["20:10", "5:5", "5", "a:b", "-1:3", "1:2:3", "1:"])
def test_profile_steps_are_a_range(text):
    assert (parse_steps("10:20"), parse_steps("")) == (range(10, 20), range(0))
    with pytest.raises(UsageError, match=f"--profile '{text}' is not a range"):
        parse_steps(text)


@pytest.fixture
def traces(monkeypatch):
    """Returns the list of calls that start and stop a trace, without tracing."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def profile(folder, steps, num_steps=6):
    """Runs steps under a profiler, and returns those during which a trace was open."""
    open_during = []
    with StepProfiler(epath.Path(folder), steps) as profiler:
        for step in range(num_steps):
            with profiler.step(step):
                open_during += [step] * profiler._is_tracing
            profiler.step_done(step + 1, None)
    return open_during


@pytest.mark.parametrize("steps", [range(2, 4), range(1), range(0)])
def test_profiler_traces_the_named_steps(traces, tmp_path, steps):
    assert profile(tmp_path, steps) == [*steps]
    assert traces == ([str(tmp_path), "stop"] if steps else [])


def test_profiler_ends_an_unfinished_trace(traces, tmp_path):
    profile(tmp_path, range(1, 9))
    assert traces == [str(tmp_path), "stop"]


def test_profiler_warns_if_the_run_does_not_execute_the_steps(traces, tmp_path, log_lines):
    profile(tmp_path, range(7, 9))
    assert traces == [] and log_lines == ["saved no profile: the run did not execute step 7"]


@pytest.mark.slow
def test_train_writes_a_profile_to_the_workdir(corpus, tmp_path):
    loop.train(make(corpus, steps=3, eval_every=3), str(tmp_path / "run"), profile_steps=range(1, 2))
    assert [*(tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")]
