"""Tests of pre-training batches: they depend only on corpus, seed and step, and epochs and evaluations are complete."""

import dataclasses
import itertools
import os
import resource

import numpy as np
import pytest
from helpers.commanding import refused
from helpers.small_corpora import pretraining_batches, token_offsets, write_corpus
from helpers.unpacking import joined, unmasked_ids

from bertjax.data.corpus.store import map_array
from bertjax.data.pretraining.baseline import token_frequency_baseline
from bertjax.data.pretraining.batches import eval_dataset
from bertjax.data.pretraining.config import Masking, Phase, RowFormat
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.rows import epoch_order, stream_key, without_copy
from bertjax.data.schema import is_token
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError

SEQ_LEN, BATCH, PREDICTIONS = 48, 8, 8
PHASE = Phase(SEQ_LEN, BATCH, PREDICTIONS, start_step=0, stop_step=1 << 40)
FORMATS = {
    "nsp": RowFormat("next_sentence"),
    "packed": RowFormat("next_sentence", packed=True),
    "none": RowFormat(),
    "documents": RowFormat(packed=True),
}


def train(corpus, steps, phase=PHASE, objective="nsp", **arguments):
    phase = dataclasses.replace(phase, row_format=FORMATS[objective])
    dataset = pretraining_batches(corpus, phase, **arguments)
    return list(itertools.islice(dataset.as_numpy_iterator(), steps))


def evaluate(corpus, objective="nsp", batch_size=BATCH, shard=SINGLE_SHARD, **arguments):
    phase = dataclasses.replace(PHASE, batch_size=batch_size, row_format=FORMATS[objective])
    return list(eval_dataset(corpus, phase, shard=shard, **arguments).as_numpy_iterator())


def traced_offsets(corpus, split, batches) -> list[np.ndarray]:
    """Returns the offsets of each row's tokens in the split, without special tokens."""
    return [row[row >= 0] for row in token_offsets(corpus, split, unmasked_ids(joined(batches)))]


@pytest.mark.ci
@pytest.mark.parametrize(
    "objective, parts",
    [("nsp", [(0,), (1,), (2,), (3,)]), ("packed", [(0, 1, 3), (2,)]), ("documents", [(0, 1, 3), (2,)])],
)
def test_shards_together_hold_the_rows_of_the_global_batch(traced, objective, parts):
    arguments = {"objective": objective, "phase": dataclasses.replace(PHASE, masking=Masking(whole_word=True))}
    count = sum(map(len, parts))
    shards = [DataShard(indices, count) for indices in parts]
    order = np.argsort(np.concatenate([shard.rows(BATCH) for shard in shards]))
    batches = [train(traced, 5, shard=shard, **arguments) for shard in shards]
    together = [{name: rows[order] for name, rows in joined(step).items()} for step in zip(*batches, strict=True)]
    np.testing.assert_equal(together, train(traced, 5, **arguments))


@pytest.mark.ci
@pytest.mark.parametrize("objective", FORMATS)
def test_dataset_from_a_later_step_continues_the_same_batches(traced, objective):
    stream = train(traced, 40, objective=objective)
    for step in (17, 39):
        np.testing.assert_equal(train(traced, 40 - step, objective=objective, start_step=step), stream[step:])
    other_seed = train(traced, 1, objective=objective, seed=1)
    assert not np.array_equal(stream[0]["input_ids"], other_seed[0]["input_ids"])
    # Rows of late epochs also differ from each other.
    late = train(traced, 3, objective=objective, start_step=1_000_000)
    np.testing.assert_equal(train(traced, 1, objective=objective, start_step=1_000_002), late[2:])
    assert len({row.tobytes() for row in joined(late)["input_ids"]}) == 3 * BATCH


def test_phases_have_different_batches_and_can_start_at_a_later_step(traced):
    phases = (
        Phase(SEQ_LEN, 8, PREDICTIONS, start_step=0, stop_step=6),
        Phase(SEQ_LEN, 8, PREDICTIONS, start_step=6, stop_step=10),
    )
    first, second = (train(traced, 100, phase=phase, start_step=phase.start_step) for phase in phases)
    assert (len(first), len(second)) == (6, 4)
    assert not np.array_equal(first[0]["input_ids"], second[0]["input_ids"])
    np.testing.assert_equal(train(traced, 100, phase=phases[1], start_step=8), second[2:])


def test_epochs_are_different_permutations():
    pass_ends = np.array([1000, 1900, 3001])
    rows, epochs = epoch_order(pass_ends, stream_key(0))(np.arange(6002))
    rows, epochs = rows.numpy(), epochs.numpy()
    starts = [0, 1000, 1900]
    orders = []
    for epoch in range(6):
        found = rows[epochs == epoch]
        start, end = starts[epoch % 3], pass_ends[epoch % 3]
        np.testing.assert_array_equal(np.sort(found), np.arange(start, end))
        orders.append((found - start) / (end - start))
    np.testing.assert_array_equal(epochs, np.repeat(np.arange(6), np.diff([0, *pass_ends]).tolist() * 2))
    for order, other in itertools.combinations(orders, 2):
        size = min(len(order), len(other))
        assert abs(np.corrcoef(order[:size], other[:size])[0, 1]) < 0.15


def test_neighboring_rows_of_an_epoch_are_uncorrelated():
    count = 1_000_000
    order = epoch_order(np.array([count]), stream_key(0))
    rows = order(np.arange(100_000))[0].numpy()
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 0.02
    distances = np.bincount((rows[1:] - rows[:-1]) % count * 20 // count)
    assert distances == pytest.approx(5000, rel=0.08)
    later = order(np.arange(100_000) + count)[0].numpy()
    assert abs(np.corrcoef(rows, later)[0, 1]) < 0.02


@pytest.mark.ci
def test_repeated_pass_has_new_masks_and_truncation(traced):
    count = len(open_pair_index(traced, "train", SEQ_LEN, 0, 1).records)
    batches = train(traced, -(-2 * count // BATCH), dupe_factor=1)
    rows, offsets = joined(batches), traced_offsets(traced, "train", batches)
    starts, masks = [row[0] for row in offsets], rows["masked_lm_positions"].tolist()
    # Truncation usually moves the start of a row by only a few tokens, so start // 4 often identifies the pair.
    first, second = ({starts[row] // 4: row for row in range(begin, begin + count)} for begin in (0, count))
    both = [(first[key], second[key]) for key in first.keys() & second.keys()]
    assert len(both) > count / 4
    assert sum(starts[row] == starts[again] for row, again in both) < 0.95 * len(both)
    assert sum(masks[row] == masks[again] for row, again in both) < 0.05 * len(both)


def test_epoch_without_sentence_pairs_holds_every_token_once(traced):
    size, width = len(traced.train.tokens), SEQ_LEN - 2
    count = -(-size // width)
    batches = train(traced, -(-2 * count // BATCH), objective="none")
    rows = traced_offsets(traced, "train", batches)
    epochs = [rows[:count], rows[count : 2 * count]]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(size))
        assert sum(len(row) != width for row in epoch) == 1
        for row in epoch:
            np.testing.assert_array_equal(row, (row[0] + np.arange(len(row))) % size)
    starts = [{int(row[0]) for row in epoch} for epoch in epochs]
    assert len(starts[0] & starts[1]) <= count // 10
    together = joined(batches)
    assert (together["next_sentence_labels"] == -1).all() and not together["segment_ids"].any()
    assert (together["input_ids"][together["input_mask"] == 0] == traced.vocabulary().pad_id).all()


@pytest.mark.ci
@pytest.mark.parametrize("objective", ["nsp", "none", "documents"])
def test_evaluation_contains_every_row_once_with_fixed_masks(traced, objective):
    batches = evaluate(traced, objective)
    whole = joined(batches)
    real = is_token(whole).any(axis=1)
    count = int(real.sum())
    assert real[:count].all() and count % BATCH != 0
    for name, array in whole.items():
        assert (array[~real] == (-1 if name == "next_sentence_labels" else 0)).all()
    first_tokens = [row[0] for row in traced_offsets(traced, "heldout", batches)[:count]]
    assert len(set(first_tokens)) == count
    if objective != "documents":
        assert (np.diff(first_tokens) > 0).all()
    if objective in ("none", "documents"):
        tokens = np.concatenate(traced_offsets(traced, "heldout", batches))
        np.testing.assert_array_equal(np.sort(tokens), np.arange(len(traced.heldout.tokens)))
    # Neither the batch size nor the number of hosts changes a row.
    for name, array in joined(evaluate(traced, objective, batch_size=2 * BATCH)).items():
        np.testing.assert_array_equal(array[:count], whole[name][:count])
    parts = [evaluate(traced, objective, shard=DataShard((index,), 4)) for index in range(4)]
    np.testing.assert_equal([joined(step) for step in zip(*parts, strict=True)], batches)


def test_max_rows_selects_rows_from_the_whole_split(traced):
    batches = evaluate(traced, max_rows=11)
    real = joined(batches)["input_mask"].any(axis=1)
    assert real.sum() == 11 and len(real) == 2 * BATCH
    first_tokens = np.array([row[0] for row in traced_offsets(traced, "heldout", batches)[:11]])
    assert (np.diff(first_tokens) > 0).all()
    assert first_tokens[-1] > 0.8 * len(traced.heldout.tokens)


def test_memory_mapped_array_becomes_a_tensor_without_a_copy(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens")
    array = map_array(tmp_path / "tokens", np.dtype(np.uint16))
    tensor = without_copy(array)
    np.testing.assert_array_equal(tensor, np.arange(1000))
    array[500] = 7
    assert tensor[500].numpy() == 7
    (tmp_path / "tokens").write_bytes(b"")
    assert map_array(tmp_path / "tokens", np.dtype(np.uint16)).size == 0


def test_corpus_larger_than_memory_is_read(traced, tmp_path):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open(tmp_path / "tokens", "wb") as file:
        file.truncate(2 * memory)
    tokens = map_array(tmp_path / "tokens", np.dtype(np.uint16))
    huge = dataclasses.replace(traced, train=dataclasses.replace(traced.train, tokens=tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = train(huge, 50, phase=dataclasses.replace(PHASE, seq_len=512), objective="none", start_step=1_000_000)
    assert len(batches) == 50
    grown_kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kibibytes < 1 << 18


@pytest.mark.parametrize("predictions", [0, 65])
def test_number_of_predictions_out_of_range_is_rejected(predictions):
    with pytest.raises(UsageError, match=f"max_predictions={predictions} is out of range"):
        Phase(64, 8, predictions, 0, 1)


@pytest.mark.parametrize(
    ("objective", "split", "needed"), [("nsp", "heldout", 2), ("none", "heldout", 1), ("nsp", "train", 2)]
)
def test_missing_documents_are_rejected_before_a_workdir_is_created(
    make_corpus, tmp_path, capfd, objective, split, needed
):
    splits = {"train": [[3, 4], [5]], "heldout": [[3, 4], [5]], split: [[5]] * (needed - 1)}
    path, full = make_corpus(**splits).path, make_corpus([[3, 4], [5]]).path
    message = f"{split} split of the corpus {path} has {needed - 1} documents, but needs at least {needed}"
    config = f"pretrain:size=L1_H16,quick=true,objective={objective},corpus={path}"
    assert message in refused(capfd, "train", "--config", config, "--workdir", tmp_path / "run")
    if objective == "none":
        config = f"adapt:size=L1_H16,quick=true,corpus={full},replay={path}:0.5"
        assert message in refused(capfd, "train", "--config", config, "--workdir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_baseline_predicts_by_the_frequencies_of_training_tokens(tmp_path):
    splits = {"train": ([1, 1, 1, 2], [[4]]), "heldout": ([1, 2, 2, 2], [[4]])}
    corpus = write_corpus(tmp_path / "corpus", splits, vocabulary_size=12)
    values = token_frequency_baseline(corpus, [np.array([1, 2]), np.array([1])])
    assert values["accuracy"] == pytest.approx(2 / 3)
    # With add-one smoothing over 12 pieces, piece 1 has frequency (3 + 1) / (4 + 12), and piece 2 has 2 / 16.
    assert values["loss"] == pytest.approx(-(2 * np.log(4 / 16) + np.log(2 / 16)) / 3)
    assert values["heldout_entropy"] == pytest.approx(-(np.log(1 / 4) + 3 * np.log(3 / 4)) / 4)
