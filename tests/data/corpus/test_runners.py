"""Who does the work of `prepare`, as far as can be shown without Apache Beam."""

import sys

import pytest
from preparing import check_refused, make_text, write_text

import bertjax.data.corpus
from bertjax.cli import main as cli


@pytest.fixture
def without_beam(monkeypatch):
    """As where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "bertjax.data.corpus.run_beam", raising=False)
    monkeypatch.delattr(bertjax.data.corpus, "run_beam", raising=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"runner": "spark"}, "runner 'spark' is none of local, beam"),
        ({"runner_options": ["project=p"]}, "--runner_options are for --runner beam"),
        ({"shard_bytes": 1000}, "files of 1,000 bytes are no whole blocks of 262,144"),
        ({"runner": "beam"}, "--runner beam needs Apache Beam: pip install -e '.\\[beam\\]'"),
    ],
)
def test_what_cannot_run(tmp_path, without_beam, settings, says):
    check_refused(tmp_path, says, **settings)


def test_the_command_tells_it_in_one_line(tmp_path, without_beam, capsys):
    write_text(tmp_path / "a.txt", make_text(2))
    flags = ["prepare", "--input", f"text:{tmp_path}/a.txt", f"--output={tmp_path}/corpus"]
    with pytest.raises(SystemExit) as end:
        cli.main([*flags, "--runner=beam", "--runner_options", "runner=DataflowRunner", "project=p"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "bertjax: --runner beam needs Apache Beam: pip install -e '.[beam]'\n"
