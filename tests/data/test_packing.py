"""Tests of packed pre-training rows: an epoch has the same pairs as without packing, or all documents, each once."""

import itertools

import numpy as np
import pytest
from helpers.small_corpora import pretraining_batches, token_offsets
from helpers.unpacking import joined, unmasked_ids, unpacked

from bertjax.data.corpus.store import map_array
from bertjax.data.pretraining.config import Masking, Phase, RowFormat, num_predictions
from bertjax.data.pretraining.pair_index import PairIndex, open_pair_index, pack_pairs
from bertjax.data.pretraining.pairs import RECORD, document_pieces
from bertjax.data.pretraining.rows import pair_lookup

SEQ_LEN, BATCH, PREDICTIONS, MAX_PAIRS = 64, 8, 7, 8
MASKING = Masking()


def packed_phase(pairing="next_sentence", masking=MASKING, predictions=PREDICTIONS, packed=True) -> Phase:
    return Phase(SEQ_LEN, BATCH, predictions, 0, 1 << 40, RowFormat(pairing, packed), masking)


def short_documents(count: int, seed: int) -> list[list[int]]:
    """Draws sentence lengths of documents, most of which are shorter than a row."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 14, rng.integers(1, 9)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def short_corpus(make_corpus):
    """Returns a corpus of short documents in which all tokens of a split have different ids."""
    return make_corpus(short_documents(120, 1), short_documents(20, 2), unique=True)


def rows_of(lengths: list[int], room: int, most: int, seed: int = 0) -> list[list[int]]:
    """Packs pairs of these lengths and returns the indices of the pairs of each row."""
    order, numbers = pack_pairs(np.array(lengths), room, most, np.random.default_rng(seed))
    sizes = np.repeat(np.arange(most + 1), numbers)
    assert sizes.sum() == len(lengths)
    return [part.tolist() for part in np.split(order, np.cumsum(sizes)[:-1])]


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([4, 6, 5, 5], 4, [[0, 1], [2, 3]]),
        ([6, 7, 3, 4], 4, [[0, 3], [1, 2]]),
        # The pair of 4 tokens shares a row with the pair of 6, not of 5, because this leaves the least room.
        ([6, 5, 4], 4, [[0, 2], [1]]),
        ([3, 3, 3], 4, [[0, 1, 2]]),
        ([2, 2, 2, 2], 2, [[0, 1], [2, 3]]),
        ([7, 2, 2, 2, 2], 4, [[0, 1], [2, 3, 4]]),
    ],
)
def test_pairs_go_to_the_fullest_row_with_room(lengths, most, expected):
    def by_length(rows):
        return sorted(sorted(lengths[pair] for pair in row) for row in rows)

    assert by_length(rows_of(lengths, 10, most)) == by_length(expected)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_every_pair_once_and_cannot_be_merged(most, seed):
    rng = np.random.default_rng(seed)
    room = 40
    lengths = np.minimum(room, 5 + rng.geometric(0.08, 500)).tolist()
    rows = rows_of(lengths, room, most, seed)
    assert sorted(itertools.chain(*rows)) == list(range(500))
    used = np.array([sum(lengths[pair] for pair in row) for row in rows])
    counts = np.array([len(row) for row in rows])
    assert used.max() <= room and counts.max() <= most
    assert (np.diff(counts) >= 0).all()
    open_rows = np.sort(used[counts == 1]) if most > 1 else np.array([room, room])
    assert open_rows.size < 2 or open_rows[0] + open_rows[1] > room


def test_pairs_of_equal_length_are_combined_randomly():
    lengths = [30] * 50 + [34] * 50
    first, second = (rows_of(lengths, 64, 8, seed) for seed in (0, 1))
    assert [len(row) for row in first] == [2] * 50
    assert {frozenset(row) for row in first} != {frozenset(row) for row in second}


def test_packed_rows_can_be_looked_up_in_any_order(tmp_path):
    runs = np.array([[3, 1], [2, 2], [1, 3], [2, 1], [2, 3]])
    sizes = np.repeat(runs[:, 1], runs[:, 0])
    expected = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    records = np.zeros(sizes.sum(), RECORD)
    records["b_start"] = np.arange(records.size) + (1 << 40)
    records.tofile(tmp_path / "pairs")
    index = PairIndex(map_array(tmp_path / "pairs", RECORD), np.array([len(sizes)]), runs)
    rows = np.array([9, 0, 4, 5, 5, 8, 2])
    spans = pair_lookup(index, 3)(rows, np.zeros_like(rows))
    np.testing.assert_array_equal(spans.b_start - (1 << 40), np.concatenate([expected[row] for row in rows]))
    assert spans.slots.numpy().tolist() == [3 * row + nth for row, n in enumerate(sizes[rows]) for nth in range(n)]


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("rate", [0.15, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("predictions", [1, 7, 64])
def test_predictions_of_a_packed_row_stay_within_the_maximum(rate, predictions, paired):
    numbers = num_predictions(rate, SEQ_LEN, predictions)
    # `most[n]` is the maximum number of predictions in a row whose pairs have n tokens in total.
    most = np.zeros(SEQ_LEN + 1, int)
    for _ in range(MAX_PAIRS):
        most = np.array(
            [
                max([most[n], *(most[n - k] + numbers[k] for k in range(5 if paired else 3, n + 1))])
                for n in range(SEQ_LEN + 1)
            ]
        )
    limit = packed_phase("next_sentence" if paired else "", Masking(rate), predictions).row_predictions
    assert most[SEQ_LEN] <= limit <= max(most[SEQ_LEN] + MAX_PAIRS / 2, 1)


def train(corpus, steps, dupe_factor=1, **options):
    dataset = pretraining_batches(corpus, packed_phase(**options), dupe_factor=dupe_factor)
    return list(itertools.islice(dataset.as_numpy_iterator(), steps))


@pytest.mark.parametrize("packed", [False, True])
def test_epoch_has_each_pair_in_one_row_without_further_truncation(make_corpus, monkeypatch, packed):
    monkeypatch.setattr("bertjax.data.pretraining.pairs._MAX_PAIRS", 100)  # The pairs are packed in several blocks.
    corpus = make_corpus(short_documents(120, 1), unique=True)
    records = np.array(open_pair_index(corpus, "train", SEQ_LEN, 0, 1).records)
    rows = int(open_pair_index(corpus, "train", SEQ_LEN, 0, 1, MAX_PAIRS if packed else 1).pass_ends[-1])
    assert rows < 0.8 * len(records) if packed else rows == len(records)
    all_rows = joined(train(corpus, -(-2 * rows // BATCH), packed=packed))
    vocabulary = corpus.vocabulary()
    offset = token_offsets(corpus, "train", np.arange(vocabulary.size))
    for epoch in range(2):
        pairs = {name: array[epoch * rows : (epoch + 1) * rows] for name, array in all_rows.items()}
        pairs = unpacked(pairs) if packed else pairs
        assert len(pairs["input_ids"]) == len(records)
        ids = unmasked_ids(pairs)
        # Find the record of each pair from its tokens, which are all different.
        found = []
        for pair, length in enumerate(pairs["input_mask"].sum(1)):
            b_length = int(pairs["segment_ids"][pair, :length].sum()) - 1
            a_end = int(length) - b_length - 2
            assert pairs["segment_ids"][pair, :length].tolist() == [0] * (a_end + 1) + [1] * (b_length + 1)
            assert ids[pair, [0, a_end, length - 1]].tolist() == [vocabulary.cls_id, *[vocabulary.sep_id] * 2]
            a, b = offset[ids[pair, 1:a_end]], offset[ids[pair, a_end + 1 : length - 1]]
            for side in (a, b):
                np.testing.assert_array_equal(side, side[0] + np.arange(side.size))
            inside = (records["a_start"] <= a[0]) & (a[-1] < records["a_start"] + records["a_length"])
            inside &= (records["b_start"] <= b[0]) & (b[-1] < records["b_start"] + records["b_length"])
            inside &= records["label"] == pairs["next_sentence_labels"][pair]
            (index,) = np.flatnonzero(inside)
            assert length == min(records["a_length"][index] + records["b_length"][index], SEQ_LEN - 3) + 3
            found.append(index)
        assert sorted(found) == list(range(len(records)))
    assert not np.array_equal(all_rows["input_ids"][0], all_rows["input_ids"][rows])


@pytest.mark.parametrize("max_tokens", [8, 20, 62, 1000])
@pytest.mark.parametrize("at_once", [1 << 18, 50])
def test_document_pieces_contain_each_token_once_and_prefer_sentence_ends(monkeypatch, max_tokens, at_once):
    monkeypatch.setattr("bertjax.data.pretraining.pairs._MAX_PAIRS", at_once)
    lengths = [[0], [70, 3], *short_documents(50, 5), [0, 2, 0, 90, 0], [max_tokens], [1] * 100]
    sentences = np.cumsum([0, *itertools.chain(*lengths)])
    documents = np.cumsum([0, *map(len, lengths)])
    found = [
        np.sort(np.concatenate([*document_pieces(sentences, documents, max_tokens, np.random.default_rng(seed))]))
        for seed in (0, 1)
    ]
    for pieces in found:
        starts, sizes = pieces["a_start"], pieces["a_length"]
        assert sizes.max() <= max_tokens and sizes.min() > 0 and (pieces["label"] == -1).all()
        np.testing.assert_array_equal(starts, np.cumsum([0, *sizes[:-1]]))
        assert starts[-1] + sizes[-1] == sentences[-1]
        for first, last in itertools.pairwise(sentences[documents]):
            inside = (starts >= first) & (starts < last)
            assert (last == first or first in starts) and (last - first > max_tokens or inside.sum() <= 1)
        ends = starts + sizes
        bounds = sentences[documents]
        inner = ~np.isin(starts, bounds) & ~np.isin(ends, bounds)
        has_end = np.isin(ends, sentences)
        near = ends - sentences[np.searchsorted(sentences, ends, side="right") - 1] + max_tokens - sizes
        # Between the first and the last piece, a piece ends with the last sentence if less than 1/16 remains free.
        assert (has_end | (sizes == max_tokens))[inner].all()
        assert ((near > max_tokens // 16) != has_end)[inner].all()
    assert np.array_equal(*found) == (max_tokens == 1000)


def test_epoch_has_every_piece_of_a_document_in_one_row(make_corpus):
    lengths = [*short_documents(60, 1), [12] * 30, [100]]
    corpus = make_corpus(lengths, short_documents(4, 2), unique=True)
    index = open_pair_index(corpus, "train", SEQ_LEN, 0, 2, MAX_PAIRS, "")
    bounds = np.asarray(corpus.train.sentences)[np.asarray(corpus.train.documents)]
    rows = int(index.pass_ends[-1])
    batch = joined(train(corpus, -(-rows // BATCH), pairing="", dupe_factor=2))
    assert (batch["next_sentence_labels"] == -1).all() and not batch["segment_ids"].any()
    pieces = []
    for first, last in itertools.pairwise([0, *index.pass_ends]):
        documents = unpacked({name: array[first:last] for name, array in batch.items()})
        numbers = documents["input_mask"].sum(1)
        assert numbers.sum() > 0.9 * SEQ_LEN * (last - first)
        offsets = []
        for ids, number in zip(unmasked_ids(documents), numbers, strict=True):
            assert ids[0] == corpus.vocabulary().cls_id and ids[number - 1] == corpus.vocabulary().sep_id
            offsets.append(token_offsets(corpus, "train", ids[1 : number - 1]))
            np.testing.assert_array_equal(offsets[-1], offsets[-1][0] + np.arange(number - 2))
            assert np.unique(np.searchsorted(bounds, offsets[-1], side="right")).size == 1
        np.testing.assert_array_equal(np.sort(np.concatenate(offsets)), np.arange(bounds[-1]))
        pieces.append({(part[0], part[-1]) for part in offsets})
    # Only the pieces of long documents differ between passes.
    whole = {(first, last - 1) for first, last in itertools.pairwise(bounds.tolist()) if last - first <= SEQ_LEN - 2}
    assert whole <= pieces[0] & pieces[1] and pieces[0] != pieces[1]


@pytest.mark.parametrize("pairing", ["next_sentence", ""])
@pytest.mark.parametrize("choice, full", [({}, 0.98), ({"whole_word": True}, 0.8), ({"max_span": 3}, 0.4)])
def test_spans_of_packed_rows_are_masked_like_unpacked_rows(short_corpus, choice, full, pairing):
    masking = Masking(**choice)
    rows = joined(train(short_corpus, 40, masking=masking, pairing=pairing))
    numbers = np.array(num_predictions(masking.rate, SEQ_LEN, PREDICTIONS))
    assert rows["masked_lm_ids"].shape[1] == packed_phase(pairing, masking).row_predictions
    for row, weights in zip(rows["masked_lm_positions"], rows["masked_lm_weights"] > 0, strict=True):
        # Positions are ascending, and unused predictions come last.
        assert (np.diff(row[weights]) > 0).all() and not weights[weights.sum() :].any() and not row[~weights].any()
    pairs = unpacked(rows)
    predicted = (pairs["masked_lm_weights"] > 0).sum(1)
    wanted = numbers[pairs["input_mask"].sum(1)]
    assert (predicted <= wanted).all()
    assert (predicted == wanted).mean() > full
    used = pairs["masked_lm_weights"] > 0
    # Predictions are uniformly distributed in a pair, so their mean position is the middle. The last group of words is
    # shorter, so it is chosen more often.
    middle = pairs["masked_lm_positions"][used] / np.repeat(pairs["input_mask"].sum(1) - 1, predicted)
    assert middle.mean() == pytest.approx(0.5, abs=0.04 if "max_span" in choice else 0.02)


@pytest.mark.ci
def test_max_predictions_above_the_needed_number_does_not_change_batches(short_corpus):
    (some,), (more,) = (train(short_corpus, 1, predictions=count) for count in (10, SEQ_LEN))
    np.testing.assert_equal(some, more)


def test_pairs_of_a_row_are_masked_independently(short_corpus):
    rows = joined(train(short_corpus, 40))
    both = either = 0
    for row, positions, weights in zip(
        rows["sequence_ids"], rows["masked_lm_positions"], rows["masked_lm_weights"], strict=True
    ):
        sets = [
            {position - np.argmax(row == pair) for position in positions[weights > 0] if row[position] == pair}
            for pair in (1, 2)
        ]
        both, either = both + len(sets[0] & sets[1]), either + min(len(sets[0]), len(sets[1]))
    # With equal random numbers, the two pairs of a row would be masked at the same positions.
    assert either > 100 and both < 0.35 * either
