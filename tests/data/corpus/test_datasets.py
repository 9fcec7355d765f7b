"""Tests of reading text from TFDS datasets."""

from collections import Counter

import numpy as np
import pytest

from bertjax.data.corpus import datasets, readers, store
from bertjax.data.corpus.prepare import prepare
from bertjax.errors import UsageError

TEXTS = [f"First sentence of {i}. Second caf\u00e9.\nA new paragraph." for i in range(150)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets")

    def build(name, features, examples):
        directory = tmp_path_factory.mktemp("tfds")
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="1.0.0",
            config="plain",
            features=tfds.features.FeaturesDict(features),
            split_datasets={"train": list(enumerate(examples))},
            data_dir=directory,
            disable_shuffling=True,
        )
        return str(directory)

    text = tfds.features.Text()
    examples = [{"title": f"T{i}", "text": t} for i, t in enumerate(TEXTS)]
    return {
        "stories": build("stories", {"title": text, "text": text}, examples),
        "pairs": build("pairs", {"question": text, "answer": text}, [{"question": "Q?", "answer": "A."}]),
        "single": build(
            "single", {"body": text, "label": tfds.features.Scalar(np.int64)}, [{"body": "B.", "label": 1}]
        ),
    }


def test_examples_are_read_in_order(data_dir):
    sources, _ = readers.find_sources(["tfds:stories/plain:train"], data_dir["stories"])
    read_bytes = []
    texts = list(readers.read(sources[0], Counter(), read_bytes.append))
    assert [text.text for text in texts] == TEXTS
    assert sum(read_bytes) == len("".join(TEXTS).encode())


def test_dataset_size_is_estimated_before_the_text_is_read(data_dir):
    (source,), _ = readers.find_sources(["tfds:stories/plain:train"], data_dir["stories"])
    text = sum(len(text.text) for text in readers.read(source, Counter()))
    assert text <= source.size_bytes < 3 * text + 1000
    with pytest.raises(UsageError, match="has no split 'dev'"):
        readers.find_sources(["tfds:stories/plain:dev"], data_dir["stories"])


def test_dataset_name_may_have_a_slice_and_a_version(data_dir):
    for name in "stories/plain:train[:10]", "stories/plain:1.0.0:train[:10]":
        read = list(datasets.tfds_texts(*datasets.parse_tfds("", name), data_dir["stories"], Counter(), lambda _: None))
        assert read == TEXTS[:10]


def test_single_text_feature_is_read(data_dir):
    assert list(datasets.tfds_texts("single/plain", "train", data_dir["single"], Counter(), lambda _: None)) == ["B."]


@pytest.mark.parametrize(
    ("kind", "name", "split", "message"),
    [
        ("pairs", "pairs/plain", "train", "(features: answer, question)"),
        ("stories", "stories/plain", "nosuch", "nosuch"),
        ("stories", "nosuchdataset", "train", "no dataset 'nosuchdataset'"),
    ],
)
def test_missing_dataset_split_or_feature_is_an_error(data_dir, kind, name, split, message):
    with pytest.raises(UsageError) as caught:
        list(datasets.tfds_texts(name, split, data_dir[kind], Counter(), lambda _: None))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_prepare_writes_the_corpus_of_a_dataset(data_dir, tmp_path):
    manifest = prepare(
        ["tfds:stories/plain:train"],
        tmp_path / "corpus",
        vocabulary_size=100,
        data_dir=data_dir["stories"],
        workers=1,
    )
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(TEXTS)
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 3 * len(TEXTS)
    assert store.open_corpus(tmp_path / "corpus").manifest == manifest
