"""Tests of the runner options of `prepare` if Apache Beam is not installed."""

import sys

import pytest
from preparing import check_refused, make_text, write_text

import bertjax.data.corpus
from bertjax.cli import main as cli


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


def test_missing_beam_is_a_one_line_error(tmp_path, without_beam, capsys):
    write_text(tmp_path / "a.txt", make_text(2))
    flags = ["prepare", "--input", f"text:{tmp_path}/a.txt", f"--output={tmp_path}/corpus"]
    with pytest.raises(SystemExit) as end:
        cli.main([*flags, "--runner=beam", "--runner_options", "runner=DataflowRunner", "project=p"])
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == "bertjax: --runner beam needs Apache Beam; install it with pip install -e '.[beam]'\n"
    )
