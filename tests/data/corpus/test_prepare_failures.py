"""Tests that a failed or killed `prepare` leaves no partial corpus and keeps an existing corpus."""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from helpers.commanding import refused
from helpers.preparing import bytes_of, children, leftovers, make_text, prepare_process, run, write_text

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


def test_existing_output_is_replaced_only_with_overwrite(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(5))
    spec = f"text:{tmp_path}/a.txt"
    run(tmp_path, spec, vocabulary=vocabulary)
    before = bytes_of(tmp_path / "corpus")
    with pytest.raises(UsageError, match="--overwrite"):
        run(tmp_path, spec, vocabulary=vocabulary)
    (tmp_path / "bad.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(BertjaxError, match="bad.txt.gz"):
        run(tmp_path, f"text:{tmp_path}/*", vocabulary=vocabulary, overwrite=True)
    assert bytes_of(tmp_path / "corpus") == before and leftovers(tmp_path) == ["corpus"]
    write_text(tmp_path / "a.txt", make_text(6))
    run(tmp_path, spec, vocabulary=vocabulary, overwrite=True)
    # A folder that contains other files is not replaced.
    (tmp_path / "corpus" / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="is not a corpus, or contains other files"):
        run(tmp_path, spec, vocabulary=vocabulary, overwrite=True)
    (tmp_path / "corpus" / "checkpoints").rmdir()
    assert bytes_of(tmp_path / "corpus") != before and leftovers(tmp_path) == ["corpus"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="is not a corpus"):
        run(tmp_path, spec, vocabulary=vocabulary, overwrite=True, name="home")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heldout=1.0", "1.0 is out of range"),
        ("--heldout=nan", "nan is out of range"),
        ("--vocab_kind=unigram", "'unigram'"),
        ("--vocab_size=10", "vocabulary size is 10"),
        ("--vocab_size=260 --vocab_kind=bpe", "vocabulary size is 260 pieces; it must be 261 to"),
        ("--workers=0", "0 is out of range"),
        ("--workers=1025", "1025 is out of range"),
        ("--add_pieces=-1", "-1 is out of range"),
        ("--add_pieces=5", "--add_pieces needs a vocabulary to extend"),
        ("--runner=spark", "'spark'"),
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


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), BertjaxError, "/corpus: No space left on device"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_error_or_interrupt_removes_files_and_stops_workers(
    tmp_path, vocabulary, monkeypatch, error, expected, message
):
    write_text(tmp_path / "a.txt", make_text(50))

    def fail(*_):
        assert multiprocessing.active_children()
        raise error

    monkeypatch.setattr(prepare, "write_array", fail)
    with pytest.raises(expected, match=message):
        run(tmp_path, f"text:{tmp_path}/a.txt", vocabulary=vocabulary)
    assert leftovers(tmp_path) == [] and not multiprocessing.active_children()


@pytest.mark.ci
def test_killed_worker_is_an_error(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(200_000))
    before = set(multiprocessing.active_children())

    def kill():
        while not (workers := set(multiprocessing.active_children()) - before):
            time.sleep(0.01)
        os.kill(workers.pop().pid, signal.SIGKILL)

    # A daemon, so that pytest can exit if `run` fails before it starts workers.
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(BertjaxError, match="a worker process was killed"):
        run(tmp_path, f"text:{tmp_path}/a.txt", vocabulary=vocabulary)
    killer.join(timeout=60)
    assert leftovers(tmp_path) == []


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.ci
def test_killed_run_leaves_no_corpus_and_no_process(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(200_000))
    spec = f"text:{tmp_path}/a.txt"
    process = prepare_process(spec, tmp_path / "corpus", vocabulary)
    # Wait until one shard is complete and others are in progress.
    while not list(tmp_path.glob(".corpus-*.unfinished/new/*/*.json")):
        assert process.poll() is None
        time.sleep(0.01)
    (partial,) = tmp_path.glob(".corpus-*.unfinished")
    with pytest.raises(UsageError, match="another process is writing"):
        run(tmp_path, spec, vocabulary=vocabulary)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert workers
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(UsageError):
        store.open_corpus(partial / "new")
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    write_text(tmp_path / "a.txt", make_text(10))
    run(tmp_path, spec, vocabulary=vocabulary)
    assert leftovers(tmp_path) == ["corpus"]
    store.open_corpus(tmp_path / "corpus")
