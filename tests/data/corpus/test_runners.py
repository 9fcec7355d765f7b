"""Tests of the runner options of `prepare` if Apache Beam is not installed."""

import sys

import pytest
from preparing import check_refused

import bertjax.data.corpus


@pytest.fixture
def without_beam(monkeypatch):
    """Makes `import apache_beam` fail."""
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "bertjax.data.corpus.run_beam", raising=False)
    monkeypatch.delattr(bertjax.data.corpus, "run_beam", raising=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": "spark"}, "unknown runner 'spark'; use local or beam"),
        ({"runner_options": ["project=p"]}, "--runner_options has no effect without --runner beam"),
        ({"runner": "beam"}, "--runner beam needs Apache Beam; install it with pip install -e '.\\[beam\\]'"),
    ],
)
def test_invalid_runner_is_refused(tmp_path, without_beam, settings, message):
    check_refused(tmp_path, message, **settings)
