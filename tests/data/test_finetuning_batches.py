"""Tests of fine-tuning batches: each example once per epoch, independent of padding, hosts and resumption."""

from types import SimpleNamespace

import numpy as np
import pytest
from unpacking import joined

from bertjax.data.finetuning.batches import Batching, EpochOrder, eval_batches, in_input_order, train_batches
from bertjax.data.finetuning.examples import (
    concatenate,
    constant_prediction,
    encode_pair,
    make_examples,
    truncated_lengths,
)
from bertjax.data.shard import SINGLE_SHARD, DataShard

CLS, SEP = 1, 2
VOCABULARY = SimpleNamespace(cls_id=CLS, sep_id=SEP)


def make_constant_examples(lengths, sequences_per_example=1):
    """Returns examples of the given lengths; all token ids of sequence i are i + 10."""
    sequences = [{"input_ids": [i + 10] * n, "segment_ids": [0] * n} for i, n in enumerate(lengths)]
    labels = np.arange(len(lengths) // sequences_per_example, dtype=np.int32)
    return make_examples(sequences, {"labels": labels}, sequences_per_example)


def random_lengths(count):
    return np.random.default_rng(0).integers(3, 100, count)


@pytest.mark.parametrize("bucket", [0, 32])
def test_epochs_contain_every_example_once_in_different_order(bucket):
    examples, batching = make_constant_examples(random_lengths(70)), Batching(batch_size=8, bucket=bucket, seq_len=128)
    order = EpochOrder(examples, batching, seed=3)
    assert order.steps_per_epoch == 9
    seen = [
        [index for step in range(9 * epoch, 9 * epoch + 9) for index in order.batch(step)[0].tolist() if index >= 0]
        for epoch in range(2)
    ]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(70))
    assert seen[0] != seen[1]


def test_padding_does_not_change_the_order_of_examples():
    examples = make_constant_examples(random_lengths(70))
    orders = [EpochOrder(examples, Batching(8, bucket, 128), seed=3) for bucket in (0, 32)]
    for step in range(18):
        (padded, full_length), (bucketed, length) = (order.batch(step) for order in orders)
        np.testing.assert_array_equal(padded, bucketed)
        assert full_length == 128 and length % 32 == 0
        assert length - 32 < examples.lengths[bucketed].max() <= length


def test_batches_group_examples_of_similar_length():
    examples = make_constant_examples(random_lengths(320))
    order = EpochOrder(examples, Batching(8, 32, 128), seed=0)
    tokens = sum(examples.lengths)
    positions = sum(
        rows * length * steps for (rows, length), steps in order.shape_counts(order.steps_per_epoch).items()
    )
    # A row has about half a bucket of padding. In batches of random examples, a row would be padded to the longest of
    # eight examples.
    assert positions / tokens < 1.5


@pytest.mark.parametrize("bucket", [0, 8, 16, 32, 48, 64])
def test_shape_counts_match_the_batches_before_a_step(bucket):
    order = EpochOrder(make_constant_examples(random_lengths(70)), Batching(8, bucket, 128), seed=3)
    for step in (0, 1, 8, 9, 10, 20, 45):
        counts = order.shape_counts(step)
        assert sum(counts.values()) == step
        length_sum = sum(length * steps for (_, length), steps in counts.items())
        assert length_sum == sum(order.batch(s)[1] for s in range(step))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("examples_per_row", [1, 4])
def test_typical_step_has_a_full_batch_of_the_most_common_shape(seed, examples_per_row):
    # Twenty batches of short examples, one of long ones, and one with a single long example.
    examples = make_constant_examples([*[20] * 160, *[100] * 9])
    order = EpochOrder(examples, Batching(8, 32, 128, examples_per_row), seed)
    indices, length = order.batch(order.typical_step())
    counts = order.shape_counts(order.steps_per_epoch)
    assert counts[len(indices), length] == max(counts.values())
    assert (indices >= 0).sum() == 8


@pytest.mark.parametrize("parts", [2, 4])
def test_shards_are_rows_of_the_same_batch(parts):
    examples, batching = make_constant_examples(random_lengths(30)), Batching(8, 32, 128)
    order = EpochOrder(examples, batching, seed=1)
    global_batches = list(train_batches(examples, order, 8, 0, SINGLE_SHARD))
    shards = [list(train_batches(examples, order, 8, 0, DataShard((index,), parts))) for index in range(parts)]
    with_gap = list(train_batches(examples, order, 8, 0, DataShard((0, 3), 4)))
    np.testing.assert_equal([joined(step) for step in zip(*shards, strict=True)], global_batches)
    rows = [{name: values[[0, 1, 6, 7]] for name, values in batch.items()} for batch in global_batches]
    np.testing.assert_equal(with_gap, rows)


def test_batches_from_a_later_step_match_batches_from_the_start():
    examples, batching = make_constant_examples(random_lengths(30)), Batching(8, 32, 128)
    all_batches = list(train_batches(examples, EpochOrder(examples, batching, 1), 10, 0, SINGLE_SHARD))
    later_batches = list(train_batches(examples, EpochOrder(examples, batching, 1), 10, 6, SINGLE_SHARD))
    np.testing.assert_equal(later_batches, all_batches[6:])


@pytest.mark.parametrize("sequences_per_example", [1, 4])
def test_evaluation_covers_each_example_once_and_restores_input_order(sequences_per_example):
    examples = make_constant_examples(random_lengths(21 * sequences_per_example), sequences_per_example)
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
    assert in_input_order(outputs, 21)["first"] == [10 + index * sequences_per_example for index in range(21)]
    with pytest.raises(AssertionError, match="exactly once"):
        in_input_order(outputs[:-1], 21)


def test_concatenate_keeps_the_order():
    a, b = make_constant_examples([3, 5]), make_constant_examples([4])
    both = concatenate([a, b])
    assert both.lengths.tolist() == [3, 5, 4]
    assert both.tokens["input_ids"][both.offsets[2] :].tolist() == [10] * 4
    assert a.fingerprint() != both.fingerprint() != concatenate([b, a]).fingerprint()


def test_truncated_lengths_match_run_classifier():
    def reference(a, b, total):
        while a + b > total:
            if a > b:
                a -= 1
            else:
                b -= 1
        return a, b

    for a in range(12):
        for b in range(12):
            for total in range(1, 15):
                assert truncated_lengths(a, b, total) == reference(a, b, total), (a, b, total)


def test_encode_pair_truncates_text_and_adds_special_tokens():
    assert encode_pair([5, 6, 7], None, 4, VOCABULARY)["input_ids"] == [CLS, 5, 6, SEP]
    pair = encode_pair([5, 6], [7], 8, VOCABULARY)
    assert pair == {"input_ids": [CLS, 5, 6, SEP, 7, SEP], "segment_ids": [0, 0, 0, 0, 1, 1]}


def test_constant_prediction_uses_the_known_labels():
    assert constant_prediction(np.array([-1, 2, 1, 2, -1])).tolist() == [2] * 5
    assert constant_prediction(np.array([np.nan, 1.0, 4.0], np.float32)).tolist() == [2.5] * 3
    # Of three labeled rows, two have label 0, one has label 1, and none has label 2.
    labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [-1, -1, -1]])
    assert constant_prediction(labels).tolist() == [[1, 0, 0]] * 4
