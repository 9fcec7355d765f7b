"""Tests of reading text from TFDS datasets."""

from collections import Counter

import numpy as np
import pytest
import tensorflow_datasets as tfds
from finetuning_data import write_tfds
from preparing import run

from bertjax.data.corpus import chunks, datasets, readers, store
from bertjax.errors import UsageError

TEXTS = [f"First sentence of {i}. Second caf\u00e9.\nA new paragraph." for i in range(150)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    stories = [{"title": f"T{i}", "text": text} for i, text in enumerate(TEXTS)]
    write_tfds(folder, "stories/plain", "train", stories, shuffle=False)
    write_tfds(folder, "pairs/plain", "train", [{"question": "Q?", "answer": "A."}])
    label = tfds.features.Scalar(np.int64)
    write_tfds(folder, "single/plain", "train", [{"body": "B.", "label": 1}], label=label)
    return str(folder)


def test_examples_are_read_in_order_after_an_estimate_of_their_size(data_dir):
    (source,), _ = readers.find_sources(["tfds:stories/plain:train"], data_dir)
    read_bytes = []
    assert [text.text for text in readers.read(source, Counter(), read_bytes.append)] == TEXTS
    assert sum(read_bytes) == len("".join(TEXTS).encode())
    assert len("".join(TEXTS)) <= source.size_bytes < 3 * len("".join(TEXTS)) + 1000
    with pytest.raises(UsageError, match="has no split 'dev'"):
        readers.find_sources(["tfds:stories/plain:dev"], data_dir)


def test_dataset_name_may_have_a_slice_and_a_version(data_dir):
    for spec in "tfds:stories/plain:train[:10]", "tfds:stories/plain:1.0.0:train[:10]":
        name, split, _ = datasets.parse_dataset(spec)
        assert list(datasets.tfds_texts(name, split, data_dir)) == TEXTS[:10]
    # The only text feature is read, whatever its name.
    assert list(datasets.tfds_texts("single/plain", "train", data_dir)) == ["B."]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("pairs/plain", "train", "(features: answer, question)"),
        ("stories/plain", "nosuch", "nosuch"),
        ("nosuchdataset", "train", "no dataset 'nosuchdataset'"),
    ],
)
def test_missing_dataset_split_or_feature_is_an_error(data_dir, name, split, message):
    with pytest.raises(UsageError) as caught:
        list(datasets.tfds_texts(name, split, data_dir))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_prepare_writes_the_corpus_of_a_dataset(data_dir, tmp_path, monkeypatch):
    # Workers need not import TensorFlow if the main process reads the dataset.
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 0)
    manifest = run(tmp_path, "tfds:stories/plain:train", vocabulary_size=100, data_dir=data_dir)
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(TEXTS)
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 3 * len(TEXTS)
    assert manifest["settings"]["inputs"]["tfds"]["names"] == ["stories/plain:train"]
    assert store.open_corpus(tmp_path / "corpus").manifest == manifest
