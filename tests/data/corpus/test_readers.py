"""Tests of the documents that are read from each kind of input, with large and small read blocks."""

import bz2
import gzip
import lzma
import os
from collections import Counter

import pytest

from bertjax.data.corpus import documents as documents_module
from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import LINES, PARAGRAPHS, WRAPPED
from bertjax.errors import BertjaxError, UsageError


def read(*specs):
    """Returns the documents as (layout, text), with their pieces joined, and the counted problems."""
    problems, documents = Counter(), []
    sources, _ = readers.find_sources(list(specs))
    for source in sources:
        read_bytes = []
        for text in readers.read(source, problems, read_bytes.append):
            if text.continues:
                documents[-1] = (text.layout, documents[-1][1] + text.text)
            else:
                documents.append((text.layout, text.text))
        assert sum(read_bytes) == source.size_bytes
    return documents, {name: count for name, count in problems.items() if count}


def words(documents):
    return [text.split() for _, text in documents]


@pytest.fixture(params=[1 << 20, 7])
def block_size(request, monkeypatch):
    """Runs a test with read blocks of 1 MiB and of 7 bytes; the latter split tags and lines."""
    monkeypatch.setattr(readers, "_READ_BYTES", request.param)


def test_blank_lines_separate_text_documents(tmp_path, block_size):
    (tmp_path / "a.txt").write_bytes("\ufeffOne é.\r\nTwo.\r\n \t\r\n\r\nThree 中.\n\n\n\n".encode())
    (tmp_path / "b.txt").write_text("Four.", encoding="utf-8")
    documents, problems = read(f"text:{tmp_path}/*.txt")
    assert words(documents) == [["One", "é.", "Two."], ["Three", "中."], ["Four."]]
    assert {form for form, _ in documents} == {LINES} and not problems


def test_line_ends_are_converted_to_lf(tmp_path, block_size):
    (tmp_path / "mixed").write_bytes(b"One.\rTwo.\r\n\r\nThree.\r\rFour.\nFive. \xe2\x80\xa8 \xc2\x85")
    documents, _ = read(f"text:{tmp_path}/mixed")
    assert [text for _, text in documents] == ["One.\nTwo.", "Three.", "Four.\nFive. \u2028 \x85"]


WIKI = """<doc id="1" url="u" title="Ampere &amp; &quot;co&quot;">
Ampere & "co"

Body one.
Section.
Body <doc inside the line.
</doc>
<doc id="2" url="u" title="Other">
Otherwise.
</doc>
"""


def test_wiki_articles_are_documents_without_tags_and_titles(tmp_path, block_size):
    (tmp_path / "wiki_00").write_text(WIKI, encoding="utf-8")
    documents, problems = read(f"wiki:{tmp_path}/wiki_*")
    assert [text.split("\n") for text in (text.strip() for _, text in documents)] == [
        ["Body one.", "Section.", "Body <doc inside the line."],
        ["Otherwise."],
    ]
    assert documents[0][0] == PARAGRAPHS and not problems


@pytest.mark.parametrize("is_escaped", [True, False])
def test_characters_that_wikiextractor_escaped_are_restored(tmp_path, is_escaped):
    doc = '<doc id="1" url="u" title="AT&T">\nAT&T\n\n{}\n</doc>\n'
    bodies = ["AT&amp;T: 1 &lt; 2 &gt; 0.", "Write &amp;lt; for a sign.", "R&D: 1 < 2." if not is_escaped else "None."]
    (tmp_path / "w").write_text("".join(map(doc.format, bodies)), encoding="utf-8")
    documents, _ = read(f"wiki:{tmp_path}/w")
    expected = ["AT&T: 1 < 2 > 0.", "Write &lt; for a sign.", "None."] if is_escaped else bodies
    assert [text.strip() for _, text in documents] == expected


def test_problems_of_damaged_wiki_text_are_counted(tmp_path, block_size):
    one_line, unclosed = "<doc id=3 title=x>One.</doc>", "<doc id=4 title=x>\nOpen end."
    text = f"stray\n{WIKI}between\n{one_line}\n{unclosed}\n{unclosed}"
    (tmp_path / "w").write_text(text, encoding="utf-8")
    documents, problems = read(f"wiki:{tmp_path}/w")
    assert words(documents)[2:] == [["Open", "end."]] * 2
    assert problems == {"characters_outside_doc": len("stray" + "between" + one_line), "unclosed_doc": 2}


PARAGRAPH = "He came home late. She was there, and said so; nobody heard it at all. Nothing came of this for years."
LINE = "a wrapped line that stops in the middle of what it says"


@pytest.mark.parametrize("block_bytes", [1 << 20, 600])
def test_license_of_project_gutenberg_is_not_part_of_the_books(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(readers, "_READ_BYTES", block_bytes)
    books = ["\n".join([LINE] * 30 + ["* * *", "***", "The end."]), "\n".join([LINE] * 20), "\n".join([LINE] * 10)]
    title = "The Project Gutenberg eBook of Emma\n\n"
    starts = [f"*** START OF THE PROJECT GUTENBERG EBOOK EMMA{end}\n\n" for end in (": A\nNOVEL ***", "", " ***")]
    end = "*** END OF THE PROJECT GUTENBERG EBOOK EMMA: A\nNOVEL ***\n\n" + "\n".join([LINE] * 30)
    # The second book has no end line.
    text = "".join(
        f"{title}{start}{book}\n\n{end}\n" for start, book, end in zip(starts, books, (end, "", end), strict=True)
    ).replace(f"\n\n\n{title}", "\n\n")
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    documents, _ = read(f"prose:{tmp_path}/p.txt")
    assert [(layout, text.strip()) for layout, text in documents] == [(WRAPPED, book) for book in books]


@pytest.mark.parametrize(
    "end", ["*** END OF THE COPYRIGHTED PROJECT GUTENBERG ETEXT EMMA ***", "End of Project Gutenberg's Emma"]
)
@pytest.mark.parametrize(
    "start",
    [
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
        "***START OF THE COPYRIGHTED PROJECT GUTENBERG ETEXT EMMA***",
    ],
)
def test_license_of_old_etexts_is_not_part_of_the_book(tmp_path, start, end):
    book = "\n".join([LINE] * 30)
    (tmp_path / "p.txt").write_text(f"**Welcome**\n\n{start}\n\n{book}\n\n{end}\n\nLicense.\n", encoding="utf-8")
    ((layout, text),) = read(f"prose:{tmp_path}/p.txt")[0]
    assert (layout, text.strip()) == (WRAPPED, book)


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("kind", ["text", "prose"])
def test_documents_end_at_separators_of_language_models(kind, is_divided, tmp_path, monkeypatch):
    stories = [f"{PARAGRAPH}\n\n{PARAGRAPH}", f"{PARAGRAPH}\n{PARAGRAPH}", PARAGRAPH]
    separator = "<|endoftext|>"
    text = f"\n{separator}\n".join(stories) + separator
    if is_divided:  # The second separator is in two blocks.
        monkeypatch.setattr(readers, "_READ_BYTES", text.index(separator, text.index(separator) + 1) + 5)
    (tmp_path / "f").write_text(text, encoding="utf-8")
    documents, _ = read(f"{kind}:{tmp_path}/f")
    assert [text.strip() for _, text in documents] == stories
    # A separator that is only mentioned does not change the layout.
    (tmp_path / "f").write_text("\n\n".join(["One.\nIt is <|endoftext|> here.\nTwo."] * 3), encoding="utf-8")
    assert len(read(f"{kind}:{tmp_path}/f")[0]) == 3


WIKITEXT = (
    " \n = First = \n \n It ends = here = . \n \n = = Plot = = \n \n 1 @,@ 000 <unk> . \n \n = Next = \n Text . \n"
)


@pytest.mark.parametrize("block_bytes", [1 << 20, 61])
def test_articles_of_wikitext_are_documents(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_READ_BYTES", block_bytes)
    (tmp_path / "wiki.train.raw").write_text(WIKITEXT)
    documents, problems = read(f"prose:{tmp_path}/wiki.train.raw")
    texts = [" ".join(document) for document in words(documents)]
    assert texts == ["It ends = here = . Plot 1,000 <unk> .", "Text ."]
    assert problems == {"unknown_words": 1}


def test_each_line_of_lines_is_a_document(tmp_path, block_size):
    (tmp_path / "f").write_text(f"{PARAGRAPH}\r\n\n {LINE}\nA. B.", newline="")
    documents, problems = read(f"lines:{tmp_path}/f")
    assert documents == [(PARAGRAPHS, PARAGRAPH), (PARAGRAPHS, f" {LINE}"), (PARAGRAPHS, "A. B.")] and not problems


def test_tables_and_texts_in_another_encoding_are_rejected(tmp_path):
    (tmp_path / "sentences.txt").write_text("".join(f"{line}\t{PARAGRAPH}\n" for line in range(30)))
    with pytest.raises(UsageError, match="sentences.txt is a table: each line has a tab"):
        read(f"text:{tmp_path}/sentences.txt")
    (tmp_path / "indented.txt").write_text("".join(f"\t{PARAGRAPH}\n" for _ in range(30)))
    assert len(read(f"prose:{tmp_path}/indented.txt")[0]) == 1
    (tmp_path / "latin1.txt").write_text("Il a \xe9t\xe9 l\xe0.\n" * 30, encoding="latin-1")
    with pytest.raises(UsageError, match="latin1.txt is not in UTF-8; convert it, for example with iconv"):
        read(f"wiki:{tmp_path}/latin1.txt")


@pytest.mark.parametrize(
    ("text", "form", "documents"),
    [
        ("\n\n".join([PARAGRAPH, "A heading", PARAGRAPH]), PARAGRAPHS, 1),
        ("\n".join(["word " * 40] * 4), PARAGRAPHS, 1),
        ("\n\n".join(["\n".join([PARAGRAPH] * 3)] * 4), PARAGRAPHS, 4),
        ("\n\n".join(["\n".join([LINE] * 5 + ["The end."])] * 3), WRAPPED, 1),
        ("\n\n".join(["Made by " + "x" * 150, *["\n".join([LINE] * 5 + ["The end."])] * 5]), WRAPPED, 1),
    ],
)
def test_layout_of_prose_is_detected(tmp_path, text, form, documents):
    (tmp_path / "p.txt").write_text(text + "\n", encoding="utf-8")
    documents_read, problems = read(f"prose:{tmp_path}/p.txt")
    assert [f for f, _ in documents_read] == [form] * documents and not problems
    assert [word for document in words(documents_read) for word in document] == text.split()


@pytest.mark.parametrize("newline", ["\n", " "])
@pytest.mark.parametrize("kind", ["text", "prose", "wiki"])
def test_long_documents_are_read_in_bounded_pieces(tmp_path, kind, newline, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_PIECE_CHARS", 1000)
    monkeypatch.setattr(readers, "_READ_BYTES", 700)
    body = newline.join(" ".join(f"{line}.{i}" for i in range(10)) for line in range(400))
    (tmp_path / "f").write_text(f'<doc id="1" title="t">\n{body}\n</doc>\n' if kind == "wiki" else body)
    sources, _ = readers.find_sources([f"{kind}:{tmp_path}/f"])
    problems = Counter()
    pieces = list(readers.read(sources[0], problems))
    assert max(len(piece.text) for piece in pieces) <= 2000
    assert [piece.continues for piece in pieces] == [False, *[True] * (len(pieces) - 1)]
    assert "".join(piece.text for piece in pieces).strip() == body
    # Documents are divided between lines if possible.
    assert problems["long_sentence_cuts"] == (0 if newline == "\n" else len(pieces) - 1)


def test_invalid_bytes_are_counted(tmp_path, block_size):
    genuine = "\ufffd".encode()
    (tmp_path / "f").write_bytes(b"good \xff\xfe bad\n\xc3\n" + genuine + b" nul\x00\x00 \xe4\xb8")
    (tmp_path / "g").write_bytes(b"")
    documents, problems = read(f"text:{tmp_path}/*")
    assert problems == {"invalid_utf8_bytes": 5, "nul_characters": 2, "empty_files": 1, "undivided_files": 1}
    assert "good" in documents[0][1] and "nul" in documents[0][1]


@pytest.mark.parametrize(
    ("name", "compress"), [("a.gz", gzip.compress), ("b.xz", lzma.compress), ("c.bz2", bz2.compress)]
)
def test_compressed_file_is_read_unless_it_is_damaged(tmp_path, name, compress):
    text = "\n".join(f"Sentence {i * i}." for i in range(50_000))
    data = compress(text.encode())
    (tmp_path / name).write_bytes(data)
    assert read(f"text:{tmp_path}/{name}") == ([(LINES, text)], {"undivided_files": 1})
    half = len(data) // 2
    for damaged in (data[:half], data[:half] + bytes(100) + data[half + 100 :], text.encode()):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(BertjaxError, match=name):
            read(f"text:{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("corpus.txt", "unknown input"),
        ("text:", "unknown input"),
        ("text:{}/*.none", "matches no file"),
        ("tfds:lm1b", "has no split"),
    ],
)
def test_invalid_input_specs_are_rejected(tmp_path, spec, message):
    with pytest.raises(UsageError, match=message):
        readers.find_sources([spec.format(tmp_path)])


def test_unreadable_files_are_rejected(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match="pipe.txt is not a readable file"):
        readers.find_sources([f"text:{tmp_path}"])
    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(readers.os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="f is not a readable file"):
        readers.find_sources([f"text:{tmp_path}/f"])


def test_files_are_sorted_and_duplicates_counted(tmp_path):
    for name in "b/2.txt", "a/1.txt", "a/[x].txt":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = ["a/1.txt", "a/[x].txt", "b/2.txt"]
    for pattern in f"{tmp_path}", f"{tmp_path}/**/*.txt", f"{tmp_path}/**":
        sources, duplicates = readers.find_sources([f"text:{pattern}"])
        assert [source.name for source in sources] == [f"{tmp_path}/{name}" for name in names] and duplicates == 0
    sources, duplicates = readers.find_sources(
        [f"text:{tmp_path}/a/[x].txt", f"text:{tmp_path}/**", f"prose:{tmp_path}/b/*"]
    )
    assert len(sources) == 4 and duplicates == 1
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a/1.txt")
    sources, duplicates = readers.find_sources([f"text:{tmp_path}/**/*.txt"])
    assert len(sources) == 3 and duplicates >= 1


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("text", "a.jsonl", "One.\n", "a.jsonl is a table or JSON"),
        ("wiki", "a.CSV.gz", "One.\n", "a.CSV.gz is a table or JSON"),
        # WikiExtractor with --json.
        ("wiki", "wiki_00", '{"id": "1", "text": "One."}\n', "wiki_00 contains JSON"),
        ("prose", "a", '[\n {"text": "One."}\n]\n', "a contains JSON"),
        ("text", "a", "{'text': 'One.'}\n", "a contains JSON"),
        ("text", "a", '["One.", "Two."]\n', "a contains JSON"),
        ("prose", "a", "<DOC>\n<DOCNO>1</DOCNO>\n", "a contains JSON, HTML, XML"),
        ("prose", "a", "\n<!-- by\nhand -->\n<!DOCTYPE html>\n<html>One.</html>\n", "a contains JSON, HTML, XML"),
        ("wiki", "wiki.xml", "<mediawiki xmlns='a'>One.</mediawiki>\n", "wiki.xml contains JSON, HTML, XML"),
        ("prose", "wiki_00", "\ufeff" + WIKI, "use wiki: instead of prose:"),
    ],
)
def test_other_formats_are_not_read_as_text(kind, name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    (tmp_path / "b.csv.txt").write_text("One.\n")
    with pytest.raises(UsageError, match=message):
        read(f"{kind}:{tmp_path}/[aw]*")
    assert len(readers.find_sources([f"{kind}:{tmp_path}/*.txt"])[0]) == 1
