"""Tests of tagged text: CoNLL files, table rows, and one label per word in the window with the most context."""

import numpy as np
import pytest

from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.tagged import encode_tagged, gather_words, read_conll, read_tagged_rows
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


def read(tmp_path, content=FILE, stats=None, **options):
    path = tmp_path / "eng.train"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_conll(path, stats or ReadStats(str(path)), **options)


def test_conll_file_is_read_into_words_tags_and_documents(tmp_path):
    tagged = read(tmp_path)
    assert tagged.sentences == [["EU", "rejects"], ["Peter", "Blackburn"], ["London"]]
    assert tagged.tags == [["I-ORG", "O"], ["I-PER", "I-PER"], ["I-LOC"]]
    assert tagged.documents == [1, 1, 2] and tagged.lines == [3, 6, 11]
    # A byte-order mark and Windows line endings do not matter.
    variant = b"\xef\xbb\xbf" + FILE.rstrip().replace("\n", "\r\n").encode()
    assert read(tmp_path, variant) == read(tmp_path)
    assert read(tmp_path, FILE.replace("-DOCSTART-", "-DOCSTART-(7)")) == read(tmp_path)
    # Neither do byte-order marks of concatenated files.
    assert read(tmp_path, FILE.replace("-DOCSTART-", "\ufeff-DOCSTART-")) == read(tmp_path)
    assert read(tmp_path, FILE.replace("-DOCSTART- -X- O O", "# newdoc id = 7")) == read(tmp_path)


def test_words_that_a_csv_writer_quoted_are_counted(tmp_path):
    stats = ReadStats("")
    assert read(tmp_path, 'a\tO\n"\tO\n""""\tO\n"5"""\tO\n', stats).sentences == [["a", '"', '""""', '"5"""']]
    assert stats.noted == {"words with quotes, as CSV writers add them": {"rows": 2, "first": "line 3"}}


@pytest.mark.parametrize("tags", [["S-PER", "B-LOC", "M-LOC", "E-LOC", "U-ORG", "B-ORG", "L-ORG"], ["B", "I", "O"]])
def test_bioes_bilou_and_bmes_tags_and_tags_without_a_type_are_read(tags, tmp_path):
    assert read(tmp_path, "".join(f"a {tag}\n" for tag in tags)).tags == [tags]


WORDS, TAGS = [["EU", "#"], ["Bob", "in"]], [["B-ORG", "O"], ["I-PER", "O"]]


@pytest.mark.parametrize(
    "content",
    [
        # Word indices that start at 1 or 0 in each sentence, or continue through the whole file.
        "1 EU NNP B-ORG\n2 # # O\n\n1 Bob NNP I-PER\n2 in IN O\n",
        "0\tEU\tB-ORG\n1\t#\tO\n\n0\tBob\tI-PER\n1\tin\tO\n",
        "[1] EU B-ORG\n[2] # O\n\n[1] Bob I-PER\n[2] in O\n",
        "T1 EU B-ORG\nT2 # O\n\nT3 Bob I-PER\nT4 in O\n",
        # Indices of sentences and words.
        "1-1\tEU\tB-ORG\n1-2\t#\tO\n\n2-1\tBob\tI-PER\n2-2\tin\tO\n",
        # WikiANN, in one or several languages.
        "en:EU B-ORG\nen:# O\n\nen:Bob I-PER\nen:in O\n",
        "en:EU B-ORG\nen:# O\n\nde:Bob I-PER\nde:in O\n",
        # CoNLL-U: comments, a range of words (multiword token), and an empty word.
        "# text = EU # O\n1-2\tEU#\t_\n1\tEU\tB-ORG\n2\t#\tO\n2.1\tx\t_\n\n# O\n1\tBob\tI-PER\n2\tin\tO\n",
        # GermEval: outer and inner tags.
        "#\thttp://x [2009]\n1\tEU\tB-ORG\tB-PER\n2\t#\tO\tO\n\n#\ty\n1\tBob\tI-PER\tO\n2\tin\tO\tO\n",
        "#\ty\n1\tEU\tB-ORG\tB-LOC\n2\t#\tO\tO\n\n1\tBob\tI-PER\tO\n2\tin\tO\tO\n",
        "EU B-ORG O O\n# O O O\n\nBob I-PER O O\nin O O O\n",
        # Without indices, a line that starts with # is a word if it has a tag.
        "# id = 1\nEU B-ORG\n# O\n\n#\nBob I-PER\nin O\n",
        # Chunks are not an outer level of entities.
        "EU B-NP B-ORG\n# O O\n\nBob B-NP I-PER\nin B-PP O\n",
        "EU B-ORG B-NP\n# O O\n\nBob I-PER B-NP\nin O B-PP\n",
    ],
)
def test_columns_of_words_and_tags_are_found(tmp_path, content):
    tagged = read(tmp_path, content)
    assert (tagged.sentences, tagged.tags) == (WORDS, TAGS)
    assert read(tmp_path, content.replace("\n", "\r")) == tagged


@pytest.mark.parametrize(
    "content, counted",
    [
        (b"#\ty\tO\tO\n1\tEU\tB-ORG\tO\n", "words in column 2, tags in column 3 of 4, 1 comments (#) (first: line 1)"),
        (b"en:EU NNP B-ORG\n", "words in column 1, tags in column 3 of 3, 1 words read without their prefix 'en:'"),
    ],
)
def test_used_columns_and_irregular_lines_are_counted(tmp_path, content, counted):
    stats = ReadStats("file")
    read(tmp_path, content, stats)
    assert f"file: 1 rows read, 1 used, {counted}" in stats.summary()


@pytest.mark.parametrize(
    "content, tags, warning",
    [
        ("a B-PER B-GPE\nb O O\n", ["B-GPE", "O"], "in the columns 2, 3; those of column 3 are used"),
        ("1 a B-PER B-PER\n2 b O O\n", ["B-PER", "O"], "in the columns 3, 4; those of column 3 are used"),
        ("a B-PER|B-LOC\nb O\n", ["B-PER|B-LOC", "O"], "with several types, such as 'PER|B-LOC', counts as one type"),
        ("a B-NP B-PER O\nb O O O\n", ["B-PER", "O"], ""),
        # A column of chunks is not the tag column, even if the file has no entities.
        ("EU NNP B-NP O\nin IN B-PP O\n", ["O", "O"], ""),
    ],
)
def test_ignored_tag_columns_and_joined_types_log_a_warning(content, tags, warning, tmp_path, caplog):
    assert read(tmp_path, content).tags == [tags]
    assert [warning in message for message in caplog.messages] == [True] * bool(warning)


@pytest.mark.parametrize("word", ["10\u00a0000", "\u3000", "\u2028"])
def test_only_ascii_whitespace_separates_words(word, tmp_path):
    for separator in " \t":
        content = f"{word} NN O\nEU NN B-ORG\n\u3000\na NN O\n"
        assert read(tmp_path, content.replace(" ", separator)).sentences == [[word, "EU"], ["a"]]
    row = Row(2, {"w": f"{word} EU", "t": "O O"})
    assert read_tagged_rows([row], "w", "t", ReadStats("file")).sentences == [[word, "EU"]]


def test_words_may_be_numbers_and_lack_tags(tmp_path):
    assert read(tmp_path, "1 O\n5 B-X\n").sentences == [["1", "5"]]
    assert read(tmp_path, "1\n2\n", labeled=False).sentences == [["1", "2"]]
    untagged = read(tmp_path, "1\tza\n2\tba\n", labeled=False)
    assert untagged.sentences == [["za", "ba"]] and not untagged.has_tags


@pytest.mark.parametrize(
    "content, message",
    [
        ("1 EU B-ORG\n1 in O\n", "line 2: .* '1' does not count"),
        ("7 EU B-ORG\n8 in O\n", "line 1: .* '7' does not count"),
        ("s EU B-ORG\ns in O\n\nt a O\nt b O\n", "column 1 .* such as 's'"),
        # WebAnno's character offsets.
        ("1-1 0-2 EU B-ORG\n1-2 3-5 in O\n", "column 2 contains no words: its values, such as '0-2', end with"),
        # Weibo NER: characters with their position in a word.
        ("a0 O\nb1 O\n" * 10, "column 1 contains no words: its values, such as 'a0', end with numbers"),
        ("Sentence: 1\tEU\tB-ORG\n\tin\tO\n", "line 1: 'Sentence: 1' is not one word"),
        ("EU\n", "line 1: the tag of 'EU' is ''"),
        ("a O\n\nEU X-ORG\n", "line 3: the tag of 'EU' is 'X-ORG'"),
        ("\n\n-DOCSTART- O\n", "has no words"),
        ("a NNP I-NP O\nBob NNP I-NP\n", "line 2 has 3 columns, but earlier lines have 4"),
        # A misspelled tag in the outer column is rejected; the inner column is not used instead.
        ("a B-PER O\nb I-PER O\nc B-LOC B-PER\nd OE O\n", "line 4: the tag of 'd' is 'OE'"),
    ],
)
def test_error_for_a_malformed_conll_line_names_the_line(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, content)


def test_many_rows_of_one_word_each_are_rejected():
    rows = [Row(line, {"w": "a", "t": "O"}) for line in range(20)]
    with pytest.raises(UsageError, match="file has one word per row; write one sentence per row"):
        read_tagged_rows(rows, "w", "t", ReadStats("file"))
    assert len(read_tagged_rows(rows[1:], "w", "t", ReadStats("file"))) == 19
    assert len(read_tagged_rows(rows, "w", None, ReadStats("file"))) == 20


def test_blank_lines_after_every_word_do_not_separate_sentences(tmp_path):
    with pytest.raises(UsageError, match="a blank line after every word"):
        read(tmp_path, "a B-X\n\n" * 20)
    assert len(read(tmp_path, "a B-X\n\n" * 19)) == 19
    assert len(read(tmp_path, "a B-X\n\n" * 20 + "b O\nc O\n")) == 21


def test_table_rows_are_read_into_words_and_tags():
    rows = [
        Row(2, {"w": "a b", "t": "O B-X"}),
        Row(3, {"w": ["c", 5], "t": ["O", "O"]}),
        Row(4, {"w": "", "t": ""}),
        Row(5, {"w": "['d', \"e\"]", "t": '["O", "B-X"]'}),
        Row(6, {"w": "[ (1)", "t": "('O', 'O')"}),
    ]
    stats = ReadStats("file")
    tagged = read_tagged_rows(rows, "w", "t", stats)
    assert tagged.sentences == [["a", "b"], ["c", "5"], [], ["d", "e"], ["[", "(1)"]]
    assert tagged.tags[-2:] == [["O", "B-X"], ["O", "O"]]
    assert stats.used == 5 and stats.noted["with an empty text"]["first"] == "line 4"
    assert read_tagged_rows([Row(5, {"w": "a ,", "t": "NN ,"})], "w", "t", stats).tags == [["NN", ","]]


@pytest.mark.parametrize(
    "words, tags, message",
    [
        ("a b", "O", "has 2 words and 1 tags"),
        *((words, "O,B-X", "'O,B-X' is not a tag; .* separated by spaces") for words in ("a,b", "a b")),
        ("['a' 'b']", "O O", ".*'a' 'b'.*, not a list"),
        *(([word], ["O"], ".* is not a word or tag") for word in ("a b", "", None, float("nan"))),
        ("a b", [[0, 1, "X"]], r".*\[0, 1, 'X'\] is not a word or tag"),
    ],
)
def test_error_for_malformed_words_or_tags_names_the_line(words, tags, message):
    with pytest.raises(UsageError, match=f"file line 5:? {message}"):
        read_tagged_rows([Row(5, {"w": words, "t": tags})], "w", "t", ReadStats("file"))


def encode(tagged, tokenizer, labels=LABELS, seq_len=16, by_document=False):
    return encode_tagged(tagged, labels, tokenizer, seq_len, by_document, "dev")


def gather_labels(examples, places):
    """Returns the label at each word's first piece, one list per sentence."""
    return gather_words(places, np.split(examples.tokens["token_labels"], examples.offsets[1:-1]))


@pytest.mark.parametrize("documents, seq_len", [(True, 64), (True, 12), (False, 64), (False, 8)])
def test_every_word_is_labeled_once(tmp_path, tokenizer, documents, seq_len):
    tagged = read(tmp_path)
    examples, places = encode(tagged, tokenizer, seq_len=seq_len, by_document=documents)
    assert gather_labels(examples, places) == [[LABELS.index(tag) for tag in tags] for tags in tagged.tags]
    assert (examples.tokens["token_labels"] >= 0).sum() == 5
    assert examples.lengths.max() <= seq_len
    if seq_len == 64:
        assert len(examples) == (2 if documents else 3)
    # The label is at the word's first piece, a single letter in this vocabulary.
    pieces = np.split(examples.tokens["input_ids"], examples.offsets[1:-1])
    first_pieces = [tokenizer.pieces(ids) for ids in gather_words(places, pieces)]
    assert first_pieces == [[word[0].lower() for word in sentence] for sentence in tagged.sentences]


def test_word_in_several_windows_is_labeled_in_the_one_with_most_context(tokenizer, tmp_path):
    tagged = read(tmp_path, "".join(f"{chr(97 + i)} O\n" for i in range(20)))
    examples, (places,) = encode(tagged, tokenizer, ["O"], 10, by_document=True)
    assert len(examples) > 2 and len(places) == 20
    rows = [tokenizer.pieces(ids[1:-1]) for ids in np.split(examples.tokens["input_ids"], examples.offsets[1:-1])]
    for word, (labeled_in, _) in enumerate(places):
        letter = chr(97 + word)
        # The context of a letter is its distance to the nearer end of the row.
        contexts = {
            index: min(row.index(letter), len(row) - 1 - row.index(letter))
            for index, row in enumerate(rows)
            if letter in row
        }
        assert contexts[labeled_in] == max(contexts.values())


def test_special_token_stays_one_token_and_a_word_without_tokens_becomes_unk(tokenizer, tmp_path):
    examples, places = encode(read(tmp_path, "[MASK] O\n\u200b I-LOC\nb O\n"), tokenizer)
    assert gather_labels(examples, places) == [[0, 1, 0]]
    assert tokenizer.pieces(examples.tokens["input_ids"]) == ["[CLS]", "[MASK]", "[UNK]", "b", "[SEP]"]


def test_unknown_tag_is_an_error_and_untagged_words_are_unlabeled(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="dev has unknown tags: I-PER .*config.data.labels"):
        encode(read(tmp_path), tokenizer, ["O", "I-LOC", "I-ORG"])
    ids = read_tagged_rows([Row(1, {"text": "EU a", "tags": [-1, "3.0"]})], "text", "tags", ReadStats(""))
    with pytest.raises(UsageError, match=r"unknown tags: -1, 3\.0 .* write names instead of ids"):
        encode(ids, tokenizer)
    with pytest.raises(UsageError, match="line 1: '-100' is not a tag"):
        read_tagged_rows([Row(1, {"text": "EU a", "tags": [1, -100]})], "text", "tags", ReadStats("file"))
    untagged = read_tagged_rows([Row(1, {"text": "EU rejects"})], "text", None, ReadStats(""))
    assert not untagged.has_tags
    unlabeled, _ = encode(untagged, tokenizer)
    assert (unlabeled.tokens["token_labels"] == -1).all()
    assert np.all(unlabeled.tokens["segment_ids"] == 0)
