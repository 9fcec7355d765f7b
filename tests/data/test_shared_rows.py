"""Training rows that examples share: the same examples a step as alone, each whole, and fewer positions."""

import numpy as np
import pytest

from bertjax.data.finetuning.epoch_order import TrainPlan, train_batches
from bertjax.data.finetuning.examples import Batching, Examples, make_examples
from bertjax.data.finetuning.packed_rows import NOBODY, arranged
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError

ALONE, SHARED = Batching(16, 32, 64), Batching(16, 32, 64, examples_per_row=4)


def made(count: int, longest: int = 64) -> Examples:
    """Token t of example i is 100 i + t, its label i."""
    lengths = np.random.default_rng(5).integers(3, longest + 1, count)
    sequences = [
        {"input_ids": [100 * i + t for t in range(n)], "segment_ids": [t % 2 for t in range(n)]}
        for i, n in enumerate(lengths)
    ]
    return make_examples(sequences, {"labels": np.arange(count, dtype=np.int32)})


def batches(examples: Examples, batching: Batching, start: int = 0, share: DataShard = SINGLE_SHARD) -> list[dict]:
    return list(train_batches(examples, batching, TrainPlan(examples, batching, 3), 12, start, share))


def test_a_step_has_the_examples_it_has_alone_each_whole_and_with_its_label():
    examples = made(70)
    for alone, shared in zip(batches(examples, ALONE), batches(examples, SHARED), strict=True):
        there = shared["example"] >= 0
        np.testing.assert_array_equal(shared["weights"], there)
        assert sorted(shared["example"][there]) == sorted(alone["example"][alone["example"] >= 0])
        np.testing.assert_array_equal(shared["labels"][there], shared["example"][there])
        for row, slot in zip(*np.nonzero(there), strict=True):
            example = shared["example"][row, slot]
            (at,) = np.nonzero(shared["sequence_ids"][row] == slot + 1)
            length = examples.lengths[example]
            assert at.size == length and (np.diff(at) == 1).all()
            np.testing.assert_array_equal(shared["input_ids"][row, at], 100 * example + np.arange(length))
            np.testing.assert_array_equal(shared["segment_ids"][row, at], np.arange(length) % 2)
            np.testing.assert_array_equal(shared["position_ids"][row, at], np.arange(length))
        padding = shared["sequence_ids"] == 0
        assert not shared["input_ids"][padding].any()
        assert padding.sum() + sum(examples.lengths[shared["example"][there]]) == padding.size


def test_short_examples_take_fewer_positions_and_long_ones_no_more():
    def positions(longest: int, batching: Batching) -> int:
        plan = TrainPlan(made(400, longest), batching, 3)
        shapes = plan.shapes(plan.steps_per_epoch)
        assert max(tokens for _, tokens in shapes) <= 64
        return sum(rows * tokens * steps for (rows, tokens), steps in shapes.items())

    alone, shared = ([positions(longest, batching) for longest in (15, 64)] for batching in (ALONE, SHARED))
    assert shared[0] < 0.6 * alone[0] and shared[1] <= alone[1]


def test_lengths_are_dealt_out_evenly():
    lengths = np.arange(1, 17)
    places, tokens = arranged(lengths, Batching(16, 1, 64, examples_per_row=2))
    assert places.shape == (8, 2) and tokens == 17
    assert lengths[places].sum(axis=1).tolist() == [17] * 8
    few, tokens = arranged(np.array([9, 2, 5]), Batching(16, 1, 64, examples_per_row=4))
    assert sorted(few[few != NOBODY]) == [0, 1, 2] and few.shape == (4, 4) and tokens == 9


@pytest.mark.parametrize("parts", [2, 4])
def test_shares_and_jumps_give_the_rows_of_the_whole(parts):
    examples = made(70, longest=15)
    whole = batches(examples, SHARED)
    shares = [batches(examples, SHARED, share=DataShard((part,), parts)) for part in range(parts)]
    for step, batch in enumerate(whole):
        for name, values in batch.items():
            np.testing.assert_array_equal(values, np.concatenate([share[step][name] for share in shares]))
    for batch, later in zip(whole[7:], batches(examples, SHARED, start=7), strict=True):
        for name, values in batch.items():
            np.testing.assert_array_equal(values, later[name])


def test_work_is_counted_as_done():
    plan, examples = TrainPlan(made(70), SHARED, 3), made(70)
    done = [batch["input_ids"].shape for batch in batches(examples, SHARED)]
    for step in (0, 1, 5, 6, 12):
        counted = plan.shapes(step)
        assert sorted(shape for shape, steps in counted.items() for _ in range(steps)) == sorted(done[:step])


@pytest.mark.parametrize("many", [0, 3])
def test_a_number_that_does_not_divide_the_batch_is_refused(many):
    with pytest.raises(UsageError, match=f"examples_per_row is {many}; it must divide data.batch_size=16"):
        Batching(16, 32, 64, many)
