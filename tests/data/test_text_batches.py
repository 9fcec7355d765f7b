"""Order and batches of examples of several texts."""

import numpy as np
import pytest

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching
from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.text_batches import BatchOrder, MixedOrder, TextExamples, train_batch
from bertjax.data.shard import SINGLE_SHARD, DataShard


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


def test_examples_that_share_a_text_with_every_other_are_left_out_and_counted():
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


def test_batches_are_from_one_file_and_files_alternate_by_weight():
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


def test_a_batch_contains_each_text_of_its_examples_once_at_its_place():
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
