"""Tests of packed fine-tuning rows: each step has the same complete examples as without packing, in fewer positions."""

import numpy as np
import pytest
from unpacking import joined

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching, EpochOrder, pack_batch, train_batches
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.config import FinetuningData

UNPACKED, PACKED = Batching(16, 32, 64), Batching(16, 32, 64, examples_per_row=4)


def random_examples(count: int, max_length: int = 64) -> Examples:
    """Returns examples of random length; token t of example i is 100 i + t, and the label is i."""
    lengths = np.random.default_rng(5).integers(3, max_length + 1, count)
    sequences = [
        {"input_ids": [100 * i + t for t in range(n)], "segment_ids": [t % 2 for t in range(n)]}
        for i, n in enumerate(lengths)
    ]
    return make_examples(sequences, {"labels": np.arange(count, dtype=np.int32)})


def batches(examples: Examples, batching: Batching, start: int = 0, shard: DataShard = SINGLE_SHARD) -> list[dict]:
    return list(train_batches(examples, EpochOrder(examples, batching, 3), 12, start, shard))


def test_packed_steps_have_the_same_complete_examples_as_unpacked_steps():
    examples = random_examples(70)
    for unpacked, packed in zip(batches(examples, UNPACKED), batches(examples, PACKED), strict=True):
        used = packed["example"] >= 0
        np.testing.assert_array_equal(packed["weights"], used)
        assert sorted(packed["example"][used]) == sorted(unpacked["example"][unpacked["example"] >= 0])
        np.testing.assert_array_equal(packed["labels"][used], packed["example"][used])
        for row, slot in zip(*np.nonzero(used), strict=True):
            example = packed["example"][row, slot]
            (columns,) = np.nonzero(packed["sequence_ids"][row] == slot + 1)
            length = examples.lengths[example]
            assert columns.size == length and (np.diff(columns) == 1).all()
            np.testing.assert_array_equal(packed["input_ids"][row, columns], 100 * example + np.arange(length))
            np.testing.assert_array_equal(packed["segment_ids"][row, columns], np.arange(length) % 2)
            np.testing.assert_array_equal(packed["position_ids"][row, columns], np.arange(length))
        padding = packed["sequence_ids"] == 0
        assert not packed["input_ids"][padding].any()
        assert padding.sum() + sum(examples.lengths[packed["example"][used]]) == padding.size


def test_packing_saves_positions_for_short_examples_and_never_adds_any():
    def positions(max_length: int, batching: Batching) -> int:
        order = EpochOrder(random_examples(400, max_length), batching, 3)
        counts = order.shape_counts(order.steps_per_epoch)
        assert max(tokens for _, tokens in counts) <= 64
        return sum(rows * tokens * steps for (rows, tokens), steps in counts.items())

    unpacked, packed = ([positions(max_length, batching) for max_length in (15, 64)] for batching in (UNPACKED, PACKED))
    assert packed[0] < 0.6 * unpacked[0] and packed[1] <= unpacked[1]


def test_pack_batch_balances_the_lengths_of_rows():
    lengths = np.arange(1, 17)
    slots, tokens = pack_batch(lengths, Batching(16, 1, 64, examples_per_row=2))
    assert slots.shape == (8, 2) and tokens == 17
    assert lengths[slots].sum(axis=1).tolist() == [17] * 8
    slots, tokens = pack_batch(np.array([9, 2, 5]), Batching(16, 1, 64, examples_per_row=4))
    assert sorted(slots[slots != NO_EXAMPLE]) == [0, 1, 2] and slots.shape == (4, 4) and tokens == 9


@pytest.mark.parametrize("parts", [2, 4])
def test_batches_of_shards_and_of_later_steps_match_the_full_run(parts):
    examples = random_examples(70, max_length=15)
    all_batches = batches(examples, PACKED)
    shards = [batches(examples, PACKED, shard=DataShard((part,), parts)) for part in range(parts)]
    np.testing.assert_equal([joined(step) for step in zip(*shards, strict=True)], all_batches)
    np.testing.assert_equal(batches(examples, PACKED, start=7), all_batches[7:])


def test_shape_counts_match_the_batches_before_a_step():
    examples = random_examples(70)
    order = EpochOrder(examples, PACKED, 3)
    shapes = [batch["input_ids"].shape for batch in batches(examples, PACKED)]
    for step in (0, 1, 5, 6, 12):
        counts = order.shape_counts(step)
        assert sorted(shape for shape, steps in counts.items() for _ in range(steps)) == sorted(shapes[:step])


def test_examples_per_row_must_divide_the_batch_size():
    with pytest.raises(UsageError, match="examples_per_row is 3; it must divide config.data.batch_size=16"):
        FinetuningData(batch_size=16, examples_per_row=3)
