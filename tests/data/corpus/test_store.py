"""Opening a corpus: manifest, file sizes and checksums."""

import itertools
import json
import os

import pytest

from bertjax.data.corpus import store
from bertjax.data.corpus.store import Checksums
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import file_sha256

FILES = [store.array_file(split, array) for split, array in itertools.product(store.SPLITS, store.ARRAYS)]
OUTSIDE = "../vocab.txt"


@pytest.fixture
def corpus(make_corpus):
    return make_corpus([[30, 20]] * 40, [[10, 20]] * 5)


def flip_bit(file, position):
    with open(file, "r+b") as opened:
        os.pwrite(opened.fileno(), bytes([os.pread(opened.fileno(), 1, position)[0] ^ 1]), position)


def test_flipped_bit_is_found_in_every_file(corpus):
    for file in (corpus.path / name for name in FILES):
        size = file.stat().st_size
        for position in (0, size // 2, size - 1):
            flip_bit(file, position)
            with pytest.raises(BertjaxError, match=f"{file} is damaged"):
                store.open_corpus(corpus.path).checksums.wait()
            flip_bit(file, position)
    store.open_corpus(corpus.path).checksums.wait()
    flip_bit(corpus.path / "vocab.txt", 100)
    with pytest.raises(BertjaxError, match=r"vocab\.txt is damaged"):
        store.open_corpus(corpus.path)


@pytest.mark.parametrize("change", [lambda file: os.truncate(file, 2), os.unlink])
def test_missing_and_truncated_files_are_rejected(corpus, change):
    change(corpus.path / "train.tokens.bin")
    with pytest.raises(UsageError, match="train.tokens.bin is missing or does not have"):
        store.open_corpus(corpus.path)


def test_each_file_is_verified_once_by_the_background_thread(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(store, "file_sha256", lambda path: read.append(path.name) or file_sha256(path))
    files = Checksums()
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
        files.add(tmp_path / name, file_sha256(tmp_path / name), "")
        files.verify_in_background()
    files.wait()
    files.wait()
    assert read == ["a", "b", "c"]
    files.add(tmp_path / "none", "0", "")
    with pytest.raises(BertjaxError, match=f"cannot read {tmp_path}/none"):
        files.wait()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_dtype": "<u4"}, "are inconsistent"),
        ({"format": 2}, "has format 2, not 3"),
        ({"vocabulary": []}, "damaged"),
        ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "are inconsistent"),
        ({"vocabulary": {"file": OUTSIDE, "size": 500}, "files": dict.fromkeys([OUTSIDE, *FILES])}, "are inconsistent"),
    ],
)
def test_invalid_manifest_is_rejected(corpus, change, message):
    manifest = json.loads((corpus.path / store.MANIFEST).read_text()) | change
    (corpus.path / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=message):
        store.open_corpus(corpus.path)
