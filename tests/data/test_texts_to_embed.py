"""Texts of embedders: labels and texts of rows, and the order and batches of examples."""

import json

import numpy as np
import pytest

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching
from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.data.finetuning.text_batches import BatchOrder, MixedOrder, TextExamples, train_batch
from bertjax.data.finetuning.text_columns import TextEncoder, read_examples
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError


def read(folder, tokenizer, rows, columns, kind, label="score", **fields):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stats = ReadStats(str(path))
    encoder = TextEncoder(tokenizer, **fields)
    table = read_table(path, [*columns, *([label] if kind else [])], stats)
    return (*read_examples(table, columns, label, kind, encoder, stats), stats)


@pytest.mark.parametrize(
    ("kind", "documents", "value", "expected"),
    [("score", "y", "0.5", [0.5]), ("scores", ["y", "z"], [3, 1.5], [3, 1.5]), ("scores", ["y", "z"], 2.0, [0, -2])],
)
def test_labels_are_scores_or_margins(kind, documents, value, expected, tokenizer, tmp_path):
    rows = [{"a": "x", "b": documents, "score": value}]
    examples, names, _ = read(tmp_path, tokenizer, rows, ("a", "b"), kind)
    assert examples.rows["labels"].tolist() == [expected] and names == []


@pytest.mark.parametrize(
    ("value", "message"),
    [([1, 2, 3], "3 scores for 2 documents"), (["x"], "not a number"), ("[1 2]", "write a list")],
)
def test_wrong_labels_are_rejected_with_their_line(value, message, tokenizer, tmp_path):
    with pytest.raises(UsageError, match=f"line 1: score.*{message}"):
        read(tmp_path, tokenizer, [{"a": "x", "b": ["y", "z"], "score": value}], ("a", "b"), "scores")


def test_spellings_of_a_class_are_one_class(tokenizer, tmp_path, log_lines):
    rows = [{"a": "x", "b": "y", "score": value} for value in ("2.0", True, "true", 2)]
    examples, names, _ = read(tmp_path, tokenizer, rows, ("a", "b"), "class")
    assert names == ["2", "true"] and examples.rows["labels"].ravel().tolist() == [0, 1, 1, 0] and not log_lines
    read(tmp_path, tokenizer, [{"a": "x", "b": "y", "score": value} for value in (-1, 0, 1, 2)], ("a", "b"), "class")
    assert "the classes are -1 to 2; -1 may mark missing labels" in log_lines[-1]


@pytest.mark.parametrize("negatives", [["x", "z"], "['x', 'z']", '["x", "z"]'])
def test_negatives_may_be_a_list_in_json_or_python(negatives, tokenizer, tmp_path):
    rows = [{"a": "x", "b": "y", "c": negatives}, {"a": "z", "b": "y", "c": "[]"}, {"a": "y", "b": "z", "c": "[x] y"}]
    examples, _, _ = read(tmp_path, tokenizer, rows, ("a", "b", "c"), "")
    assert examples.strings == ["x", "y", "x", "z", "z", "y", "", "", "y", "z", "[x] y", ""]
    with pytest.raises(UsageError, match="line 1: c is a list; write one text per row"):
        read(tmp_path, tokenizer, rows, ("a", "c"), "")
    with pytest.raises(UsageError, match="line 1: c is .* not a list in JSON or Python"):
        read(tmp_path, tokenizer, [{"a": "x", "b": "y", "c": "['x' 'z']"}], ("a", "b", "c"), "")


def test_each_of_several_positives_is_one_example_with_all_negatives(tokenizer, tmp_path):
    rows = [{"q": "x", "pos": ["y", "z"], "neg": ["x y", "x z"]}, {"q": "y", "pos": [], "neg": ["x"]}]
    examples, _, stats = read(tmp_path, tokenizer, rows, ("q", "pos", "neg"), "")
    assert examples.strings == ["x", "y", "x y", "x z", "x", "z", "x y", "x z"]
    assert stats.noted["with several positives, which become one row each"]["rows"] == 1
    # CSV files contain lists as text, such as `['x', 'y']`. The result must be the same.
    as_text = [{name: str(value) for name, value in row.items()} for row in rows]
    assert read(tmp_path, tokenizer, as_text, ("q", "pos", "neg"), "")[0].strings == examples.strings
    with pytest.raises(UsageError, match="line 1: pos is a list; write one text per row"):
        read(tmp_path, tokenizer, as_text, ("pos", "q"), "")
    assert stats.skipped["with an empty text"]["rows"] == 1
    with pytest.raises(UsageError, match="line 1: pos has items that are not text"):
        read(tmp_path, tokenizer, [{"q": "x", "pos": [None], "neg": []}], ("q", "pos", "neg"), "")


def test_texts_that_look_like_code_are_texts(tokenizer, tmp_path):
    texts = ['{"a": 1}', 'define(["a"], f)', "b'x' or b'y'"]
    rows = [{"q": text, "pos": text, "neg": '("x", "y")'} for text in texts]
    rows.append({"q": '["a" in x] and [b]', "pos": "x", "neg": "z"})
    examples, _, _ = read(tmp_path, tokenizer, rows, ("q", "pos", "neg"), "")
    assert examples.strings == [text for row in rows for text in row.values()]


def test_missing_texts_have_no_tokens_and_prompts_and_lengths_differ_by_column(tokenizer, tmp_path):
    rows = [{"a": "x y", "b": "y", "c": ["x y z"]}, {"a": "x", "b": "z", "c": []}, {"a": "", "b": "z", "c": ["z"]}]
    examples, _, stats = read(
        tmp_path, tokenizer, rows, ("a", "b", "c"), "", query_prompt="q", query_len=4, document_len=8
    )
    assert examples.num_columns == 3 and examples.texts.lengths.tolist() == [4, 3, 5, 4, 3, 0]
    assert examples.keys[1, 2] == -1 and np.all(examples.keys[0] != examples.keys[1])
    assert stats.skipped["with an empty text"]["rows"] == 1 and "2 anchors reach the limit of 4 tokens" in stats.columns


def duplicated_keys(count: int = 1000, texts: int = 300) -> np.ndarray:
    return np.random.default_rng(0).integers(0, texts, (count, 2))


def epoch(order: BatchOrder, number: int = 0) -> np.ndarray:
    steps = order.steps_per_epoch
    return np.stack([order.batch(number * steps + step) for step in range(steps)])


def test_no_batch_contains_a_text_twice_and_an_epoch_contains_nearly_every_example_once():
    keys = duplicated_keys()
    batches = epoch(BatchOrder(keys, 16, seed=1, unique=True))
    for batch in batches:
        rows = [{*keys[example]} for example in batch if example != NO_EXAMPLE]
        assert sum(map(len, rows)) == len(set().union(*rows))
    used = batches[batches != NO_EXAMPLE]
    assert len(used) == len({*used}) > 0.98 * len(keys)


def test_examples_that_share_an_anchor_with_all_others_are_left_out_and_counted():
    keys = np.stack([np.zeros(100, np.int64), np.arange(1, 101)], axis=1)
    order = BatchOrder(keys, 10, seed=0, unique=True)
    assert [np.count_nonzero(batch != NO_EXAMPLE) for batch in epoch(order)] == [1] * 10
    assert order.left_out_fraction == pytest.approx(0.9)


def test_an_example_may_contain_the_same_text_twice():
    keys = np.repeat(np.arange(32)[:, None], 2, axis=1)
    batches = epoch(BatchOrder(keys, 8, seed=0, unique=True))
    assert sorted(batches.ravel()) == [*range(32)]


def test_a_negative_that_repeats_a_text_of_the_batch_is_omitted():
    file = examples(4, 4)
    file.keys[:] = [[0, 1, 2, 3], [4, 5, 1, 6], [7, 7, 3, 6], [8, 9, 2, 10]]
    batch = train_batch(file, np.arange(4), Batching(4, 4, 16, 4), SINGLE_SHARD, unique=True)
    assert batch["document_weights"].tolist() == [[1, 1, 0], [1, 0, 1], [1, 1, 0], [1, 0, 1]]
    assert np.count_nonzero(batch["texts"] != -1) == np.count_nonzero(batch["document_weights"]) + 4


def test_batches_depend_only_on_seed_and_step():
    keys = duplicated_keys(3000)
    first, second = (BatchOrder(keys, 8, seed=3, unique=True) for _ in range(2))
    for step in (700, 3, 374, 0, 375):  # Several windows of two epochs, in any order.
        np.testing.assert_array_equal(first.batch(step), second.batch(step))
    assert (first.batch(0) != BatchOrder(keys, 8, seed=4, unique=True).batch(0)).any()
    assert (first.batch(0) != first.batch(375)).any()


def examples(count: int, columns: int, weight: float = 1.0) -> TextExamples:
    rng = np.random.default_rng(count)
    sequences = []
    for index in range(count * columns):
        ids = [index + 1] * int(rng.integers(2, 7))
        sequences.append({"input_ids": ids, "segment_ids": [0] * len(ids)})
    keys = np.arange(count * columns).reshape(count, columns)
    rows = {"labels": np.arange(count, dtype=np.float32)[:, None]}
    return TextExamples("file", make_examples(sequences, {}), columns, keys, rows, weight)


def test_each_batch_is_from_one_file_chosen_in_proportion_to_its_weight():
    files = [examples(64, 2, weight=3), examples(32, 3, weight=1)]
    order, longer = (MixedOrder(files, 8, seed=0, unique=True) for _ in range(2))
    longer.files(5000)
    chosen = [order.batch(step)[0] for step in range(400)]
    assert chosen == [longer.batch(step)[0] for step in range(400)]
    assert chosen.count(0) == pytest.approx(300, abs=40)
    assert order.steps_per_epoch == 12
    # Each file continues where its last batch ended.
    first_epoch = [order.batch(step)[1] for step in range(400) if chosen[step] == 1][:4]
    assert sorted(np.concatenate(first_epoch)) == [*range(32)]


def test_each_text_of_a_batch_occurs_once_where_the_array_texts_says():
    file = examples(8, 3)
    file.keys[2, 2] = -1
    indices = np.array([5, 2, NO_EXAMPLE, 7])
    batch = train_batch(file, indices, Batching(4, 4, 16, 4), SINGLE_SHARD)
    found = {}
    for row, texts in enumerate(batch["texts"]):
        for place, text in enumerate(texts):
            if text != -1:
                (token,) = {*batch["input_ids"][row][batch["sequence_ids"][row] == place + 1].tolist()}
                found[int(text)] = token - 1
    expected = {
        example * 3 + column: index * 3 + column for example, index in enumerate(indices) for column in range(3)
    }
    assert found == {t: s for t, s in expected.items() if t // 3 != 2 and t != 5}
    assert batch["weights"].tolist() == [1, 1, 0, 1]
    assert batch["document_weights"].tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]
    assert batch["labels"].ravel().tolist() == [5, 2, 0, 7]


def test_processes_build_the_parts_of_the_same_batch():
    file, indices = examples(16, 2), np.arange(8)
    batching = Batching(8, 4, 16, 2)
    whole = train_batch(file, indices, batching, SINGLE_SHARD)
    parts = [train_batch(file, indices, batching, DataShard((part,), 2)) for part in range(2)]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]), name)
