"""Tests of fine-tuning batches: each example once per epoch, independent of padding, hosts and resumption."""

import dataclasses
import itertools

import numpy as np
import pytest
from helpers.unpacking import joined

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary, load_vocabulary
from bertjax.data.finetuning.batches import (
    NO_EXAMPLE,
    Batching,
    EpochOrder,
    eval_batches,
    in_input_order,
    make_batch,
    pack_batch,
)
from bertjax.data.finetuning.examples import concatenate, constant_prediction, encode_pair, make_examples
from bertjax.data.finetuning.labeled_text import Target, encode_rows
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.shard import SINGLE_SHARD, DataShard

CLS, SEP = 1, 2
VOCABULARY = Vocabulary("vocab.txt", b"", "wordpiece", (), True, 0, 1, CLS, SEP, 4, "")


def examples_of(lengths, sequences_per_example=1):
    """Returns examples of the given lengths. Token t of sequence i is 100 i + t + 1; the label of example i is i."""
    sequences = [
        {"input_ids": [100 * i + t + 1 for t in range(n)], "segment_ids": [t % 2 for t in range(n)]}
        for i, n in enumerate(lengths)
    ]
    labels = np.arange(len(lengths) // sequences_per_example, dtype=np.int32)
    return make_examples(sequences, {"labels": labels}, sequences_per_example)


def train_batches(examples, order, steps, shard=SINGLE_SHARD):
    return [make_batch(examples, *order.batch(step), shard) for step in steps]


def random_lengths(count, longest=99):
    return np.random.default_rng(0).integers(3, longest + 1, count)


def test_epochs_contain_every_example_once_in_an_order_that_does_not_depend_on_padding():
    examples = examples_of(random_lengths(70))
    orders = [EpochOrder(examples, Batching(8, bucket, 128), seed=3) for bucket in (0, 32)]
    assert orders[0].steps_per_epoch == 9
    epochs = [np.concatenate([orders[0].batch(9 * epoch + step)[0] for step in range(9)]) for epoch in range(2)]
    assert [sorted(indices[indices >= 0]) for indices in epochs] == [list(range(70))] * 2
    assert (epochs[0] != epochs[1]).any()
    for step in range(18):
        (padded, full_length), (bucketed, length) = (order.batch(step) for order in orders)
        np.testing.assert_array_equal(padded, bucketed)
        assert full_length == 128 and length % 32 == 0
        assert length - 32 < examples.lengths[bucketed].max() <= length


def test_batches_group_examples_of_similar_length():
    examples = examples_of(random_lengths(320))
    order = EpochOrder(examples, Batching(8, 32, 128), seed=0)
    shapes = order.shape_counts(order.steps_per_epoch).items()
    # A row has about half a bucket of padding. In batches of random examples, a row would be padded to the longest of
    # eight examples.
    assert sum(rows * length * steps for (rows, length), steps in shapes) / sum(examples.lengths) < 1.5


@pytest.mark.parametrize("examples_per_row", [1, 4])
@pytest.mark.parametrize("bucket", [0, 8, 16, 32, 48, 64])
def test_shape_counts_match_the_batches_before_a_step(bucket, examples_per_row):
    examples = examples_of(random_lengths(70))
    order = EpochOrder(examples, Batching(8, bucket, 128, examples_per_row), seed=3)
    shapes = [batch["input_ids"].shape for batch in train_batches(examples, order, range(45))]
    for step in (0, 1, 8, 9, 10, 20, 45):
        counts = order.shape_counts(step)
        assert sorted(shape for shape, steps in counts.items() for _ in range(steps)) == sorted(shapes[:step])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("examples_per_row", [1, 4])
def test_typical_step_has_a_full_batch_of_the_most_common_shape(seed, examples_per_row):
    # Twenty batches of short examples, one of long ones, and one with a single long example.
    examples = examples_of([*[20] * 160, *[100] * 9])
    order = EpochOrder(examples, Batching(8, 32, 128, examples_per_row), seed)
    indices, length = order.batch(order.typical_step())
    counts = order.shape_counts(order.steps_per_epoch)
    assert counts[len(indices), length] == max(counts.values())
    assert (indices >= 0).sum() == 8


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("examples_per_row", [1, 2])
def test_batches_of_shards_and_of_later_steps_match_the_full_run(parts, examples_per_row):
    examples, batching = examples_of(random_lengths(30)), Batching(8, 32, 128, examples_per_row)

    def batches(shard, start_step=0):
        return train_batches(examples, EpochOrder(examples, batching, 1), range(start_step, 10), shard)

    all_batches = batches(SINGLE_SHARD)
    shards = [batches(DataShard((index,), parts)) for index in range(parts)]
    np.testing.assert_equal([joined(step) for step in zip(*shards, strict=True)], all_batches)
    np.testing.assert_equal(batches(SINGLE_SHARD, start_step=6), all_batches[6:])
    for batch, with_gap in zip(all_batches, batches(DataShard((0, 3), 4)), strict=True):
        rows = np.arange(len(batch["input_ids"])).reshape(4, -1)[[0, 3]].reshape(-1)
        np.testing.assert_equal(with_gap, {name: values[rows] for name, values in batch.items()})


@pytest.mark.parametrize("sequences_per_example", [1, 4])
def test_evaluation_covers_each_example_once_and_restores_input_order(sequences_per_example):
    examples = examples_of(random_lengths(21 * sequences_per_example), sequences_per_example)
    outputs, rows = [], 0
    for batch in eval_batches(examples, Batching(8, 32, 128), SINGLE_SHARD):
        assert batch["input_ids"].shape[:-1] == ((8, sequences_per_example) if sequences_per_example > 1 else (8,))
        np.testing.assert_array_equal(batch["input_mask"] > 0, batch["input_ids"] > 0)
        first = batch["input_ids"].reshape(8, sequences_per_example, -1)[:, 0, 0]
        outputs.append({"example": batch["example"], "first": first})
        rows += int(batch["weights"].sum())
        padding = batch["weights"] == 0
        assert not batch["input_ids"][padding].any() and (batch["example"][padding] == -1).all()
    assert rows == 21
    assert in_input_order(outputs, 21)["first"] == [1 + 100 * index * sequences_per_example for index in range(21)]
    with pytest.raises(AssertionError, match="exactly once"):
        in_input_order(outputs[:-1], 21)


UNPACKED, PACKED = Batching(16, 32, 64), Batching(16, 32, 64, examples_per_row=4)


def test_packed_steps_have_the_same_complete_examples_as_unpacked_steps():
    examples = examples_of(random_lengths(70, 64))
    orders = (EpochOrder(examples, batching, 3) for batching in (UNPACKED, PACKED))
    batches = (train_batches(examples, order, range(12)) for order in orders)
    for unpacked, packed in zip(*batches, strict=True):
        used = packed["example"] >= 0
        np.testing.assert_array_equal(packed["weights"], used)
        assert sorted(packed["example"][used]) == sorted(unpacked["example"][unpacked["example"] >= 0])
        np.testing.assert_array_equal(packed["labels"][used], packed["example"][used])
        for row, slot in zip(*np.nonzero(used), strict=True):
            example = packed["example"][row, slot]
            (columns,) = np.nonzero(packed["sequence_ids"][row] == slot + 1)
            length = examples.lengths[example]
            assert columns.size == length and (np.diff(columns) == 1).all()
            np.testing.assert_array_equal(packed["input_ids"][row, columns], 100 * example + 1 + np.arange(length))
            np.testing.assert_array_equal(packed["segment_ids"][row, columns], np.arange(length) % 2)
            np.testing.assert_array_equal(packed["position_ids"][row, columns], np.arange(length))
        padding = packed["sequence_ids"] == 0
        assert not packed["input_ids"][padding].any()
        assert padding.sum() + sum(examples.lengths[packed["example"][used]]) == padding.size


def test_pack_batch_balances_the_lengths_of_rows():
    lengths = np.arange(1, 17)
    slots, tokens = pack_batch(lengths, Batching(16, 1, 64, examples_per_row=2))
    assert slots.shape == (8, 2) and tokens == 17
    assert lengths[slots].sum(axis=1).tolist() == [17] * 8
    slots, tokens = pack_batch(np.array([9, 2, 5]), Batching(16, 1, 64, examples_per_row=4))
    assert sorted(slots[slots != NO_EXAMPLE]) == [0, 1, 2] and slots.shape == (4, 4) and tokens == 9


def test_example_longer_than_the_row_is_truncated():
    examples = examples_of([9, 3])
    (batch,) = eval_batches(examples, Batching(2, 0, 5), SINGLE_SHARD)
    assert batch["input_ids"].tolist() == [[101, 102, 103, 0, 0], [1, 2, 3, 4, 5]]


def test_concatenate_keeps_the_order():
    a, b = examples_of([3, 5]), examples_of([4])
    both = concatenate([a, b])
    assert both.lengths.tolist() == [3, 5, 4]
    assert both.tokens["input_ids"][both.offsets[2] :].tolist() == [1, 2, 3, 4]
    assert a.fingerprint() != both.fingerprint() != concatenate([b, a]).fingerprint()


def test_pairs_are_truncated_as_in_run_classifier():
    for a, b, room in itertools.product(range(12), range(12), range(1, 15)):
        first, second = [7] * a, [8] * b
        while len(first) + len(second) > room:
            (first if len(first) > len(second) else second).pop()
        pair = encode_pair([7] * a, [8] * b, room + 3, VOCABULARY)
        assert pair["input_ids"] == [CLS, *first, SEP, *second, SEP]
        assert pair["segment_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert encode_pair([5, 6, 7], None, 4, VOCABULARY) == {"input_ids": [CLS, 5, 6, SEP], "segment_ids": [0] * 4}


def test_constant_prediction_uses_the_known_labels():
    assert constant_prediction(np.array([-1, 2, 1, 2, -1])).tolist() == [2] * 5
    assert constant_prediction(np.array([np.nan, 1.0, 4.0], np.float32)).tolist() == [2.5] * 3
    # Of three labeled rows, two have label 0, one has label 1, and none has label 2.
    labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [-1, -1, -1]])
    assert constant_prediction(labels).tolist() == [[1, 0, 0]] * 4


def test_truncated_pairs_are_counted_with_the_tokenizer_s_separators(letters):
    # RoBERTa's rows have two separators between the texts of a pair.
    tokenizer = Tokenizer(dataclasses.replace(load_vocabulary(letters), pair_separators=2))
    rows = [Row(line, {"a": "ab", "b": "c" * count}) for line, count in enumerate((1, 2), 2)]
    stats = ReadStats("file")
    arguments = ([("a", "b")], Target("label", ()), tokenizer, 7, stats)
    examples = encode_rows(rows, *arguments, labeled=False, training=False)
    assert stats.noted == {"truncated to 7 tokens": {"rows": 1, "first": "line 3"}}
    assert examples.lengths.tolist() == [7, 7]
    # Rows of single texts have no separators between texts.
    rows = [Row(line, {"a": "c" * count}) for line, count in enumerate((5, 6), 2)]
    stats = ReadStats("file")
    encode_rows(rows, [("a",)], Target("label", ()), tokenizer, 7, stats, labeled=False, training=False)
    assert stats.noted == {"truncated to 7 tokens": {"rows": 1, "first": "line 3"}}
