"""Files held against the checksums of their blocks."""

import dataclasses
import os
import zlib

import numpy as np
import pytest

from bertjax.data.corpus import blocks
from bertjax.data.corpus.blocks import BlockFile, Verification, blocks_of, checksums_of
from bertjax.errors import BertjaxError

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blocks, "WHOLE_BYTES", 0)


@pytest.fixture
def file(tmp_path):
    """Of 40 blocks, the last one not full."""
    path = tmp_path / "numbers.bin"
    np.random.default_rng(0).integers(0, 1 << 16, 40 * BLOCK // 2 - 5, np.uint16).tofile(path)
    return BlockFile(path, checksums_of(path).blocks, np.dtype("<u2"), "the thing", "make it again")


def flip(path, at, bit=0):
    with open(path, "r+b") as opened:
        byte = os.pread(opened.fileno(), 1, at)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1 << bit]), at)


def test_a_checksum_for_each_block(file):
    data = file.path.read_bytes()
    assert file.checksums.tolist() == [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    assert file.checksums.size == 40


def test_every_flipped_bit_is_found_and_its_place_told(file):
    size = file.path.stat().st_size
    Verification([file]).verify(file.path)
    rng = np.random.default_rng(1)
    for at in [0, size - 1, *rng.integers(0, size, 200)]:
        flip(file.path, at, bit=at % 8)
        with pytest.raises(BertjaxError) as caught:
            Verification([file]).verify(file.path)
        start = at // BLOCK * BLOCK
        place = f"numbers.bin, block {at // BLOCK} (bytes {start:,} to {min(start + BLOCK, size) - 1:,})"
        assert str(caught.value) == f"the thing is damaged: {place} does not match its checksum; make it again"
        flip(file.path, at, bit=at % 8)
    Verification([file]).verify(file.path)


def test_at_the_start_some_blocks_are_verified_and_all_where_they_are_few(file, monkeypatch):
    verification = Verification([file])
    verification.verify_at_start()
    assert verification.left(file.path) == 40 - 16
    monkeypatch.setattr(blocks, "WHOLE_BYTES", 40 * BLOCK)
    verification = Verification([file])
    verification.verify_at_start()
    assert verification.left(file.path) == 0


def test_only_the_blocks_asked_for_are_read_and_each_once(file):
    flip(file.path, 7 * BLOCK)
    verification = Verification([file])
    verification.verify(file.path, np.array([3, 6, 8]))
    assert verification.left(file.path) == 37
    # What was verified is not read again.
    flip(file.path, 3 * BLOCK)
    verification.verify(file.path, np.array([3]))
    with pytest.raises(BertjaxError, match="block 7 "):
        verification.verify_all()


def test_what_either_of_two_has_verified_is_verified(file):
    one, other = Verification([file]), Verification([file])
    one.verify(file.path, np.array([1, 2, 3]))
    other.verify(file.path, np.array([3, 4]))
    one.take_over(other)
    assert one.left(file.path) == 36
    empty = Verification()
    empty.take_over(one)
    assert empty.left(file.path) == 36


def test_the_thread_goes_through_all_and_keeps_what_it_finds(file, monkeypatch):
    monkeypatch.setattr(blocks, "BACKGROUND_BYTES_PER_SECOND", 1e9)
    verification = Verification([file])
    verification.start()
    verification._thread.join(10)
    verification.check()
    assert verification.left(file.path) == 0
    flip(file.path, 39 * BLOCK)
    verification = Verification([file])
    verification.start()
    verification._thread.join(10)
    with pytest.raises(BertjaxError, match="block 39 "):
        verification.check()
    with pytest.raises(BertjaxError, match="block 39 "):
        verification.verify_all()


def test_the_thread_keeps_to_its_rate(file, monkeypatch):
    slept = []
    monkeypatch.setattr(blocks.time, "sleep", slept.append)
    monkeypatch.setattr(blocks.time, "monotonic", lambda: 100.0)
    verification = Verification([file])
    verification._work()
    # The clock stands still, so each block waits for all before it.
    np.testing.assert_allclose(slept, BLOCK / blocks.BACKGROUND_BYTES_PER_SECOND * np.arange(1, 41))


def test_numbers_that_are_as_written_and_cannot_be(file):
    seen = []
    checked = BlockFile(
        file.path, file.checksums, file.dtype, "the thing", "make it again", lambda n: seen.append(n) or ""
    )
    Verification([checked]).verify_all()
    numbers = np.fromfile(file.path, "<u2")
    # Each block comes with the number before it.
    for block, held in enumerate(seen):
        first = block * BLOCK // 2
        np.testing.assert_array_equal(held, numbers[max(0, first - 1) : first + BLOCK // 2])
    odd = dataclasses.replace(file, fault=lambda numbers: "is odd")
    with pytest.raises(BertjaxError, match=r"block 2 \(bytes 128 to 191\) is odd; make it again"):
        Verification([odd]).verify(odd.path, np.array([2]))


def test_a_file_that_is_gone_is_one_error(file):
    verification = Verification([file])
    file.path.unlink()
    with pytest.raises(BertjaxError, match="cannot read .*numbers.bin: No such file"):
        verification.verify_all()


def test_blocks_of_spans():
    starts, stops = np.array([0, 31, 100, 70, 5]), np.array([32, 33, 200, 70, 6])
    expected = {at * 2 // BLOCK for a, b in zip(starts, stops, strict=True) for at in range(a, b)}
    assert blocks_of(starts, stops, 2).tolist() == sorted(expected)
    assert blocks_of(starts[:0], stops[:0], 2).size == 0
