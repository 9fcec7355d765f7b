"""Corpora read from object storage and written there."""

import json

import pytest
import storage
from etils import epath
from preparing import bytes_of, make_text

from bertjax.data.corpus import prepare, readers, store
from bertjax.errors import BertjaxError, UsageError


@pytest.fixture
def bucket(monkeypatch):
    """A bucket with two texts."""
    storage.use(monkeypatch)
    place = epath.Path("gs://bucket")
    for name, seed in (("text/a.txt", 0), ("text/more/b.txt", 1)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("\n\n".join("\n".join(document) for document in make_text(40, seed)))
    return place


def prepared(output, vocabulary, *inputs, **settings):
    return prepare.prepare(
        list(inputs), output, vocabulary=vocabulary, heldout_share=0.2, workers=1, progress=False, **settings
    )


def names_of(place):
    return sorted(file.name for file in place.iterdir())


def test_what_an_address_matches(bucket):
    def found(rest):
        return [source.name.removeprefix("gs://bucket/") for source in readers.expand([f"text:gs://bucket/{rest}"])[0]]

    assert found("text") == found("text/**") == found("**") == ["text/a.txt", "text/more/b.txt"]
    assert found("text/*.txt") == found("text/a.txt") == ["text/a.txt"]
    assert found("**/*.txt") == found("text/**/*.txt") == ["text/a.txt", "text/more/b.txt"]
    assert found("**/more/*") == found("*/more/b*") == ["text/more/b.txt"]
    with pytest.raises(UsageError, match="matches no file"):
        found("none/**")


def test_a_corpus_at_an_address_is_the_one_of_this_machine(bucket, tmp_path, vocabulary):
    (bucket / "vocab.txt").write_bytes(vocabulary.read_bytes())
    manifest = prepared("gs://bucket/out/corpus", "gs://bucket/vocab.txt", "text:gs://bucket/text/**")
    for name in ("a.txt", "more/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((bucket / "text" / name).read_bytes())
    assert (
        prepared(tmp_path / "corpus", vocabulary, f"text:{tmp_path}/a.txt", f"text:{tmp_path}/more/b.txt") == manifest
    )
    written = {file.name: file.read_bytes() for file in (bucket / "out/corpus").iterdir()}
    assert written == bytes_of(tmp_path / "corpus")
    # Nothing unfinished is left.
    assert names_of(bucket / "out") == ["corpus"]


def test_a_corpus_at_an_address_is_replaced_when_asked_and_never_half(bucket, vocabulary, monkeypatch):
    prepared("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/a.txt")
    before = {file.name: file.read_bytes() for file in (bucket / "corpus").iterdir()}
    with pytest.raises(UsageError, match="gs://bucket/corpus exists; give --overwrite"):
        prepared("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**")
    with pytest.raises(UsageError, match="is not a corpus"):
        prepared("gs://bucket/text", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    with pytest.raises(UsageError, match="the whole of a bucket"):
        prepared("gs://bucket", vocabulary, "text:gs://bucket/text/**", overwrite=True)

    def fail(*_):
        raise OSError("the network is down")

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "upload", fail)
        with pytest.raises(BertjaxError, match="cannot write the corpus gs://bucket/corpus: the network is down"):
            prepared("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert {file.name: file.read_bytes() for file in (bucket / "corpus").iterdir()} == before
    assert names_of(bucket) == ["corpus", "text"]
    moved = []
    replace = type(bucket).replace
    monkeypatch.setattr(type(bucket), "replace", lambda self, to: moved.append(to.name) or replace(self, to))
    manifest = prepared("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert moved[-1] == store.MANIFEST and len(moved) == 14
    assert json.loads((bucket / "corpus" / store.MANIFEST).read_text()) == manifest
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["heldout"]["documents"] == 80


def test_a_vocabulary_that_is_not_there_is_one_error(bucket):
    with pytest.raises(UsageError, match="cannot read the vocabulary gs://bucket/none.txt: "):
        prepared("gs://bucket/corpus", "gs://bucket/none.txt", "text:gs://bucket/text/**")
