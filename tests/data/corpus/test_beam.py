"""Tests that Apache Beam writes the same corpus as the local runner, even if a worker dies. Needs the extra `beam`."""

import contextlib
import io
import os
import signal
import subprocess
import time

import pytest
from helpers.preparing import bytes_of, children, leftovers, make_text, prepare_process, run, write_text

from bertjax.data.corpus import chunks, store
from bertjax.errors import BertjaxError, UsageError

pytestmark = pytest.mark.beam
# Running in this process is faster than starting several processes.
IN_PROCESS = ["direct_running_mode=in_memory"]


def write_files(folder, num_documents):
    """Writes documents of about 180 bytes to several files, one of them large."""
    documents = make_text(num_documents)
    cut = len(documents) // 4
    folder.mkdir()
    write_text(folder / "a.txt", documents[cut:])
    for number in range(4):
        write_text(folder / f"b{number}.txt", documents[number:cut:4])
    return f"text:{folder}/*.txt"


@pytest.mark.parametrize(
    ("documents", "settings"),
    [
        (12_000, {"vocabulary_size": 80, "heldout_fraction": 0.2}),
        (200, {"vocabulary_kind": "sentencepiece", "vocabulary_size": 80}),
        (200, {"add_pieces": 12}),
    ],
)
def test_beam_writes_the_same_bytes_as_the_local_runner(tmp_path, vocabulary, documents, settings, monkeypatch):
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 100_000)
    spec = write_files(tmp_path / "text", documents)
    if settings.get("add_pieces"):
        write_text(tmp_path / "text" / "c.txt", [["glucose and insulin .", "insulin ."]] * 9)
        settings = settings | {"vocabulary": vocabulary}
    expected = run(tmp_path, spec, **settings)
    manifest = run(tmp_path, spec, name="beam", **settings, runner="beam", runner_options=IN_PROCESS)
    assert bytes_of(tmp_path / "beam") == bytes_of(tmp_path / "corpus")
    assert manifest == expected and manifest.get("added_pieces", {"count": 3})["count"] > 2
    store.open_corpus(tmp_path / "beam").checksums.wait()
    assert leftovers(tmp_path) == ["beam", "corpus", "text"]


def test_killed_worker_does_not_change_the_corpus(tmp_path, vocabulary):
    spec = write_files(tmp_path / "text", 60_000)
    run(tmp_path, spec, vocabulary=vocabulary, workers=2)
    pipe = {"stderr": subprocess.PIPE, "text": True}
    process = prepare_process(spec, tmp_path / "beam", vocabulary, "--runner=beam", **pipe)
    # Wait until one shard is complete and others are in progress.
    while not list(tmp_path.glob(".beam-*.unfinished/new/work/*.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    # Beam starts each worker in a shell.
    workers = [worker for shell in children(process.pid, "sdk_worker") for worker in children(shell)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    # Ignore Beam's own log lines, which depend on the installed packages.
    first, second = (line for line in stderr.splitlines() if line.startswith("beam: "))
    assert first == "beam: processing 5 inputs with FnApiRunner" and second.startswith("beam: a process died")
    assert bytes_of(tmp_path / "beam") == bytes_of(tmp_path / "corpus")
    assert leftovers(tmp_path) == ["beam", "corpus", "text"]


def test_beam_corpus_in_a_bucket_equals_the_local_corpus(bucket, tmp_path, vocabulary):
    spec = write_files(tmp_path / "text", 200)
    (bucket / "text").mkdir(parents=True)
    for file in (tmp_path / "text").iterdir():
        (bucket / "text" / file.name).write_bytes(file.read_bytes())
    run(tmp_path, spec, vocabulary=vocabulary)
    settings = {"vocabulary": vocabulary, "runner": "beam", "runner_options": IN_PROCESS}
    run(bucket, "text:gs://bucket/text/*.txt", **settings)
    assert sorted(file.name for file in bucket.iterdir()) == ["corpus", "text"]
    assert bytes_of(bucket / "corpus") == bytes_of(tmp_path / "corpus")


def test_failed_stage_is_named_in_a_one_line_error(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(5))
    (tmp_path / "bad.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "wide.txt").write_bytes("river".encode("utf-16"))
    settings = {"vocabulary": vocabulary, "runner": "beam", "runner_options": IN_PROCESS}
    with pytest.raises(BertjaxError, match=r"in stage 'encode' of Beam's pipeline: cannot read .*bad.txt.gz past"):
        run(tmp_path, f"text:{tmp_path}/*.gz", **settings)
    with pytest.raises(UsageError, match=r"in stage 'encode' of Beam's pipeline: .*wide.txt.* UTF-16"):
        run(tmp_path, f"text:{tmp_path}/wide.txt", **settings)
    (tmp_path / "empty").write_text("")
    with pytest.raises(BertjaxError, match="in stage 'merge' of Beam's pipeline: the inputs contain no text"):
        run(tmp_path, f"text:{tmp_path}/empty", **settings)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["runner=NoRunner"], "Beam cannot use runner=NoRunner: "),
        (["no_option=3"], "Beam has no option no_option for FnApiRunner"),
        (["direct_running_mode=many"], "--runner_options direct_running_mode=many: .*: invalid choice: 'many'"),
        (["runner=DataflowRunner"], "DataflowRunner cannot write to .*corpus, a local folder|apache_beam.gcp"),
    ],
)
def test_invalid_runner_options_are_rejected(tmp_path, options, message):
    write_text(tmp_path / "a.txt", make_text(5))
    with contextlib.redirect_stderr(io.StringIO()) as stderr, pytest.raises(UsageError, match=message):
        run(tmp_path, f"text:{tmp_path}/a.txt", runner="beam", runner_options=options)
    assert not stderr.getvalue() and leftovers(tmp_path) == []
