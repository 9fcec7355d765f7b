"""Tests that a failed or killed `prepare` leaves no partial corpus and keeps an existing corpus."""

import multiprocessing
import sys
import time

import pytest
from helpers.commanding import refused
from helpers.preparing import bytes_of, leftovers, make_text, prepare_process, prepare_text, run, write_text

import bertjax.data.corpus
from bertjax.data.corpus import prepare, store
from bertjax.errors import BertjaxError, UsageError


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\x00\x01"])
def test_input_without_text_is_an_error(tmp_path, vocabulary, content):
    (tmp_path / "a.txt").write_bytes(content)
    for path in vocabulary, None:
        with pytest.raises(BertjaxError, match="no text"):
            run(tmp_path, f"text:{tmp_path}/a.txt", vocabulary=path)
    assert leftovers(tmp_path) == []


def test_existing_output_is_replaced_only_with_overwrite_and_without_other_files(tmp_path, vocabulary):
    prepare_text(tmp_path, make_text(5), vocabulary=vocabulary)
    before = bytes_of(tmp_path / "corpus")
    with pytest.raises(UsageError, match="--overwrite"):
        prepare_text(tmp_path, make_text(6), vocabulary=vocabulary)
    (tmp_path / "corpus" / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="is not a corpus, or contains other files"):
        prepare_text(tmp_path, make_text(6), vocabulary=vocabulary, overwrite=True)
    (tmp_path / "corpus" / "checkpoints").rmdir()
    assert bytes_of(tmp_path / "corpus") == before
    prepare_text(tmp_path, make_text(6), vocabulary=vocabulary, overwrite=True)
    assert bytes_of(tmp_path / "corpus") != before and leftovers(tmp_path) == ["corpus"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heldout=1.0", "1.0 is out of range"),
        ("--heldout=nan", "nan is out of range"),
        ("--vocab_size=10", "vocabulary size is 10"),
        ("--vocab_size=260 --vocab_kind=bpe", "vocabulary size is 260 pieces; it must be 261 to"),
        ("--workers=0", "0 is out of range"),
        ("--add_pieces=-1", "-1 is out of range"),
        ("--add_pieces=5", "--add_pieces needs a vocabulary to extend"),
        ("--runner_options project=p", "--runner_options has no effect without --runner beam"),
        ("--runner=beam", "pip install"),
    ],
)
def test_invalid_prepare_options_are_rejected(tmp_path, options, message, monkeypatch, capfd):
    # Make `import apache_beam` fail.
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "bertjax.data.corpus.run_beam", raising=False)
    monkeypatch.delattr(bertjax.data.corpus, "run_beam", raising=False)
    write_text(tmp_path / "a.txt", make_text(2))
    spec, output = f"--input=text:{tmp_path}/a.txt", f"--output={tmp_path}/corpus"
    assert message in refused(capfd, "prepare", spec, output, *options.split())
    assert leftovers(tmp_path) == []


def test_interrupt_removes_files_and_stops_workers(tmp_path, vocabulary, monkeypatch):
    def interrupt(*_):
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_array", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_text(tmp_path, make_text(50), vocabulary=vocabulary)
    assert leftovers(tmp_path) == [] and not multiprocessing.active_children()


@pytest.mark.ci
def test_killed_run_leaves_no_corpus(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(200_000))
    process = prepare_process(f"text:{tmp_path}/a.txt", tmp_path / "corpus", vocabulary)
    # Wait until one shard is complete and others are in progress.
    while not list(tmp_path.glob(".corpus-*.unfinished/new/*/*.json")):
        assert process.poll() is None
        time.sleep(0.01)
    (partial,) = tmp_path.glob(".corpus-*.unfinished")
    process.kill()
    process.wait()
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(UsageError, match="no corpus at"):
        store.open_corpus(partial / "new")
    prepare_text(tmp_path, make_text(10), vocabulary=vocabulary)
    assert leftovers(tmp_path) == ["corpus"]
