"""A run ends on verified data, or with the place of the damage."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
from small_corpora import random_documents

from bertjax.data.corpus import blocks, store
from bertjax.data.pretraining import verified
from bertjax.data.pretraining.batches import eval_dataset, train_dataset
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.sentence_pairs import SENTENCE_PAIRS
from bertjax.data.pretraining.tiles import TILES
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError

BLOCK = 64
PHASE = Phase(seq_len=16, batch_size=4, max_predictions=3, start_step=0, stop_step=1 << 40)
TRAINING = {"seed": 0, "dupe_factor": 2}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a corpus of a test has many, of which opening it verifies but some."""
    for module in (blocks, store):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blocks, "WHOLE_BYTES", 0)


@pytest.fixture
def corpus(small_blocks, make_corpus):
    return make_corpus(random_documents(60, 1), random_documents(25, 2), unique=True)


def damage(file, at, content=None):
    """Overwrites bytes of a file, or flips a bit."""
    with open(file, "r+b") as opened:
        content = bytes([os.pread(opened.fileno(), 1, at)[0] ^ 1]) if content is None else content
        os.pwrite(opened.fileno(), content, at)


def reseal(path):
    """Makes the checksums of a corpus those of its files."""
    manifest = json.loads((path / store.MANIFEST).read_text())
    for table in path.glob("*.crc32"):
        table.unlink()
    (path / store.MANIFEST).unlink()
    store.write_manifest(path, manifest | {"files": store.describe_files(path)})


def stored_whole(path):
    store.open_corpus(path).verification.verify_all()


@pytest.mark.parametrize("array", store.ARRAYS)
@pytest.mark.parametrize("split", store.SPLITS)
def test_every_flipped_bit_of_every_array_is_found(corpus, split, array):
    file = corpus.path / store.array_file(split, array)
    for at in np.random.default_rng(0).integers(0, file.stat().st_size, 20):
        damage(file, at)
        with pytest.raises(BertjaxError, match=rf"{file.name}, block {at // BLOCK:,} .*not match its checksum"):
            stored_whole(corpus.path)
        damage(file, at)
    stored_whole(corpus.path)


def test_zeroed_tokens_and_a_damaged_table_are_found(corpus):
    file = corpus.path / "train.tokens.bin"
    before = file.read_bytes()
    damage(file, 1000, bytes(500))
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block 1[5-9] "):
        stored_whole(corpus.path)
    file.write_bytes(before)
    damage(corpus.path / "train.tokens.crc32", 9)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.crc32 does not match its checksum"):
        store.open_corpus(corpus.path)


def test_ids_beyond_the_vocabulary_and_starts_that_fall_are_told_by_their_block(corpus):
    size = corpus.manifest["vocabulary"]["size"]
    damage(corpus.path / "train.tokens.bin", 5 * BLOCK, np.array([size], corpus.train.tokens.dtype).tobytes())
    reseal(corpus.path)
    with pytest.raises(BertjaxError, match=rf"train\.tokens\.bin, block 5 .*holds the id {size:,}, the vocabulary"):
        stored_whole(corpus.path)
    damage(corpus.path / "train.tokens.bin", 5 * BLOCK, np.array([10], corpus.train.tokens.dtype).tobytes())
    # The first of a block, which falls behind the last of the block before.
    file = corpus.path / "train.sentences.bin"
    good = file.read_bytes()
    damage(file, 3 * BLOCK, np.array([1], "<u8").tobytes())
    reseal(corpus.path)
    with pytest.raises(BertjaxError, match=r"train\.sentences\.bin, block 3 .*starts of tokens that do not rise"):
        stored_whole(corpus.path)
    damage(file, 0, good[:-8] + np.array([1 << 40], "<u8").tobytes())
    reseal(corpus.path)
    with pytest.raises(BertjaxError, match=r"train\.sentences\.bin, block .*points to token 1,099,511,627,776, there"):
        stored_whole(corpus.path)


@pytest.mark.parametrize("source", [SENTENCE_PAIRS, TILES])
def test_what_steps_read_is_verified_and_the_rest_is_not(corpus, source):
    corpus = store.open_corpus(corpus.path)
    steps, path = 3, corpus.path / "train.tokens.bin"
    arguments = {"source": source, **TRAINING}
    dataset = train_dataset(corpus, PHASE, masking=Masking(), start_step=0, shard=SINGLE_SHARD, **arguments)
    batches = list(itertools.islice(dataset.as_numpy_iterator(), steps))
    before = corpus.verification._left[path].copy()
    verified.verify_training(corpus, (PHASE,), steps, **arguments)
    after = corpus.verification._left[path]
    # Every token has an id of its own, which tells where it stands; masks are looked up.
    place = {token: at for at, token in enumerate(np.asarray(corpus.train.tokens).tolist())}
    read = set()
    for batch in batches:
        seen = batch["input_ids"][(batch["input_mask"] > 0)].tolist()
        kept = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0].tolist()
        random = batch["masked_lm_positions"], batch["masked_lm_weights"] > 0
        replaced = np.take_along_axis(batch["input_ids"], random[0], 1)[random[1]].tolist()
        read |= {place[token] * 2 // BLOCK for token in {*seen, *kept} - {*replaced} | {*kept} if token in place}
    assert read and not after[sorted(read)].any()
    assert after.sum() > before.sum() / 3


def test_damage_is_found_where_steps_read_it_and_at_last_everywhere(corpus):
    path = corpus.path / "train.tokens.bin"
    arguments = {"source": SENTENCE_PAIRS, **TRAINING}
    fresh = store.open_corpus(corpus.path)
    verified.verify_training(fresh, (PHASE,), 2, **arguments)
    unread = np.flatnonzero(fresh.verification._left[path])[0]
    damage(path, unread * BLOCK)
    opened = store.open_corpus(corpus.path)
    verified.verify_training(opened, (PHASE,), 2, **arguments)
    with pytest.raises(BertjaxError, match=f"block {unread:,} "):
        verified.verify_training(opened, (PHASE,), 1000, **arguments)


def test_a_damaged_plan_is_found_where_steps_read_it(corpus):
    arguments = {"source": SENTENCE_PAIRS, **TRAINING}
    opened = store.open_corpus(corpus.path)
    verified.verify_training(opened, (PHASE,), 1, **arguments)
    (plan,) = (corpus.path / "plans").glob("pairs-train-*.bin")
    damage(plan, np.flatnonzero(opened.verification._left[plan])[0] * BLOCK)
    with pytest.raises(BertjaxError, match=r"the pair plan .*\.bin, block .* remove it, it is made again"):
        verified.verify_training(opened, (PHASE,), 1000, **arguments)


@pytest.mark.parametrize("array", ["sentences", "documents"])
def test_no_plan_is_made_of_damaged_offsets(small_blocks, make_corpus, array):
    corpus = make_corpus([[3, 4]] * 300)
    file = corpus.path / store.array_file("train", array)
    opened = store.open_corpus(corpus.path)
    left = np.flatnonzero(opened.verification._left[file])
    assert left.size
    damage(file, left[0] * BLOCK)
    with pytest.raises(BertjaxError, match=rf"{file.name}, block {left[0]:,} "):
        verified.verify_training(opened, (PHASE,), 1, source=SENTENCE_PAIRS, **TRAINING)
    assert not (corpus.path / "plans").exists()


def test_an_evaluation_verifies_the_held_out_split(corpus):
    file = corpus.path / "heldout.tokens.bin"
    opened = store.open_corpus(corpus.path)
    opened.verification.start = lambda: None
    dataset = eval_dataset(
        opened,
        seq_len=16,
        batch_size=4,
        max_predictions=3,
        source=SENTENCE_PAIRS,
        masking=Masking(),
        shard=SINGLE_SHARD,
    )
    assert list(verified.watched(dataset, opened, lambda made: None))
    damage(file, np.flatnonzero(opened.verification._left[file])[-1] * BLOCK)
    with pytest.raises(BertjaxError, match=r"heldout\.tokens\.bin, block "):
        verified.verify_evaluation(opened, 16, SENTENCE_PAIRS)


def test_a_batch_that_cannot_be_made_is_told_by_the_damage(corpus):
    """The damage comes before any check of its block, and TensorFlow meets an id that is no piece."""
    opened = store.open_corpus(corpus.path)
    left = np.flatnonzero(opened.verification._left[corpus.path / "train.tokens.bin"])
    for block in left:
        damage(corpus.path / "train.tokens.bin", block * BLOCK, b"\xff" * BLOCK)
    masking = Masking(whole_word=True)
    arguments = {"source": TILES, **TRAINING}
    dataset = train_dataset(opened, PHASE, masking=masking, start_step=0, shard=SINGLE_SHARD, **arguments)
    opened.verification.start = lambda: None
    batches = verified.watched(
        dataset, opened, lambda made: verified.verify_training(opened, (PHASE,), made, **arguments)
    )
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block .*does not match its checksum"):
        for _ in range(50):
            next(batches)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_dtype": "O"}, "token_dtype is 'O'"),
        ({"token_dtype": "<u4"}, "does not go with token_dtype"),
        ({"token_dtype": ["<u2"]}, "token_dtype is"),
        ({"format": 1}, "has format 1, this version reads 2"),
        ({"vocabulary": {"file": "../../secret", "lower_case": True, "size": 500}}, "file is '../../secret'"),
        ({"vocabulary": {"file": "vocab.txt", "lower_case": "yes", "size": 500}}, "lower_case is 'yes'"),
        ({"vocabulary": {"file": "vocab.txt", "lower_case": True, "size": "many"}}, "vocabulary of many pieces"),
        ({"vocabulary": []}, "damaged"),
        ({"files": {}}, "it has no 'vocab.txt'"),
        ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "lists '../x'"),
        ({"files": 7}, "damaged"),
    ],
)
def test_odd_values_of_a_manifest_are_one_line(make_corpus, change, says):
    path = make_corpus([[3, 4], [5]]).path
    manifest = json.loads((path / store.MANIFEST).read_text()) | change
    (path / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError) as caught:
        store.open_corpus(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    shutil.rmtree(path)
