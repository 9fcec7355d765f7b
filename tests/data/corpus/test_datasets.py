"""Tests of reading TFDS datasets, and Hugging Face datasets from a stand-in for the Hub's HTTP API."""

import json
import sys
from collections import Counter

import datasets.config
import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers import hub_server
from helpers.finetuning_data import write_tfds
from helpers.preparing import run

from bertjax.data.corpus import chunks, readers
from bertjax.data.corpus.datasets import parse_dataset, tfds_texts
from bertjax.data.corpus.sentences import split_sentences
from bertjax.data.finetuning import dataset_rows
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.build import build_task
from bertjax.tasks.embedding.config import EmbedData
from bertjax.training.checkpoint_config import experiment_config

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
    with pytest.raises(UsageError, match="cannot read split 'dev'.*train"):
        readers.find_sources(["tfds:stories/plain:dev"], data_dir)


def test_dataset_name_may_have_a_slice_and_a_version(data_dir):
    for spec in "tfds:stories/plain:train[:10]", "tfds:stories/plain:1.0.0:train[:10]":
        name, split, _ = parse_dataset(spec)
        assert list(tfds_texts(name, split, data_dir)) == TEXTS[:10]
    # The only text feature is read, whatever its name.
    assert list(tfds_texts("single/plain", "train", data_dir)) == ["B."]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("pairs/plain", "train", r"\(answer, question\)"),
        ("stories/plain", "nosuch", "nosuch"),
        ("nosuchdataset", "train", "no dataset 'nosuchdataset'"),
    ],
)
def test_missing_dataset_split_or_text_feature_is_a_one_line_error(data_dir, name, split, message):
    with pytest.raises(UsageError, match=message) as caught:
        list(tfds_texts(name, split, data_dir))
    assert "\n" not in str(caught.value)


def test_prepare_writes_the_corpus_of_a_dataset(data_dir, tmp_path, monkeypatch):
    # Workers need not import TensorFlow if the main process reads the dataset.
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 0)
    manifest = run(tmp_path, "tfds:stories/plain:train", vocabulary_size=100, data_dir=data_dir)
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 3 * len(TEXTS)
    assert manifest["settings"]["inputs"]["tfds"]["names"] == ["stories/plain:train"]


def test_markers_and_titles_of_wiki40b_are_not_text(tmp_path):
    article = "\n_START_ARTICLE_\nA title\n\n_START_SECTION_\nPlot\n_START_PARAGRAPH_\nOne. Two._NEWLINE_Three."
    texts = [article, "No article has a _NEWLINE_."]
    write_tfds(tmp_path, "wiki/plain", "train", [{"text": text} for text in texts], shuffle=False)
    (source,), _ = readers.find_sources(["tfds:wiki/plain:train"], str(tmp_path))
    first, second = readers.read(source, Counter())
    assert split_sentences(first.text, first.layout, Counter()) == ["Plot", "One.", "Two.", "Three."]
    assert second.text == texts[1]


STORIES = ["The cat sat. It slept.", "", "A dog\0 ran.\n\nIt stopped.", "Birds sing."]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", datasets.config.os.environ["HF_ENDPOINT"])
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        hub.push("datasets/org/stories", {"train.jsonl": lines(*({"id": "x", "text": text} for text in STORIES))})
        yield hub


def test_rows_are_documents_in_order(hub, letters, tmp_path):
    (source,), _ = readers.find_sources(["hf:org/stories:train"])
    read_bytes = []
    assert [document.text for document in readers.read(source, Counter(), read_bytes.append)] == STORIES
    assert sum(read_bytes) == len("".join(STORIES).encode())
    manifest = run(tmp_path, "hf:org/stories:train", vocabulary=letters, heldout_fraction=0.0, workers=2)
    assert manifest["splits"]["train"]["documents"] == 3 and manifest["splits"]["train"]["sentences"] == 5
    assert manifest["problems"]["nul_characters"] == 1


def test_articles_are_documents_if_rows_are_lines_of_wikitext(hub):
    rows = ["", " = First = \n", "", " The first . \n", " = = Plot = = \n", " More . \n", " = Next = \n", " Text . \n"]
    hub.push("datasets/org/wikitext", {"train.jsonl": lines(*({"text": row} for row in rows))})
    (source,), _ = readers.find_sources(["hf:org/wikitext:train"])
    texts = [" ".join(document.text.split()) for document in readers.read(source, Counter())]
    assert texts == ["The first . Plot More .", "Text ."]


def test_lines_of_text_files_become_documents_with_a_warning(hub, log_lines):
    hub.push("datasets/org/books", {"train.txt": b"One line.\nAnother.\n"})
    (source,), _ = readers.find_sources(["hf:org/books:train"])
    assert len([*readers.read(source, Counter())]) == 2
    assert [line for line in log_lines if "hf:org/books:train has .txt files" in line]


def test_column_and_config_of_a_dataset_can_be_chosen(hub):
    card = "---\nconfigs:\n- config_name: en\n  data_files: en.jsonl\n- config_name: de\n  data_files: de.jsonl\n---\n"
    files = {"README.md": card.encode(), "en.jsonl": lines({"title": "a", "body": "b"}), "de.jsonl": lines({"t": "c"})}
    hub.push("datasets/org/news", files)
    for spec, text in (("hf:org/news/en:train#body", "b"), ("hf:org/news/de:train", "c")):
        (source,), _ = readers.find_sources([spec])
        assert [document.text for document in readers.read(source, Counter())] == [text]
    for spec, message in (
        ("hf:org/news/en:train", "has 2 text columns .body, title.; append #COLUMN"),
        ("hf:org/news/en:train#none", "has no text column 'none'; use one of title, body"),
        ("hf:org/news/en:dev", "cannot read split 'dev' of dataset 'org/news/en': "),
        ("hf:org/news/fr:train", "dataset 'org/news/fr'.*Available: .'en', 'de'."),
        ("hf:org/none:train", "no dataset 'org/none' on the Hub; check the name, or set HF_TOKEN"),
        ("hf:org/news", "has no split; write hf:ORG"),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            readers.find_sources([spec])
        assert "\n" not in str(raised.value)


def test_unreachable_hub_is_a_one_line_error(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.status = 500
    with pytest.raises(BertjaxError) as raised:
        readers.find_sources(["hf:org/stories:train"])
    assert "\n" not in str(raised.value) and "org/stories" in str(raised.value)


def test_missing_datasets_library_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="cannot import datasets"):
        readers.find_sources(["hf:org/stories:train"])


def test_rows_without_a_class_are_skipped(monkeypatch):
    class Dataset(list):
        features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))

        def select_columns(self, columns):
            return self

    rows = Dataset({"text": "a", "label": label} for label in (-1, None, 1))
    monkeypatch.setattr(dataset_rows, "open_hub", lambda name, split: rows)
    assert [row.fields["label"] for row in dataset_rows.read_hub("hf:a/b:train", ("label",), ReadStats(""))] == ["yes"]


def test_embedder_reads_columns_of_a_dataset_and_skips_rows_with_null(hub, letters):
    rows = ({"q": "a", "a": "b", "x": 1}, {"q": "c", "a": None, "x": 2}, {"q": "d", "a": "e", "x": None})
    hub.push("datasets/org/pairs", {"train.jsonl": lines(*rows)})
    data = EmbedData(train_file="hf:org/pairs:train")
    read, stats = data.read_rows(data.train_file, ("q", "a"))
    assert [(row.line, row.fields) for row in read] == [(1, {"q": "a", "a": "b"}), (3, {"q": "d", "a": "e"})]
    assert stats.columns == "columns q, a (ignored: x)"
    assert stats.read == 3 and stats.skipped["with null, NaN or the class id -1"]["rows"] == 1
    assert [row.fields["x"] for row in data.read_rows(data.train_file, ("q", "a", "x"))[0]] == ["1", ""]
    assert data.has_columns("hf:org/pairs:train", ("q", "x")) and not data.has_columns("hf:org/pairs:train", ("z",))
    with pytest.raises(UsageError, match="no column 'z'; its columns are q, a, x"):
        next(data.read_rows(data.train_file, ("z",))[0])
    config = "embed:train=hf:org/pairs:train,columns=q+a,size=L1_H16"
    task = build_task(experiment_config(config, [f"--config.data.vocabulary={letters}"]), train=True)
    assert [len(file) for file in task.files] == [2]
