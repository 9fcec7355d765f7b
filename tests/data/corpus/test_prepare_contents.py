"""Tests of the contents of a prepared corpus."""

import itertools
import re
from pathlib import Path

import pytest
from helpers.preparing import bytes_of, documents_of, make_text, prepare_text, run, write_text

from bertjax.data.corpus import chunks, prepare, readers, sentences, store, vocabulary_training
from bertjax.data.corpus import documents as documents_module
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import load_vocabulary


@pytest.fixture
def small_pieces(monkeypatch):
    """Divides files into many chunks, and long documents into pieces of 300 characters."""
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", 1000)
    monkeypatch.setattr(vocabulary_training, "_BATCH_CHARS", 500)
    monkeypatch.setattr(documents_module, "MAX_PIECE_CHARS", 300)
    monkeypatch.setattr(readers, "_READ_BYTES", 200)


def test_each_sentence_is_in_one_split_in_order(tmp_path, vocabulary, small_pieces):
    documents = make_text(350)
    documents[100] *= 60  # This document is read in many pieces.
    documents += documents[:50]  # Equal documents are in the same split.
    manifest = prepare_text(tmp_path, documents, vocabulary=vocabulary, heldout_fraction=0.2)
    corpus = store.open_corpus(tmp_path / "corpus")
    tokenizer = Tokenizer(load_vocabulary(vocabulary))
    expected = [[tuple(tokenizer.encode(sentence)) for sentence in sentences] for sentences in documents]
    train, held = documents_of(corpus.train), documents_of(corpus.heldout)
    chosen = [document in held for document in expected]
    assert held == [d for d, c in zip(expected, chosen, strict=True) if c]
    assert train == [d for d, c in zip(expected, chosen, strict=True) if not c]
    assert 40 < len(held) < 120
    for name, split in ("train", corpus.train), ("heldout", corpus.heldout):
        counts = manifest["splits"][name]
        assert counts["tokens"] == split.tokens.size == int(split.sentences[-1])
        assert counts["sentences"] == split.sentences.size - 1 == int(split.documents[-1])
        assert counts["documents"] == split.documents.size - 1
    assert (tmp_path / "corpus" / "vocab.txt").read_bytes() == vocabulary.read_bytes()
    assert manifest["vocabulary"]["sha256"] == manifest["files"]["vocab.txt"]["sha256"]
    assert manifest["vocabulary"]["special_ids"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    total = sum(split["text_bytes"] for split in manifest["splits"].values())
    assert total == sum(len("\n".join(sentences)) for sentences in documents) + 1  # newline at the end of the file
    assert manifest["problems"] == {}


def test_sentences_of_running_text_keep_their_leading_space_in_byte_level_bpe(tmp_path):
    texts = [" ".join(f"{text[:-2].capitalize()}." for text in sentences) for sentences in make_text(80)]
    (tmp_path / "wiki").write_text("".join(f'<doc id="1">\n{text}\n</doc>\n' for text in texts))
    run(tmp_path, f"wiki:{tmp_path}/wiki", vocabulary_kind="bpe", vocabulary_size=300, heldout_fraction=0.2)
    corpus = store.open_corpus(tmp_path / "corpus")
    tokenizer = Tokenizer(corpus.vocabulary())
    documents = [*documents_of(corpus.train), *documents_of(corpus.heldout)]
    assert {tuple(itertools.chain(*document)) for document in documents} == {*map(tuple, map(tokenizer.encode, texts))}
    assert any(len(document) > 1 for document in documents)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_corpus_bytes_do_not_depend_on_workers_or_paths(tmp_path, kind, small_pieces):
    for place in "here", "there":
        (tmp_path / place).mkdir()
        write_text(tmp_path / place / "a.txt", make_text(150))
        (tmp_path / place / "b.txt").write_text(" ".join(s for d in make_text(90, seed=1) for s in d))
    settings = {"vocabulary_kind": kind, "vocabulary_size": 80}
    for place, workers in ("here", 1), ("there", 2):
        inputs = [f"text:{tmp_path}/{place}/a.txt", f"prose:{tmp_path}/{place}/b.txt"]
        run(tmp_path, *inputs, name=f"{place}/corpus", workers=workers, **settings)
    first, second = (bytes_of(tmp_path / place / "corpus") for place in ("here", "there"))
    assert first == second
    assert len(first) == 8  # six arrays, a vocabulary, a manifest


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_small_corpus_has_documents_in_both_splits_and_one_document_is_for_training(
    tmp_path, vocabulary, count, fraction
):
    text = make_text(count)
    text += text[:1] if count > 1 else []  # a document that occurs twice
    manifest = prepare_text(tmp_path, text, vocabulary=vocabulary, heldout_fraction=fraction)
    corpus = store.open_corpus(tmp_path / "corpus")
    train, held = documents_of(corpus.train), documents_of(corpus.heldout)
    assert train and len(held) >= chunks.min_documents(count)
    tokenizer = Tokenizer(load_vocabulary(vocabulary))
    expected = [[tuple(tokenizer.encode(sentence)) for sentence in sentences] for sentences in text]
    assert sorted(train + held) == sorted(expected)
    assert not {repr(d) for d in train} & {repr(d) for d in held}
    assert [manifest["splits"][split]["documents"] for split in store.SPLITS] == [len(train), len(held)]
    found = manifest["problems"].keys() - {"undivided_files", "single_sentence_documents"}
    assert found == ({"no_heldout_document"} if count == 1 else set())
    assert ("no document could be held out" in prepare.summary("corpus", manifest)) == (count == 1)


# Note in the summary, keyed by the numbers of documents and of sentences per document.
NOTES = {
    (20, 1): "20 documents, more than half, have one sentence",
    (4, 2): "50% of the tokens are held out",
    (1, 2): "1 files of text: have no blank line",
    (20, 2): "",
}


@pytest.mark.parametrize(("documents", "sentences"), NOTES)
def test_summary_notes_documents_that_do_not_suit_training(documents, sentences, tmp_path, vocabulary):
    text = [[f"river {number} .", "stone ."][:sentences] for number in range(documents)]
    summary = prepare.summary("corpus", prepare_text(tmp_path, text, vocabulary=vocabulary))
    assert "".join(note for note in NOTES.values() if note in summary) == NOTES[documents, sentences]


@pytest.mark.parametrize("chunk_bytes", [0, 2 << 20])
def test_problems_of_the_input_are_counted(tmp_path, vocabulary, chunk_bytes, monkeypatch):
    monkeypatch.setattr(chunks, "_MIN_CHUNK_BYTES", chunk_bytes)
    (tmp_path / "bad.txt").write_bytes(b"river \xff\xfestone\n\nlamp\x00\n\n\x01\x02\n\nwalk\n\n" + b"quiet " * 5000)
    (tmp_path / "empty.txt").write_bytes(b"")
    manifest = run(tmp_path, f"text:{tmp_path}/*.txt", f"text:{tmp_path}/bad.txt", vocabulary=vocabulary)
    assert manifest["problems"] == {
        "documents_without_sentences": 1,
        "empty_files": 1,
        "files_named_again": 1,
        "invalid_utf8_bytes": 2,
        "long_sentence_cuts": 3,
        "nul_characters": 1,
        "sentences_without_tokens": 1,
        "single_sentence_documents": 3,
    }
    text = prepare.summary("corpus", manifest)
    assert len(text.splitlines()) == 3 + len(manifest["problems"]) and "2 bytes were not UTF-8" in text


@pytest.mark.parametrize(("sentence", "warns"), [("river stone", False), ("\u6cb3 stone", True)])
def test_vocabulary_that_does_not_fit_the_text_logs_a_warning(sentence, warns, tmp_path, vocabulary, log_lines):
    prepare_text(tmp_path, [[sentence]] * 20, vocabulary=vocabulary)
    assert any("50% of the tokens are [UNK]; check that" in line for line in log_lines) == warns


def test_mixture_with_a_text_of_single_sentences_or_without_blank_lines_has_a_note(tmp_path, vocabulary):
    write_text(tmp_path / "wiki.txt", [["river ."] * 50 for _ in range(9)])
    write_text(tmp_path / "books.txt", [["stone ."]] * 20)
    (tmp_path / "text.txt").write_text("lamp .\n" * 20)
    manifest = run(
        tmp_path, *(f"text:{tmp_path}/{name}.txt" for name in ("wiki", "books", "text")), vocabulary=vocabulary
    )
    assert manifest["problems"] == {"single_sentence_documents": 20, "undivided_files": 1}


def test_every_problem_has_a_message():
    modules = readers, documents_module, sentences, chunks
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in modules)
    counted = {*re.findall(r'problems\["(\w+)"\]', source), "files_named_again"}
    assert counted == set(prepare._PROBLEMS)


@pytest.mark.parametrize("is_cased", [True, False])
@pytest.mark.parametrize("lower_case", [True, False, None])
def test_case_option_that_differs_from_the_vocabulary_logs_a_warning(
    tmp_path, vocabulary, log_lines, is_cased, lower_case
):
    capitals = "\n".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ") if is_cased else ""
    (tmp_path / "vocab.txt").write_bytes(vocabulary.read_bytes() + capitals.encode())
    manifest = prepare_text(tmp_path, make_text(5), vocabulary=tmp_path / "vocab.txt", lower_case=lower_case)
    assert manifest["vocabulary"]["lower_case"] == (not is_cased if lower_case is None else lower_case)
    option = "--uncased" if lower_case else "--cased"
    assert any(f"{option} does not match" in line for line in log_lines) == (lower_case == is_cased)
