"""Parts made anywhere, in any order, more than once, come to the corpus that this machine makes."""

import itertools
import random
from pathlib import Path

import pytest
from preparing import bytes_of, make_text, run, write_text

from bertjax.data.corpus import blocks, encoding, joining, layouts, merging, parts, readers, store
from bertjax.data.corpus.tokenizer import load_vocabulary
from bertjax.errors import BertjaxError

SHARD = 512


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARS", 700)
    monkeypatch.setattr(layouts, "MAX_PIECE_CHARS", 500)
    monkeypatch.setattr(readers, "_READ_BYTES", 300)
    monkeypatch.setattr(parts, "_CHUNK_BYTES", (2000, 2000))
    for module in (blocks, store):
        monkeypatch.setattr(module, "BLOCK_BYTES", SHARD // 2)


def recipe_of(vocabulary, share):
    given = load_vocabulary(vocabulary)
    return parts.Recipe("vocab.txt", given.content, given.lower_case, share)


def one_large_chunk(tmp_path, vocabulary):
    """A recipe, the one chunk to be cut of a text, and characters of a piece of it."""
    write_text(tmp_path / "a.txt", make_text(100))
    sources, _ = readers.expand([f"text:{tmp_path}/a.txt"])
    _, (large,), size = parts.chunks_of(sources)
    return recipe_of(vocabulary, 0.1), large, size


def by_parts(sources, recipe, folder, seed=0, problems=None):
    """Splits to their arrays' bytes, counts and problems, by steps in random order, each done twice."""
    draw = random.Random(seed)
    folder.mkdir()
    work = folder / "work"
    work.mkdir()
    small, large, size = parts.chunks_of(sources)
    twice = [chunk for chunk in large for _ in range(2)]
    chunks = small + [piece for chunk in large for piece in parts.cut(chunk, work, size)]
    again = [piece for chunk in twice[::-1] for piece in parts.cut(chunk, work, size)]
    assert set(map(repr, again)) <= set(map(repr, chunks))
    named = {}
    for chunk in draw.sample(chunks * 2, 2 * len(chunks)):
        part = parts.encode(chunk, recipe, work)
        assert named.setdefault(chunk.name, part) == part
    merged = joining.merge(draw.sample(sorted(named.items()), len(named)), recipe, SHARD, problems or {})
    pieces = draw.sample(merged.pieces * 2, 2 * len(merged.pieces))
    written = {entry["name"]: entry for entry in (joining.write_piece(piece, folder) for piece in pieces)}
    arrays = {}
    for name in sorted(written):
        file = folder / name
        assert written[name]["bytes"] == file.stat().st_size <= SHARD
        assert written[name]["sha256"] == blocks.checksums_of(file).sha256
        for key, value in (("bin", file.read_bytes()), ("crc32", bytes.fromhex(written[name]["blocks"]))):
            whole = f"{written[name]['array']}.{key}"
            arrays[whole] = arrays.get(whole, b"") + value
    assert sorted(path.name for path in folder.iterdir()) == sorted([*written, "work"])
    return arrays, merged, len(chunks)


def assert_same_as_here(tmp_path, specs, vocabulary, share, least_chunks):
    manifest = run(tmp_path, *specs, vocabulary=vocabulary, heldout_share=share)
    expected = {name: data for name, data in bytes_of(tmp_path / "corpus").items() if name.endswith(("bin", "crc32"))}
    sources, repeated = readers.expand(specs)
    recipe, problems = recipe_of(vocabulary, share), {"files_named_again": repeated}
    arrays, merged, chunks = by_parts(sources, recipe, tmp_path / "parts", problems=problems)
    assert arrays == expected
    assert merged.splits == manifest["splits"]
    assert {name: count for name, count in merged.problems.items() if count} == manifest["problems"]
    assert chunks >= least_chunks


def test_all_kinds_of_text(tmp_path, vocabulary):
    documents = make_text(300)
    documents[100] *= 90  # Longer than a chunk, and than several pieces.
    write_text(tmp_path / "large.txt", documents)
    for number in range(30):
        write_text(tmp_path / f"small-{number:02d}.txt", make_text(number % 5, seed=number))
    (tmp_path / "bad.txt").write_bytes(b"river \xff\xfestone\n\nlamp\x00\n\n\x01\x02\n\nwalk\n\n" + b"quiet " * 5000)
    (tmp_path / "novel.txt").write_text(" ".join(s for d in make_text(150, seed=1) for s in d))
    wiki = "".join(f'<doc id="1" title="A">\nA\n{" ".join(d)}\n</doc>\nbetween\n' for d in make_text(150, seed=2))
    (tmp_path / "wiki").write_text(wiki)
    specs = [f"text:{tmp_path}/*.txt", f"prose:{tmp_path}/novel.txt", f"wiki:{tmp_path}/wiki", f"text:{tmp_path}/b*"]
    assert_same_as_here(tmp_path, specs, vocabulary, 0.2, 15)


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.999999])
@pytest.mark.parametrize("documents", [1, 2, 5, 60])
def test_few_documents_on_one_side(tmp_path, vocabulary, documents, share):
    text = make_text(documents)
    write_text(tmp_path / "a.txt", [*text, text[0]])
    (tmp_path / "empty.txt").write_text("")
    assert_same_as_here(tmp_path, [f"text:{tmp_path}/*.txt"], vocabulary, share, 2 if documents == 60 else 1)


def test_no_text_is_an_error(tmp_path, vocabulary):
    (tmp_path / "empty.txt").write_text("\n \n" * 5000)
    sources, _ = readers.expand([f"text:{tmp_path}/*.txt"])
    with pytest.raises(BertjaxError, match="hold no text, so no corpus was written .files_named_again: 3"):
        by_parts(sources, recipe_of(vocabulary, 0.1), tmp_path / "parts", problems={"files_named_again": 3})


def test_a_step_that_was_done_is_not_done_again(tmp_path, vocabulary, monkeypatch):
    recipe, large, size = one_large_chunk(tmp_path, vocabulary)
    first, *_ = parts.cut(large, tmp_path, size)
    part = parts.encode(first, recipe, tmp_path)

    def read(*_):
        raise AssertionError("it is read again")

    monkeypatch.setattr(readers, "read", read)
    assert parts.cut(large, tmp_path, size)[0] == first and parts.encode(first, recipe, tmp_path) == part


def test_a_step_that_is_killed_leaves_nothing_that_counts(tmp_path, vocabulary, monkeypatch):
    recipe, large, size = one_large_chunk(tmp_path, vocabulary)
    whole = [parts.encode(chunk, recipe, tmp_path) for chunk in parts.cut(large, tmp_path, size)]
    contents = [(tmp_path / part.path).read_bytes() for part in whole]
    (tmp_path / "work").mkdir()
    write_at_once, writes = parts.write_at_once, itertools.count()

    def killed_at_every_second(path, content):
        if next(writes) % 2 == 0:
            raise KeyboardInterrupt
        return write_at_once(path, content)

    monkeypatch.setattr(parts, "write_at_once", killed_at_every_second)
    kills = 0
    while True:
        try:
            for chunk in parts.cut(large, tmp_path / "work", size):
                parts.encode(chunk, recipe, tmp_path / "work")
            break
        except KeyboardInterrupt:
            kills += 1
    assert kills == 1 + len(whole)
    found = [parts.encode(chunk, recipe, tmp_path / "work") for chunk in parts.cut(large, tmp_path / "work", size)]
    assert [Path(part.path).read_bytes() for part in found] == contents
    assert [part.counts for part in found] == [part.counts for part in whole]


def test_pieces_hold_each_number_once():
    spans = [merging.Span("a", 3, 10, 5), merging.Span("b", 0, 0, 1), merging.Span("c", 1, 2, 0)]
    for size in range(1, 10):
        pieces = list(merging.pieces_of(spans, size))
        numbers = [[(s.part, n) for s in piece for n in range(s.first, s.last)] for piece in pieces]
        assert sum(numbers, []) == [*(("a", n) for n in range(3, 10)), ("c", 1)]
        assert all(len(piece) == size for piece in numbers[:-1]) and 0 < len(numbers[-1]) <= size
    assert list(merging.pieces_of([], 4)) == [[]]
