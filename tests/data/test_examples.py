"""Batches of fine-tuning examples: every one once, the same whatever the padding, the hosts, or where a run resumes."""

import numpy as np
import pytest

from bertjax.data.finetuning.epoch_order import TrainPlan, train_batches
from bertjax.data.finetuning.examples import (
    Batching,
    encode_pair,
    eval_batches,
    in_input_order,
    joined,
    make_examples,
    truncated_lengths,
)
from bertjax.data.shard import SINGLE_SHARD, DataShard

CLS, SEP = 1, 2


def made(lengths, choices=1):
    """Examples of these lengths; all tokens of sequence i are i + 10."""
    sequences = [{"input_ids": [i + 10] * n, "segment_ids": [0] * n} for i, n in enumerate(lengths)]
    return make_examples(sequences, {"labels": np.arange(len(lengths) // choices, dtype=np.int32)}, choices)


def lengths_of(count, seed=0):
    return np.random.default_rng(seed).integers(3, 100, count)


@pytest.mark.parametrize("bucket", [0, 32])
def test_an_epoch_takes_every_example_once_and_every_epoch_in_another_order(bucket):
    examples, batching = made(lengths_of(70)), Batching(batch_size=8, bucket=bucket, seq_len=128)
    plan = TrainPlan(examples, batching, seed=3)
    assert plan.steps_per_epoch == 9
    seen = [
        [int(label) for step in range(9 * epoch, 9 * epoch + 9) for label in plan.batch(step)[0]] for epoch in range(2)
    ]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(70))
    assert seen[0] != seen[1]


def test_the_padding_changes_neither_which_examples_share_a_batch_nor_their_tokens():
    examples = made(lengths_of(70))
    plans = [TrainPlan(examples, Batching(8, bucket, 128), seed=3) for bucket in (0, 32)]
    for step in range(18):
        (whole, full), (tight, length) = (plan.batch(step) for plan in plans)
        np.testing.assert_array_equal(whole, tight)
        assert full == 128 and length % 32 == 0
        assert length - 32 < examples.lengths[tight].max() <= length


def test_like_lengths_share_a_batch():
    examples = made(lengths_of(320))
    plan = TrainPlan(examples, Batching(8, 32, 128), seed=0)
    used = sum(examples.lengths)
    padded = sum(rows * length * steps for (rows, length), steps in plan.shapes(plan.steps_per_epoch).items())
    # At best half a bucket of padding a row is left; a random order would pad to the longest of eight.
    assert padded / used < 1.5


@pytest.mark.parametrize("bucket", [0, 8, 16, 32, 48, 64])
def test_work_is_counted_as_done(bucket):
    plan = TrainPlan(made(lengths_of(70)), Batching(8, bucket, 128), seed=3)
    for step in (0, 1, 8, 9, 10, 20, 45):
        counted = plan.shapes(step)
        assert sum(counted.values()) == step
        assert sum(length * steps for (_, length), steps in counted.items()) == sum(
            plan.batch(s)[1] for s in range(step)
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("examples_per_row", [1, 4])
def test_a_usual_batch_is_full_and_as_long_as_most(seed, examples_per_row):
    # Twenty batches of short examples, and two of long ones, one of which has few.
    examples = made([*[20] * 160, *[100] * 9])
    plan = TrainPlan(examples, Batching(8, 32, 128, examples_per_row), seed)
    chosen, length = plan.batch(plan.usual_step())
    shapes = plan.shapes(plan.steps_per_epoch)
    assert shapes[len(chosen), length] == max(shapes.values())
    assert (chosen >= 0).sum() == 8


@pytest.mark.parametrize("parts", [2, 4])
def test_shares_are_rows_of_the_same_batch(parts):
    examples, batching = made(lengths_of(30)), Batching(8, 32, 128)
    plan = TrainPlan(examples, batching, seed=1)
    alone = list(train_batches(examples, batching, plan, 8, 0, SINGLE_SHARD))
    shares = [list(train_batches(examples, batching, plan, 8, 0, DataShard((index,), parts))) for index in range(parts)]
    gaps = list(train_batches(examples, batching, plan, 8, 0, DataShard((0, 3), 4)))
    for step, batch in enumerate(alone):
        for name, whole in batch.items():
            np.testing.assert_array_equal(whole, np.concatenate([share[step][name] for share in shares]))
            np.testing.assert_array_equal(whole[[0, 1, 6, 7]], gaps[step][name])


def test_a_jump_gives_what_a_run_from_the_start_gives():
    examples, batching = made(lengths_of(30)), Batching(8, 32, 128)
    whole = list(train_batches(examples, batching, TrainPlan(examples, batching, 1), 10, 0, SINGLE_SHARD))
    later = list(train_batches(examples, batching, TrainPlan(examples, batching, 1), 10, 6, SINGLE_SHARD))
    for a, b in zip(whole[6:], later, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("choices", [1, 4])
def test_evaluation_takes_each_example_once_and_puts_outputs_in_input_order(choices):
    examples = made(lengths_of(21 * choices), choices)
    outputs, rows = [], 0
    for batch in eval_batches(examples, Batching(8, 32, 128), SINGLE_SHARD):
        assert batch["input_ids"].shape[:-1] == ((8, choices) if choices > 1 else (8,))
        np.testing.assert_array_equal(batch["input_mask"] > 0, batch["input_ids"] > 0)
        first = batch["input_ids"].reshape(8, choices, -1)[:, 0, 0]
        outputs.append({"example": batch["example"], "first": first})
        rows += int(batch["weights"].sum())
        padding = batch["weights"] == 0
        assert not batch["input_ids"][padding].any() and (batch["example"][padding] == -1).all()
    assert rows == 21
    assert in_input_order(outputs, 21)["first"] == [10 + index * choices for index in range(21)]
    with pytest.raises(AssertionError, match="exactly once"):
        in_input_order(outputs[:-1], 21)


def test_joined_sets_keep_their_order():
    a, b = made([3, 5]), made([4])
    both = joined([a, b])
    assert both.lengths.tolist() == [3, 5, 4]
    assert both.tokens["input_ids"][both.offsets[2] :].tolist() == [10] * 4
    assert a.fingerprint() != both.fingerprint() != joined([b, a]).fingerprint()


def test_a_pair_loses_tokens_of_the_longer_text_as_in_run_classifier():
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


def test_rows_of_one_and_of_two_texts():
    assert encode_pair([5, 6, 7], None, 4, CLS, SEP)["input_ids"] == [CLS, 5, 6, SEP]
    pair = encode_pair([5, 6], [7], 8, CLS, SEP)
    assert pair == {"input_ids": [CLS, 5, 6, SEP, 7, SEP], "segment_ids": [0, 0, 0, 0, 1, 1]}
