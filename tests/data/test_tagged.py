"""CoNLL files and their rows: every word told once, with as much context as there is."""

import numpy as np
import pytest

from bertjax.data.corpus.tokenizer import Tokenizer, load_vocabulary
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.tagged import make_rows, read_tagged, tagged_rows
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


def read(tmp_path, content=FILE, **options):
    path = tmp_path / "eng.train"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_tagged(path, ReadStats(str(path)), **options)


def test_words_tags_sentences_and_documents(tmp_path):
    tagged = read(tmp_path)
    assert tagged.words == ["EU", "rejects", "Peter", "Blackburn", "London"]
    assert tagged.sentences(tagged.tags) == [["I-ORG", "O"], ["I-PER", "I-PER"], ["I-LOC"]]
    assert tagged.document_ends == [4, 5]


def test_windows_line_ends_a_byte_order_mark_and_no_last_line_end_change_nothing(tmp_path):
    other = b"\xef\xbb\xbf" + FILE.rstrip().replace("\n", "\r\n").encode()
    assert read(tmp_path, other) == read(tmp_path)


@pytest.mark.parametrize(
    "content, noted",
    [
        ("a I-PER\nb I-PER\nc B-PER\n\nd I-LOC\n", {}),
        ("a B-PER\nb I-PER\nc B-PER\n\nd B-LOC\n", {}),
        ("a B-PER\nb I-LOC\n\nd I-LOC\n", {"B-, 2 with I-": {"rows": 1, "first": "line 1"}}),
        ("a B-PER\nb B-LOC\n\nd I-LOC\n", {"I-, 2 with B-": {"rows": 1, "first": "line 4"}}),
    ],
)
def test_iob1_beside_iob2_is_noted(content, noted, tmp_path):
    (tmp_path / "file").write_text(content)
    reading = ReadStats("file")
    read_tagged(tmp_path / "file", reading)
    assert reading.noted == {f"entities begin with {how}: IOB1 and IOB2 mixed": what for how, what in noted.items()}


@pytest.mark.parametrize("stray, mixed", [(1, False), (2, True)])
def test_a_tag_that_is_odd_here_and_there_is_no_other_scheme(stray, mixed, tmp_path):
    sentences = ["a B-PER\n"] * stray + ["b I-PER\nc O\n"] * (150 - stray)
    (tmp_path / "file").write_text("\n".join(sentences))
    reading = ReadStats("file")
    read_tagged(tmp_path / "file", reading)
    ((what, where),) = reading.noted.items()
    assert where == {"rows": stray, "first": "line 1"}
    assert (what == "with an odd tag: an entity begins with B-, 149 with I-") != mixed
    assert ("mixed" in what) == mixed


def test_bioes_is_one_scheme_and_noted_as_nothing(tmp_path):
    (tmp_path / "file").write_text("a S-PER\nb B-LOC\nc E-LOC\n\nd U-ORG\ne B-ORG\nf L-ORG\n")
    reading = ReadStats("file")
    assert read_tagged(tmp_path / "file", reading).tags == ["S-PER", "B-LOC", "E-LOC", "U-ORG", "B-ORG", "L-ORG"]
    assert not reading.noted


@pytest.mark.parametrize(
    "content, says",
    [
        ("EU\n", "line 1: 'EU' has no tag"),
        ("EU X-ORG\n", "line 1: the tag 'X-ORG' is neither O nor B-TYPE, I-TYPE and the like"),
        ("a O\n\nEU ORG\n", "line 3: the tag 'ORG'"),
        ("\n\n-DOCSTART- O\n", "has no words"),
        ("a NNP I-NP O\nBob NNP I-NP\n", "line 2 has 3 columns, the first word's has 4"),
        ("New York\tNNP\tI-LOC\n", "line 1: the word 'New York' is no word"),
    ],
)
def test_what_is_not_conll_is_refused_with_its_line(tmp_path, content, says):
    with pytest.raises(UsageError, match=says):
        read(tmp_path, content)


def test_bytes_that_are_not_utf8_are_noted(tmp_path):
    path = tmp_path / "eng.train"
    path.write_bytes(b"caf\xe9 O\n")
    reading = ReadStats(str(path))
    assert read_tagged(path, reading).words == ["caf\ufffd"]
    assert reading.noted["with bytes that are not UTF-8"] == {"rows": 1, "first": "line 1"}


def test_a_row_of_a_table_is_a_sentence():
    rows = [
        Row(2, {"w": "a b", "t": "O B-X"}),
        Row(3, {"w": ["c", 5], "t": ["O", "O"]}),
        Row(4, {"w": "", "t": ""}),
    ]
    reading = ReadStats("file")
    tagged = tagged_rows(rows, "w", "t", reading)
    assert tagged.sentences(tagged.words) == [["a", "b"], ["c", "5"], []]
    assert reading.used == 3 and reading.noted["with an empty text"]["first"] == "line 4"
    with pytest.raises(UsageError, match="file line 5: 2 words and 1 tags"):
        tagged_rows([Row(5, {"w": "a b", "t": "O"})], "w", "t", reading)
    for words in (["a b"], [""], [None], [["b"]]):
        with pytest.raises(UsageError, match="file line 6: .* is no word"):
            tagged_rows([Row(6, {"w": words, "t": ["O"]})], "w", "t", reading)


@pytest.fixture(scope="module")
def tokenizer(letters):
    return Tokenizer(load_vocabulary(letters))


def told(examples, row_of_word, positions):
    """Labels at the first piece of each word, in the order of the file."""
    labels = examples.tokens["token_labels"]
    streams = [iter(labels[examples.offsets[row] + places]) for row, places in enumerate(positions)]
    return [int(next(streams[row])) for row in row_of_word]


@pytest.mark.parametrize("documents, seq_len", [(True, 64), (True, 12), (False, 64), (False, 8)])
def test_every_word_has_its_label_once(tmp_path, tokenizer, documents, seq_len):
    tagged = read(tmp_path)
    examples, row_of_word, positions = make_rows(tagged, LABELS, tokenizer, seq_len, documents, "file")
    assert told(examples, row_of_word, positions) == [LABELS.index(tag) for tag in tagged.tags]
    assert (examples.tokens["token_labels"] >= 0).sum() == len(tagged.words)
    assert examples.lengths.max() <= seq_len
    if seq_len == 64:
        assert len(examples) == (2 if documents else 3)
    # The label stands at the word's first letter.
    for word, row in zip(tagged.words, row_of_word, strict=True):
        here = slice(examples.offsets[row], examples.offsets[row + 1])
        firsts = tokenizer.pieces(examples.tokens["input_ids"][here][examples.tokens["token_labels"][here] >= 0])
        assert word[0].lower() in firsts


def test_a_word_in_several_rows_is_told_where_it_is_farthest_from_an_end(tokenizer, tmp_path):
    tagged = read(tmp_path, "".join(f"{chr(97 + i)} O\n" for i in range(20)))
    examples, row_of_word, positions = make_rows(tagged, ["O"], tokenizer, 10, True, "file")
    assert len(examples) > 2
    for word, row in enumerate(row_of_word):
        starts = [i for i in range(len(examples)) if f"{chr(97 + word)}" in words(tokenizer, examples, i)]
        margins = {i: margin(words(tokenizer, examples, i), chr(97 + word)) for i in starts}
        assert margins[row] == max(margins.values())
    assert sum(map(len, positions)) == 20


def words(tokenizer, examples, row):
    return tokenizer.pieces(examples.tokens["input_ids"][examples.offsets[row] + 1 : examples.offsets[row + 1] - 1])


def margin(row, word):
    return min(row.index(word), len(row) - 1 - row.index(word))


def test_a_word_without_pieces_is_unknown_and_still_told(tokenizer, tmp_path):
    tagged = read(tmp_path, "a O\n\u200b I-LOC\nb O\n")
    examples, *rest = make_rows(tagged, LABELS, tokenizer, 16, False, "file")
    assert told(examples, *rest) == [0, 1, 0]


def test_a_tag_the_training_file_has_not_is_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="dev has tags that are not among the known ones: I-PER"):
        make_rows(read(tmp_path), ["O", "I-LOC", "I-ORG"], tokenizer, 16, False, "dev")
    words = tagged_rows([Row(1, {"text": "EU rejects"})], "text", None, ReadStats(""))
    assert not words.has_tags
    unlabelled, *_ = make_rows(words, LABELS, tokenizer, 16, False, "test")
    assert (unlabelled.tokens["token_labels"] == -1).all()
    assert np.all(unlabelled.tokens["segment_ids"] == 0)
