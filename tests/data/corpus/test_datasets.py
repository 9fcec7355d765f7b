"""TFDS datasets as text, with one built here."""

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


def test_streams_the_examples_in_order(data_dir):
    sources, _ = readers.expand(["tfds:stories/plain:train"], data_dir["stories"])
    read_bytes = []
    texts = list(readers.read(sources[0], Counter(), read_bytes.append))
    assert [text.text for text in texts] == TEXTS
    assert sum(read_bytes) == len("".join(TEXTS).encode())


def test_the_size_is_known_before_reading(data_dir):
    (source,), _ = readers.expand(["tfds:stories/plain:train"], data_dir["stories"])
    text = sum(len(text.text) for text in readers.read(source, Counter(), lambda _: None))
    assert text <= source.size_bytes < 3 * text + 1000
    with pytest.raises(UsageError, match="has no split 'dev'"):
        readers.expand(["tfds:stories/plain:dev"], data_dir["stories"])


def test_slices_and_versions(data_dir):
    for name in "stories/plain:train[:10]", "stories/plain:1.0.0:train[:10]":
        found = list(datasets.texts(*datasets.parse("", name), data_dir["stories"], Counter(), lambda _: None))
        assert found == TEXTS[:10]


def test_the_only_text_feature_is_taken(data_dir):
    assert list(datasets.texts("single/plain", "train", data_dir["single"], Counter(), lambda _: None)) == ["B."]


@pytest.mark.parametrize(
    ("kind", "name", "split", "says"),
    [
        ("pairs", "pairs/plain", "train", "its features are answer, question"),
        ("stories", "stories/plain", "nosuch", "nosuch"),
        ("stories", "nosuchdataset", "train", "no dataset 'nosuchdataset'"),
    ],
)
def test_what_is_not_there_is_named(data_dir, kind, name, split, says):
    with pytest.raises(UsageError) as caught:
        list(datasets.texts(name, split, data_dir[kind], Counter(), lambda _: None))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_prepared_corpus(data_dir, tmp_path):
    manifest = prepare(
        ["tfds:stories/plain:train"],
        tmp_path / "corpus",
        vocabulary_size=100,
        data_dir=data_dir["stories"],
        workers=1,
        progress=False,
    )
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(TEXTS)
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 3 * len(TEXTS)
    assert store.open_corpus(tmp_path / "corpus").manifest == manifest
