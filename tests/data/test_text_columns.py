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


def test_missing_texts_have_no_tokens_and_prompts_and_lengths_differ_by_column(letters, tmp_path):
    rows = [{"a": "x y", "b": "y", "c": ["x y z"]}, {"a": "x", "b": "z", "c": []}, {"a": "", "b": "z", "c": ["z"]}]
    examples, _, stats = read(
        tmp_path, letters, rows, ("a", "b", "c"), "", query_prompt="q", query_len=4, document_len=8
    )
    assert examples.num_columns == 3 and examples.texts.lengths.tolist() == [4, 3, 5, 4, 3, 0]
    assert examples.keys[1, 2] == -1 and np.all(examples.keys[0] != examples.keys[1])
    assert stats.skipped["with an empty text"]["rows"] == 1 and "2 anchors reach the limit of 4 tokens" in stats.columns
