"""`prepare` with inputs and output on object storage."""

import json
from unittest.mock import Mock

import pytest
from preparing import bytes_of, make_text

from bertjax.data.corpus import chunks, prepare, readers, store
from bertjax.errors import BertjaxError, UsageError


@pytest.fixture
def bucket(bucket, monkeypatch):
    """Returns the path of an in-memory bucket with two text files."""
    # The main process reads large files. Workers cannot, because the bucket is in the memory of this process.
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 0)
    for name, seed in (("text/a.txt", 0), ("text/more/b.txt", 1)):
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_text("\n\n".join("\n".join(document) for document in make_text(40, seed)))
    return bucket


def prepare_corpus(output, vocabulary, *inputs, **settings):
    return prepare.prepare(list(inputs), output, vocabulary=vocabulary, heldout_fraction=0.2, workers=1, **settings)


def test_pattern_matches_files_in_a_bucket(bucket):
    def names(rest):
        return [
            source.name.removeprefix("gs://bucket/") for source in readers.find_sources([f"text:gs://bucket/{rest}"])[0]
        ]

    assert names("text") == names("text/**") == names("**") == ["text/a.txt", "text/more/b.txt"]
    assert names("text/*.txt") == names("text/a.txt") == ["text/a.txt"]
    assert names("**/*.txt") == names("text/**/*.txt") == ["text/a.txt", "text/more/b.txt"]
    assert names("**/more/*") == names("*/more/b*") == ["text/more/b.txt"]
    with pytest.raises(UsageError, match="matches no file"):
        names("none/**")


def test_corpus_in_a_bucket_equals_local_corpus(bucket, tmp_path, vocabulary):
    (bucket / "vocab.txt").write_bytes(vocabulary.read_bytes())
    manifest = prepare_corpus("gs://bucket/out/corpus", "gs://bucket/vocab.txt", "text:gs://bucket/text/**")
    for name in ("a.txt", "more/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((bucket / "text" / name).read_bytes())
    assert (
        prepare_corpus(tmp_path / "corpus", vocabulary, f"text:{tmp_path}/a.txt", f"text:{tmp_path}/more/b.txt")
        == manifest
    )
    assert bytes_of(bucket / "out/corpus") == bytes_of(tmp_path / "corpus")
    # No temporary file is left.
    assert [file.name for file in (bucket / "out").iterdir()] == ["corpus"]


@pytest.mark.ci
def test_corpus_in_a_bucket_is_replaced_with_overwrite(bucket, vocabulary, monkeypatch):
    prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/a.txt")
    before = bytes_of(bucket / "corpus")
    with pytest.raises(UsageError, match="gs://bucket/corpus exists; use --overwrite"):
        prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**")
    with pytest.raises(UsageError, match="is not a corpus"):
        prepare_corpus("gs://bucket/text", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    with pytest.raises(UsageError, match="--output is a whole bucket"):
        prepare_corpus("gs://bucket", vocabulary, "text:gs://bucket/text/**", overwrite=True)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_array", Mock(side_effect=OSError("the network is down")))
        with pytest.raises(BertjaxError, match="cannot write the corpus gs://bucket/corpus: the network is down"):
            prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert bytes_of(bucket / "corpus") == before
    assert sorted(file.name for file in bucket.iterdir()) == ["corpus", "text"]
    moved = []
    replace = type(bucket).replace
    monkeypatch.setattr(type(bucket), "replace", lambda self, to: moved.append(to.name) or replace(self, to))
    manifest = prepare_corpus("gs://bucket/corpus", vocabulary, "text:gs://bucket/text/**", overwrite=True)
    assert moved[-1] == store.MANIFEST and len(moved) == 8
    assert json.loads((bucket / "corpus" / store.MANIFEST).read_text()) == manifest
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["heldout"]["documents"] == 80


def test_missing_vocabulary_in_a_bucket_is_an_error(bucket):
    with pytest.raises(UsageError, match="cannot read the vocabulary gs://bucket/none.txt: "):
        prepare_corpus("gs://bucket/corpus", "gs://bucket/none.txt", "text:gs://bucket/text/**")
