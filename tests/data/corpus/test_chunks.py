"""Tests that chunks, encoded in any order and repeatedly, merge into the corpus of the local runner."""

import itertools
import random
from unittest.mock import Mock

import pytest
from helpers.preparing import bytes_of, make_text, run, write_text

from bertjax.data.corpus import chunks, documents, readers, store
from bertjax.data.corpus.vocabulary import load_vocabulary


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(documents, "MAX_PIECE_CHARS", 500)
    monkeypatch.setattr(readers, "_READ_BYTES", 300)
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(chunks, "_MAX_CHUNK_BYTES", 2000)
    monkeypatch.setattr(chunks, "_BLOCK_ENTRIES", 100)


def test_chunks_encoded_twice_in_any_order_merge_into_the_corpus_of_the_local_runner(tmp_path, vocabulary):
    text = make_text(300)
    text[100] *= 90  # This document is longer than a chunk and is read in several pieces.
    write_text(tmp_path / "large.txt", text)
    for number in range(30):
        write_text(tmp_path / f"small-{number:02d}.txt", make_text(number % 5, seed=number))
    (tmp_path / "bad.txt").write_bytes(b"river \xff\xfestone\n\nlamp\x00\n\n\x01\x02\n\nwalk\n\n" + b"quiet " * 5000)
    (tmp_path / "novel").write_text(" ".join(s for d in make_text(150, seed=1) for s in d))
    specs = [f"text:{tmp_path}/*.txt", f"prose:{tmp_path}/novel"]
    manifest = run(tmp_path, *specs, vocabulary=vocabulary, heldout_fraction=0.2)
    expected = {name: data for name, data in bytes_of(tmp_path / "corpus").items() if name.endswith("bin")}
    rng = random.Random(0)
    work = tmp_path / "merged" / "work"
    work.mkdir(parents=True)
    grouped, chunk_chars = chunks.group_sources(readers.find_sources(specs)[0])
    divided = [list(chunks.divide_chunk(chunk, work, chunk_chars)) for chunk in grouped * 2]
    assert divided[len(grouped) :] == divided[: len(grouped)]
    all_chunks = list(itertools.chain.from_iterable(divided[: len(grouped)]))
    assert len(all_chunks) >= 15
    named_shards = {}
    for chunk in rng.sample(all_chunks * 2, 2 * len(all_chunks)):
        shard = chunks.encode_chunk(chunk, load_vocabulary(vocabulary), work)
        assert named_shards.setdefault(chunk.name, shard) == shard
    named_shards = [named_shards[name] for name in sorted(named_shards)]
    heldout_below, entries = chunks.plan_splits(named_shards, 0.2)
    arrays = list(itertools.product(store.SPLITS, store.ARRAYS)) * 2
    for split, array in rng.sample(arrays, len(arrays)):
        name, entry = chunks.write_array(work.parent, split, array, named_shards, heldout_below)
        assert entry == manifest["files"][name]
    work.rename(tmp_path / "work")
    assert bytes_of(tmp_path / "merged") == expected
    assert entries == {name: manifest[name] for name in ("splits", "problems")}


def test_chunk_repeated_after_an_interruption_writes_the_same_files(tmp_path, vocabulary, monkeypatch):
    write_text(tmp_path / "a.txt", make_text(100))
    (chunk,), chunk_chars = chunks.group_sources(readers.find_sources([f"text:{tmp_path}/a.txt"])[0])
    vocabulary = load_vocabulary(vocabulary)

    def shard_files(work):
        """Returns the contents of all shard files, and the problems of each shard."""
        made = [chunks.encode_chunk(c, vocabulary, work) for c in chunks.divide_chunk(chunk, work, chunk_chars)]
        files = {path.name: path.read_bytes() for path in work.iterdir() if path.suffix != ".json"}
        return files, [shard.problems for shard in made]

    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
    expected = shard_files(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(chunks, "write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            shard_files(tmp_path / "interrupted")
    assert shard_files(tmp_path / "interrupted") == expected
    # Finished chunks are not encoded again.
    monkeypatch.delattr(chunks, "_write_shard")
    assert shard_files(tmp_path / "interrupted") == expected
