"""A corpus whose arrays lie in several files: the batches of the one file, verified as it is."""

import dataclasses
import json
import mmap
import os

import numpy as np
import pytest
from sharding import shard
from small_corpora import random_documents
from test_pretraining_batches import assert_same, evaluate, train
from test_verified import BLOCK, damage, small_blocks  # noqa: F401

from bertjax.data.corpus import blocks, store
from bertjax.data.corpus.mapping import map_files
from bertjax.errors import BertjaxError, UsageError

SHARD = mmap.PAGESIZE


@pytest.fixture
def corpora(small_blocks, make_corpus, tmp_path):  # noqa: F811
    """A corpus, and the same in files of a memory page."""
    corpus = make_corpus(random_documents(60, 1), random_documents(25, 2), unique=True)
    sharded = store.open_corpus(shard(corpus.path, tmp_path / "sharded", SHARD))
    assert sharded.manifest["shards"]["train.tokens"] > 10 and sharded.manifest["shards"]["heldout.documents"] == 1
    return corpus, sharded


def test_arrays_of_many_files_are_those_of_one(corpora):
    one, many = corpora
    for split in store.SPLITS:
        for array in store.ARRAYS:
            np.testing.assert_array_equal(getattr(getattr(one, split), array), getattr(getattr(many, split), array))
    many.verification.verify_all()
    assert not any(map(many.verification.left, many.verification._files))


@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_batches_are_those_of_one_file(corpora, objective):
    one, many = (train(corpus, 4, start_step=3, objective=objective) for corpus in corpora)
    assert_same(one, many)
    one, many = (evaluate(corpus, objective) for corpus in corpora)
    assert_same(one, many)


@pytest.mark.parametrize("array", store.ARRAYS)
def test_damage_is_told_with_its_file(corpora, array):
    _, many = corpora
    shards = many.manifest["shards"][f"train.{array}"]
    number = shards - 1
    name = store.shard_file("train", array, number, shards)
    damage(many.path / name, 0)
    with pytest.raises(BertjaxError, match=rf"{name}, block 0 \(bytes 0 to {BLOCK - 1}\) does not match its checksum"):
        store.open_corpus(many.path).verification.verify_all()


def test_each_block_comes_with_the_number_before_it_in_whatever_file(corpora):
    _, many = corpora
    path = many.path / store.array_file("train", "sentences")
    seen = []
    file = dataclasses.replace(many.verification._files[path], fault=lambda numbers: seen.append(numbers) or "")
    blocks.Verification([file]).verify_all()
    each = BLOCK // 8
    for block, held in enumerate(seen):
        np.testing.assert_array_equal(held, many.train.sentences[max(0, block * each - 1) : (block + 1) * each])


def test_a_corpus_that_lacks_a_file_or_lists_another_is_refused(corpora):
    _, many = corpora
    shards = many.manifest["shards"]["train.tokens"]
    missing = many.path / store.shard_file("train", "tokens", 3, shards)
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(UsageError, match=rf"damaged: {missing.name} is missing"):
        store.open_corpus(many.path)
    missing.write_bytes(content[:-2])
    with pytest.raises(UsageError, match=rf"{missing.name} has {SHARD - 2:,} bytes, its manifest says {SHARD:,}"):
        store.open_corpus(many.path)
    missing.write_bytes(content)

    def refused(says, **changed):
        text = json.dumps({**many.manifest, **changed})
        (many.path / store.MANIFEST).write_text(text)
        with pytest.raises(UsageError, match=says):
            store.open_corpus(many.path)

    counts = many.manifest["shards"]
    for number in (0, -1, "3", 10**9):
        refused(rf"train.tokens is in {number} files", shards=counts | {"train.tokens": number})
    refused(r"damaged \(it lists 'heldout.tokens-", shards=counts | {"heldout.tokens": counts["heldout.tokens"] + 1})
    refused("it has no 'train.documents'", shards={name: n for name, n in counts.items() if name != "train.documents"})
    short = many.manifest["files"] | {missing.name: {"bytes": SHARD - BLOCK, "sha256": ""}}
    refused("the files of train.tokens have not the same number of whole blocks each", files=short)


def test_files_are_mapped_side_by_side_and_given_back(tmp_path):
    numbers = np.arange(SHARD, dtype="<u2")  # Two pages.
    halves = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    for file, half in zip(halves, np.split(numbers, [SHARD // 2, SHARD - 3]), strict=True):
        half.tofile(file)
    # The second file is no whole page and the last: nothing can lie after it.
    mapped = map_files(halves[:2], numbers.dtype)
    np.testing.assert_array_equal(mapped, numbers[:-3])

    def is_mapped():
        with open("/proc/self/maps") as maps:
            return any(str(tmp_path) in line for line in maps)

    if os.path.exists("/proc/self/maps"):
        assert is_mapped()
        del mapped
        assert not is_mapped()
    assert map_files([], numbers.dtype).size == 0
    with pytest.raises(FileNotFoundError):
        map_files([tmp_path / "none"], numbers.dtype)
