"""Apache Beam makes the corpus that this machine makes, whatever happens to its workers; needs the extra `beam`."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import storage
from etils import epath
from preparing import bytes_of, children, leftovers, make_text, run, write_text

from bertjax.cli import main as cli
from bertjax.data.corpus import parts, store
from bertjax.data.corpus.blocks import BLOCK_BYTES
from bertjax.errors import BertjaxError, UsageError

pytestmark = pytest.mark.beam
# In this process, which is quicker where nothing is to be shown of several.
IN_PROCESS = ["direct_running_mode=in_memory"]


def arrays_of(directory):
    """Name of an array, or of its checksums, to its bytes, however many files they lie in."""
    found = {}
    for name, data in sorted(bytes_of(directory).items()):
        if name != store.MANIFEST:
            whole = name.partition("-")[0] + ".bin" if "-of-" in name else name
            found[whole] = found.get(whole, b"") + data
    return found


def text_of(folder, count):
    """Several files of so many documents together, of about 180 bytes each; one of the files has most."""
    documents = make_text(count)
    cut = len(documents) // 4
    folder.mkdir()
    write_text(folder / "a.txt", documents[cut:])
    for number in range(4):
        write_text(folder / f"b{number}.txt", documents[number:cut:4])
    return f"text:{folder}/*.txt"


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_same_arrays_and_vocabulary_as_this_machine(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(parts, "_CHUNK_BYTES", (100_000, 100_000))
    spec = text_of(tmp_path / "text", 12_000 if kind == "wordpiece" else 200)
    settings = {"vocabulary_kind": kind, "vocabulary_size": 80, "heldout_share": 0.2}
    expected = run(tmp_path, spec, **settings)
    settings |= {"runner": "beam", "runner_options": IN_PROCESS, "shard_bytes": BLOCK_BYTES}
    manifest = run(tmp_path, spec, name="beam", **settings)
    assert arrays_of(tmp_path / "beam") == arrays_of(tmp_path / "corpus")
    for entry in ("splits", "problems", "settings", "vocabulary", "token_dtype"):
        assert manifest[entry] == expected[entry]
    one, many = (store.open_corpus(tmp_path / name) for name in ("corpus", "beam"))
    many.verification.verify_all()
    np.testing.assert_array_equal(many.train.tokens, one.train.tokens)
    if kind == "wordpiece":
        assert manifest["shards"]["train.sentences"] > 1
    assert leftovers(tmp_path) == ["beam", "corpus", "text"]


def test_a_worker_that_is_killed_leaves_no_gap_and_nothing_twice(tmp_path, vocabulary):
    spec = text_of(tmp_path / "text", 60_000)
    run(tmp_path, spec, vocabulary=vocabulary, workers=2)
    command = [sys.executable, "-m", "bertjax", "prepare", "--input", spec, f"--output={tmp_path}/beam"]
    process = subprocess.Popen(
        [*command, f"--vocab={vocabulary}", "--runner=beam", "--workers=2"], stderr=subprocess.PIPE, text=True
    )
    # In the middle: one part is there, others are being made.
    while not list(tmp_path.glob(".beam-*.unfinished/new/work/*.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    # Beam starts each in a shell.
    shells = [child for child in children(process.pid) if "sdk_worker" in command_of(child)]
    workers = [worker for shell in shells for worker in children(shell)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    begun, lost = said.splitlines()
    assert begun == "beam: 5 inputs, on FnApiRunner" and lost.startswith("beam: a process was lost")
    assert arrays_of(tmp_path / "beam") == arrays_of(tmp_path / "corpus")
    assert leftovers(tmp_path) == ["beam", "corpus", "text"]


def command_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read()
    return ""


def test_a_corpus_of_a_bucket_in_a_bucket(tmp_path, vocabulary, monkeypatch):
    storage.use(monkeypatch)
    text_of(tmp_path / "text", 200)
    for file in (tmp_path / "text").iterdir():
        (epath.Path("gs://bucket/text") / file.name).parent.mkdir(parents=True, exist_ok=True)
        (epath.Path("gs://bucket/text") / file.name).write_bytes(file.read_bytes())
    run(tmp_path, f"text:{tmp_path}/text/*.txt", vocabulary=vocabulary)
    from bertjax.data.corpus.prepare import prepare

    prepare(
        ["text:gs://bucket/text/*.txt"],
        "gs://bucket/corpus",
        vocabulary=vocabulary,
        runner="beam",
        runner_options=IN_PROCESS,
        workers=1,
        progress=False,
    )
    assert sorted(file.name for file in epath.Path("gs://bucket").iterdir()) == ["corpus", "text"]
    (tmp_path / "copied").mkdir()
    for file in epath.Path("gs://bucket/corpus").iterdir():
        (tmp_path / "copied" / file.name).write_bytes(file.read_bytes())
    assert arrays_of(tmp_path / "copied") == arrays_of(tmp_path / "corpus")


def test_a_stage_that_fails_is_one_line_that_names_it(tmp_path, vocabulary):
    write_text(tmp_path / "a.txt", make_text(5))
    (tmp_path / "bad.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "wide.txt").write_bytes("river".encode("utf-16"))
    settings = {"vocabulary": vocabulary, "runner": "beam", "runner_options": IN_PROCESS}
    with pytest.raises(BertjaxError, match=r"in stage 'encode' of Beam's pipeline: cannot read .*bad.txt.gz past"):
        run(tmp_path, f"text:{tmp_path}/*.gz", **settings)
    with pytest.raises(UsageError, match=r"in stage 'encode' of Beam's pipeline: .*wide.txt.* UTF-16"):
        run(tmp_path, f"text:{tmp_path}/wide.txt", **settings)
    with pytest.raises(BertjaxError, match=r"in stage 'sample' of Beam's pipeline: cannot read .*bad.txt.gz past"):
        run(tmp_path, f"text:{tmp_path}/*", **settings | {"vocabulary": None})
    (tmp_path / "empty").write_text("")
    with pytest.raises(BertjaxError, match="in stage 'merge' of Beam's pipeline: the inputs hold no text"):
        run(tmp_path, f"text:{tmp_path}/empty", **settings)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["runner=NoRunner"], "Beam cannot run on runner=NoRunner: "),
        (["no_option=3"], "Beam has no option no_option for FnApiRunner"),
        (
            ["direct_running_mode=many"],
            "--runner_options direct_running_mode=many: argument .*: invalid choice: 'many'",
        ),
        (
            ["runner=DataflowRunner"],
            "DataflowRunner cannot write to .*corpus, a folder of this machine|apache_beam.gcp",
        ),
    ],
)
def test_unusable_options(tmp_path, options, says):
    write_text(tmp_path / "a.txt", make_text(5))
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(UsageError, match=says):
        run(tmp_path, f"text:{tmp_path}/a.txt", runner="beam", runner_options=options)
    assert not said.getvalue()
    with pytest.raises(SystemExit) as end:
        flags = ["prepare", f"--input=text:{tmp_path}/a.txt", f"--output={tmp_path}/corpus", "--runner=beam"]
        with contextlib.redirect_stderr(said):
            cli.main([*flags, "--runner_options", *options])
    assert end.value.code == 2 and len(said.getvalue().splitlines()) == 1
    assert leftovers(tmp_path) == []
