"""Labels and texts of rows for embedders."""

import json

import numpy as np
import pytest

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import open_vocabulary
from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.data.finetuning.text_columns import TextEncoder, read_examples
from bertjax.errors import UsageError


def read(folder, letters, rows, columns, kind, label="score", **fields):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stats = ReadStats(str(path))
    encoder = TextEncoder(Tokenizer(open_vocabulary(str(letters))), **fields)
    table = read_table(path, [*columns, *([label] if kind else [])], stats)
    return (*read_examples(table, columns, label, kind, encoder, stats), stats)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("score", "0.5", [0.5]),
        ("score", 4, [4.0]),
        ("scores", [3, 1.5], [3.0, 1.5]),
        ("scores", 2.0, [0.0, -2.0]),
        ("class", "yes", [1.0]),
    ],
)
def test_labels_are_scores_margins_or_classes(kind, value, expected, letters, tmp_path):
    documents = ["y", "z"] if kind == "scores" else "y"
    rows = [{"a": "x", "b": documents, "score": value}, {"a": "x", "b": documents, "score": "no"}]
    rows = rows if kind == "class" else rows[:1]
    examples, names, _ = read(tmp_path, letters, rows, ("a", "b"), kind)
    assert examples.rows["labels"][0].tolist() == expected
    assert names == (["no", "yes"] if kind == "class" else [])


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("score", "high", "not a number"),
        ("scores", [1, 2, 3], "3 scores for 2 documents"),
        ("scores", ["x"], "number"),
        ("scores", "[1 2]", "write a list"),
    ],
)
def test_wrong_labels_are_refused_with_their_line(kind, value, message, letters, tmp_path):
    rows = [{"a": "x", "b": ["y", "z"] if kind == "scores" else "y", "score": value}]
    with pytest.raises(UsageError, match=f"line 1: score.*{message}"):
        read(tmp_path, letters, rows, ("a", "b"), kind)


def test_spellings_of_a_class_are_one_class(letters, tmp_path):
    rows = [{"a": "x", "b": "y", "score": value} for value in ("2.0", True, "true", 2)]
    examples, names, _ = read(tmp_path, letters, rows, ("a", "b"), "class")
    assert names == ["2", "true"] and examples.rows["labels"].ravel().tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("negatives", [["x", "z"], "['x', 'z']", '["x", "z"]'])
def test_negatives_may_be_a_list_in_json_or_python(negatives, letters, tmp_path):
    rows = [{"a": "x", "b": "y", "c": negatives}, {"a": "z", "b": "y", "c": "[]"}, {"a": "y", "b": "z", "c": "[x] y"}]
    examples, _, _ = read(tmp_path, letters, rows, ("a", "b", "c"), "")
    assert examples.strings == ["x", "y", "x", "z", "z", "y", "", "", "y", "z", "[x] y", ""]
    with pytest.raises(UsageError, match="line 1: c is .* not a list in JSON or Python"):
        read(tmp_path, letters, [{"a": "x", "b": "y", "c": "['x' 'z']"}], ("a", "b", "c"), "")


def test_missing_texts_have_no_tokens_and_prompts_and_lengths_differ_by_column(letters, tmp_path):
    rows = [{"a": "x y", "b": "y", "c": ["x y z"]}, {"a": "x", "b": "z", "c": []}, {"a": "", "b": "z", "c": ["z"]}]
    examples, _, stats = read(
        tmp_path, letters, rows, ("a", "b", "c"), "", query_prompt="q", query_len=4, document_len=8
    )
    assert examples.num_columns == 3 and examples.texts.lengths.tolist() == [4, 3, 5, 4, 3, 0]
    assert examples.keys[1, 2] == -1 and np.all(examples.keys[0] != examples.keys[1])
    assert stats.skipped["with an empty text"]["rows"] == 1 and "2 anchors reach the limit of 4 tokens" in stats.columns
