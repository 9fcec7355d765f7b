"""Tests of tagged text: CoNLL files, table rows, and one label per word in the window with the most context."""

import numpy as np
import pytest

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.tagged import encode_tagged, read_conll, read_tagged_rows
from bertjax.errors import UsageError

FILE = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- O O

London NNP I-NP I-LOC
"""
LABELS = ["O", "I-LOC", "I-ORG", "I-PER"]


def read(tmp_path, content=FILE):
    path = tmp_path / "eng.train"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_conll(path, ReadStats(str(path)))


def test_conll_file_is_read_into_words_tags_and_documents(tmp_path):
    tagged = read(tmp_path)
    assert tagged.words == ["EU", "rejects", "Peter", "Blackburn", "London"]
    assert tagged.sentences(tagged.tags) == [["I-ORG", "O"], ["I-PER", "I-PER"], ["I-LOC"]]
    assert tagged.document_ends == [4, 5]


def test_byte_order_mark_and_line_endings_do_not_matter(tmp_path):
    variant = b"\xef\xbb\xbf" + FILE.rstrip().replace("\n", "\r\n").encode()
    assert read(tmp_path, variant) == read(tmp_path)


def test_bioes_and_bilou_tags_are_read(tmp_path):
    (tmp_path / "file").write_text("a S-PER\nb B-LOC\nc E-LOC\n\nd U-ORG\ne B-ORG\nf L-ORG\n")
    stats = ReadStats("file")
    assert read_conll(tmp_path / "file", stats).tags == ["S-PER", "B-LOC", "E-LOC", "U-ORG", "B-ORG", "L-ORG"]
    assert not stats.noted


@pytest.mark.parametrize(
    "content, message",
    [
        ("EU\n", "line 1: 'EU' has no tag"),
        ("EU X-ORG\n", "line 1: 'X-ORG' is not a tag of IOB, BIOES or BILOU"),
        ("a O\n\nEU ORG\n", "line 3: 'ORG' is not a tag"),
        ("\n\n-DOCSTART- O\n", "has no words"),
        ("a NNP I-NP O\nBob NNP I-NP\n", "line 2 has 3 columns, but earlier lines have 4"),
        ("New York\tNNP\tI-LOC\n", "line 1: 'New York' is not one word"),
    ],
)
def test_error_for_a_malformed_conll_line_names_the_line(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, content)


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    path = tmp_path / "eng.train"
    path.write_bytes(b"caf\xe9 O\n")
    stats = ReadStats(str(path))
    assert read_conll(path, stats).words == ["caf\ufffd"]
    assert stats.noted["with bytes that are not UTF-8"] == {"rows": 1, "first": "line 1"}


def test_table_rows_are_read_into_words_and_tags():
    rows = [
        Row(2, {"w": "a b", "t": "O B-X"}),
        Row(3, {"w": ["c", 5], "t": ["O", "O"]}),
        Row(4, {"w": "", "t": ""}),
    ]
    stats = ReadStats("file")
    tagged = read_tagged_rows(rows, "w", "t", stats)
    assert tagged.sentences(tagged.words) == [["a", "b"], ["c", "5"], []]
    assert stats.used == 3 and stats.noted["with an empty text"]["first"] == "line 4"
    with pytest.raises(UsageError, match="file line 5 has 2 words and 1 tags"):
        read_tagged_rows([Row(5, {"w": "a b", "t": "O"})], "w", "t", stats)
    for words in (["a b"], [""], [None], [["b"]]):
        with pytest.raises(UsageError, match="file line 6: .* is not a single word or tag"):
            read_tagged_rows([Row(6, {"w": words, "t": ["O"]})], "w", "t", stats)


@pytest.fixture(scope="module")
def tokenizer(letters):
    return Tokenizer(load_vocabulary(letters))


def test_special_token_as_a_word_is_one_token(tmp_path, tokenizer):
    tagged = read(tmp_path, "a O\n[MASK] O\n")
    examples, _, _ = encode_tagged(tagged, ["O"], tokenizer, 10, True, "file")
    assert tokenizer.pieces(examples.tokens["input_ids"]) == ["[CLS]", "a", "[MASK]", "[SEP]"]


def gather_labels(examples, example_of_word, positions):
    """Returns the label at each word's first piece, in the order of the file."""
    labels = examples.tokens["token_labels"]
    streams = [iter(labels[start + places]) for start, places in zip(examples.offsets[:-1], positions, strict=True)]
    return [int(next(streams[example])) for example in example_of_word]


@pytest.mark.parametrize("documents, seq_len", [(True, 64), (True, 12), (False, 64), (False, 8)])
def test_every_word_is_labeled_once(tmp_path, tokenizer, documents, seq_len):
    tagged = read(tmp_path)
    examples, example_of_word, positions = encode_tagged(tagged, LABELS, tokenizer, seq_len, documents, "file")
    assert gather_labels(examples, example_of_word, positions) == [LABELS.index(tag) for tag in tagged.tags]
    assert (examples.tokens["token_labels"] >= 0).sum() == len(tagged.words)
    assert examples.lengths.max() <= seq_len
    if seq_len == 64:
        assert len(examples) == (2 if documents else 3)
    # The label is at the word's first piece, a single letter in this vocabulary.
    for word, index in zip(tagged.words, example_of_word, strict=True):
        tokens = slice(examples.offsets[index], examples.offsets[index + 1])
        is_first = examples.tokens["token_labels"][tokens] >= 0
        assert word[0].lower() in tokenizer.pieces(examples.tokens["input_ids"][tokens][is_first])


def test_word_in_several_windows_is_labeled_in_the_one_with_most_context(tokenizer, tmp_path):
    tagged = read(tmp_path, "".join(f"{chr(97 + i)} O\n" for i in range(20)))
    examples, example_of_word, positions = encode_tagged(tagged, ["O"], tokenizer, 10, True, "file")
    assert len(examples) > 2
    letters = [example_words(tokenizer, examples, index) for index in range(len(examples))]
    for word, labeled_in in enumerate(example_of_word):
        letter = chr(97 + word)
        contexts = {index: context_of(letter, row) for index, row in enumerate(letters) if letter in row}
        assert contexts[labeled_in] == max(contexts.values())
    assert sum(map(len, positions)) == 20


def example_words(tokenizer, examples, index):
    return tokenizer.pieces(examples.tokens["input_ids"][examples.offsets[index] + 1 : examples.offsets[index + 1] - 1])


def context_of(letter, row):
    """Returns the distance of a letter to the nearer end of its row."""
    return min(row.index(letter), len(row) - 1 - row.index(letter))


def test_word_without_pieces_is_encoded_as_unknown(tokenizer, tmp_path):
    tagged = read(tmp_path, "a O\n\u200b I-LOC\nb O\n")
    examples, *rest = encode_tagged(tagged, LABELS, tokenizer, 16, False, "file")
    assert gather_labels(examples, *rest) == [0, 1, 0]


def test_unknown_tag_is_an_error_and_untagged_words_are_unlabeled(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="dev has unknown tags: I-PER"):
        encode_tagged(read(tmp_path), ["O", "I-LOC", "I-ORG"], tokenizer, 16, False, "dev")
    untagged = read_tagged_rows([Row(1, {"text": "EU rejects"})], "text", None, ReadStats(""))
    assert not untagged.has_tags
    unlabeled, *_ = encode_tagged(untagged, LABELS, tokenizer, 16, False, "test")
    assert (unlabeled.tokens["token_labels"] == -1).all()
    assert np.all(unlabeled.tokens["segment_ids"] == 0)
