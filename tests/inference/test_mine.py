"""`bertjax mine`: hard negatives of pairs."""

import contextlib
import dataclasses
import io
import json
import random

import numpy as np
import pytest
from helpers.commanding import printed, refused

import bertjax
from bertjax.convert import huggingface
from bertjax.data.finetuning.tables import FORMATS, ReadStats, read_table
from bertjax.inference import mine as mining
from bertjax.tasks.embedding.sentence_embedder import Layer, Pooling, SentenceEmbedder

WORDS = [f"w{letter}{number}" for letter in "abcdefgh" for number in range(9)]


def made_up_pairs(num_anchors=30):
    """Returns pairs of anchor and positive. Every third anchor has two positives, and one row is repeated."""
    rng = random.Random(0)
    texts = [" ".join(rng.sample(WORDS, rng.randint(2, 5))) for _ in range(3 * num_anchors)]
    pairs = [(texts[index], texts[num_anchors + index]) for index in range(num_anchors)]
    pairs += [(texts[index], texts[2 * num_anchors + index]) for index in range(0, num_anchors, 3)]
    return [*pairs, pairs[0]]


@pytest.fixture(scope="module")
def embedder(pretrained, tmp_path_factory):
    """Returns a sentence-transformers folder with prompts for queries and documents."""
    folder = tmp_path_factory.mktemp("embedder")
    # The vectors of a random model are nearly equal. Subtract their mean, so that their cosines differ.
    texts = [text for pair in made_up_pairs() for text in pair]
    mean = bertjax.load(pretrained).encode(texts, "mean").pooled.mean(axis=0)
    dense = {"in_features": 16, "out_features": 16, "activation_function": "torch.nn.modules.linear.Identity"}
    modules = (
        Pooling({"embedding_dimension": 16, "pooling_mode": "mean"}, ("mean",)),
        Layer("Dense", {**dense, "bias": True}, {"linear.weight": np.eye(16, dtype=np.float32), "linear.bias": -mean}),
    )
    embedder = SentenceEmbedder(modules, 16, max_seq_len=32, prompts={"query": "a b ", "document": "d "})
    huggingface.write(dataclasses.replace(huggingface.read(pretrained), embedder=embedder), folder)
    return folder


def write_pairs(file, pairs, names=("anchor", "positive")):
    file.write_text("".join("\t".join(row) + "\n" for row in (names, *pairs)))
    return file


def mine(capfd, checkpoint, source, output, *options):
    """Runs the command. Returns the lines of its output, without the header."""
    command = ["mine", f"--checkpoint={checkpoint}", f"--input={source}", f"--output={output}", *options]
    assert printed(capfd, *command) == f"{output}\n"
    return output.read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {}),
        (["--negatives=3", "--first_rank=4"], {"num_negatives": 3, "range_min": 3}),
        (["--negatives=2", "--margin=-0.05", "--last_rank=60"], {"num_negatives": 2, "absolute_margin": -0.05}),
        (["--negatives=2", "--corpus=CORPUS"], {"num_negatives": 2, "corpus": [" ".join(WORDS[:3]), "b a"]}),
    ],
)
def test_negatives_equal_those_of_sentence_transformers(options, expected, embedder, tmp_path, capfd):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs bertjax[parity]")
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install -e '.[dev]'")
    pairs = made_up_pairs()
    (tmp_path / "corpus.txt").write_text("".join(f"{text}\n" for text in expected.get("corpus", [])))
    options = [option.replace("CORPUS", str(tmp_path / "corpus.txt")) for option in options]
    rows = mine(capfd, embedder, write_pairs(tmp_path / "pairs.tsv", pairs), tmp_path / "hard.tsv", *options)
    with contextlib.redirect_stdout(io.StringIO()):
        found = sentence_transformers.util.mine_hard_negatives(
            datasets.Dataset.from_list([dict(zip(("anchor", "positive"), pair, strict=True)) for pair in pairs]),
            sentence_transformers.SentenceTransformer(str(embedder), device="cpu"),
            output_format="n-tuple",
            **{"num_negatives": 1, "range_max": 60} | expected,
        )
    assert len(rows) > 10 and rows == ["\t".join(row.values()) for row in found]


def test_negatives_follow_ranks_and_margin():
    anchors = np.array([[1, 0]], np.float32)
    cosines = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], np.float32)
    documents = 3 * np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)

    def negatives(*args):
        ((indices, found, own),) = mining.hard_negatives(anchors, documents, [[1, 3]], *args)
        np.testing.assert_allclose(found, cosines[indices], atol=1e-6)
        np.testing.assert_allclose(own, cosines[[1, 3]], atol=1e-6)
        return indices.tolist()

    assert negatives(2, 1, 2) == [0, 2] and negatives(2, 2, 9) == [2, 4]
    # The margin applies to the least similar positive, and excludes documents but does not change their ranks.
    assert negatives(1, 1, 9, 0.05) == [4] and negatives(2, 1, 3, 0.05) == [4] and negatives(1, 4, 4, 0.05) == [5]


def test_blocks_of_anchors_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(0)
    anchors, documents = (rng.normal(size=(rows, 8)).astype(np.float32) for rows in (40, 60))
    positives = [[index, *range(40, 40 + index % 7)] for index in range(40)]
    # An anchor with many positives, which are nearer than all other documents.
    positives[3], documents[40:] = [*range(40, 60)], anchors[3] + documents[40:] / 100

    def mined():
        found = mining.hard_negatives(anchors, documents, positives, 3, 2, 6)
        return [indices.tolist() for indices, _, _ in found]

    whole = mined()
    monkeypatch.setattr(mining, "_ANCHORS_PER_BLOCK", 9)
    assert mined() == whole and all(len(indices) == 3 for indices in whole)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_and_column_name_is_read_and_written(form, embedder, tmp_path, capfd):
    texts = ['q "1"', " a, b", "tab\tline\nend", "ä 北"]
    rows = [{"question": f"{text} {index}", "answer": text, "id": index} for index, text in enumerate(texts)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "new" / f"hard.{form}"
    mine(capfd, embedder, tmp_path / "pairs.jsonl", output, "--anchor=question", "--positive=answer")
    found = [row.fields for row in read_table(output, ("question", "answer", "negative"), ReadStats(""))]
    clean = (lambda text: text.replace("\t", " ").replace("\n", " ")) if form == "tsv" else str
    assert [row["answer"] for row in found] == [clean(text) for text in texts]
    assert all(row["negative"] in {*map(clean, texts)} - {row["answer"]} for row in found)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_documents_are_distinct_texts_and_the_summary_counts_anchors(embedder, pretrained, tmp_path, capfd, log_lines):
    source = write_pairs(tmp_path / "pairs.tsv", [("a", "b"), ("a", "c"), ("d", "c"), ("", "e"), ("f", " ")])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"_id": "1", "title": "", "text": "b"}\n{"_id": "2", "title": "a", "text": "d"}\n')
    output = tmp_path / "hard.tsv"
    # Only "b" is not a positive of "d", and "a" has both documents as positives.
    assert mine(capfd, embedder, source, output) == ["d\tc\tb"]
    assert log_lines[-1].startswith("negatives: 1 each for 1 anchors, 0 each for 1 anchors; mean cosine: ")
    assert log_lines[-1].endswith("1 of 3 pairs have enough negatives")
    assert "5 rows read, 3 used" in log_lines[0] and "2 skipped with an empty text" in log_lines[0]
    assert log_lines[1:2] == ["2 distinct anchors, 2 distinct documents"]
    # The corpus adds one document.
    mine(capfd, embedder, source, output, f"--corpus={corpus}", "--negatives=2")
    assert log_lines[-2] == "2 distinct anchors, 3 distinct documents"
    assert output.read_text().startswith("anchor\tpositive\tnegative\tnegative_2\n")
    mine(capfd, pretrained, source, output)
    assert log_lines[-2] == f"{pretrained} is not a sentence embedder; its vectors are means over all tokens"


def test_list_of_positives_expands_to_pairs(embedder, tmp_path, capfd):
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"query": "a", "pos": ["b", "c"]}\n{"query": "d", "pos": ["c"]}\n')
    assert mine(capfd, embedder, source, tmp_path / "h.tsv", "--anchor=query", "--positive=pos") == ["d\tc\tb"]


def test_wrong_options_and_files_are_rejected(embedder, tmp_path, capfd):
    source = write_pairs(tmp_path / "pairs.tsv", [("a", "b"), ("c", "d")])

    def error(*options, file=source, output=tmp_path / "hard.tsv", code=2):
        command = ["mine", f"--checkpoint={embedder}", f"--input={file}", f"--output={output}", *options]
        line = refused(capfd, *command, logs=True, code=code)
        assert not (tmp_path / "hard.tsv").exists()
        return line

    assert "--last_rank=3 is too low; use at least 4" in error("--last_rank=3", "--negatives=2", "--first_rank=3")
    assert "unknown format of hard.txt; use a .tsv, .csv, .jsonl file" in error(output="hard.txt")
    assert "no column 'text'; its columns are 'anchor', 'positive'" in error("--positive=text")
    assert "too few negatives: 1 each for 2 anchors; lower --negatives" in error("--negatives=2")
    assert "use a file with texts in the columns" in error(file=write_pairs(tmp_path / "empty.tsv", [(" ", "b")]))
    assert "corpus.jsonl" in error(f"--corpus={tmp_path / 'corpus.jsonl'}")
    assert "out of range" in error("--margin=nan")
    assert "is the input" in error(output=source)
    # Before any work: with this margin, there would be too few negatives. Not even root can write to /proc.
    assert "cannot write to /proc: " in error("--margin=1.9", output="/proc/hard.tsv", code=1)
    assert "cannot read" in error(file=tmp_path / "nosuch.tsv", output=source)
