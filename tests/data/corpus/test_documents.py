"""Splitting of documents into sentences."""

import random
from collections import Counter

import pytest

from bertjax.data.corpus.documents import Text, grouped, rows, with_spaces
from bertjax.data.corpus.sentences import LINES, MAX_SENTENCE_CHARS, PARAGRAPHS, WRAPPED, split_sentences
from bertjax.data.corpus.vocabulary import BPE, SENTENCEPIECE
from bertjax.data.corpus.vocabulary_training import training_data

WRAPPED_TEXT = """\
It was the first of May, and the two of them had walked
since dawn along the river. Nobody spoke until noon.
Then Mr. Green sat down.
"We are lost," he said, and looked about him at the
hills, which had no end.

The map was wet."""


WRAPPED_SENTENCES = [
    "It was the first of May, and the two of them had walked since dawn along the river.",
    "Nobody spoke until noon.",
    "Then Mr. Green sat down.",
    '"We are lost," he said, and looked about him at the hills, which had no end.',
    "The map was wet.",
]


@pytest.mark.parametrize(
    ("layout", "text", "sentences"),
    [
        (LINES, " One. Two.\r\n\nThree \n", ["One. Two.", "Three"]),
        (PARAGRAPHS, "Dr. Smith came. He left.\nMe?\n\n   \nEnd", ["Dr. Smith came.", "He left.", "Me?", "End"]),
        (WRAPPED, WRAPPED_TEXT, WRAPPED_SENTENCES),
    ],
)
def test_layout_determines_the_sentences_of_a_text(layout, text, sentences):
    assert split_sentences(text, layout, Counter()) == sentences


def test_no_character_is_lost():
    draw = random.Random(1)
    # `sentencex` fails next to multi-byte whitespace, so `split_sentences` replaces or drops it.
    characters = "aB.!? \n\"'()[]\u00e9\u4e2d\u3002\u201c\u201d\u2026\u00a0\u2003\u2028\u3000\x85\u0301\U0001f600"
    parts = [*characters, "Mr. ", "e.g. ", "\r\n", "1. ", "\n\n", "U.S. "]
    for form in LINES, PARAGRAPHS, WRAPPED:
        for _ in range(3000):
            text = "".join(draw.choice(parts) for _ in range(draw.randrange(60)))
            problems = Counter()
            sentences = split_sentences(text, form, problems)
            assert "".join("".join(sentences).split()) == "".join(text.split()), repr(text)
            assert all(sentence and sentence == sentence.strip() for sentence in sentences)
            assert not problems


def test_text_without_sentence_ends_is_split_at_white_space():
    words = [f"word{i}" for i in range(20_000)]
    for form in LINES, PARAGRAPHS, WRAPPED:
        problems = Counter()
        sentences = split_sentences(" ".join(words), form, problems)
        assert max(map(len, sentences)) <= MAX_SENTENCE_CHARS
        assert " ".join(sentences).split() == words
        assert problems["long_sentence_cuts"] > 0 and problems["long_sentence_cuts"] >= len(sentences) - 3


def test_sentences_after_an_unclosed_quote_are_split():
    text = '"Open. ' + "This is one sentence. " * 20_000
    assert len(split_sentences(text, PARAGRAPHS, Counter())) > 15_000


def test_sentences_of_running_text_have_the_space_before_them():
    sentences = ["One.", "Two."]
    assert with_spaces(sentences, Text("", PARAGRAPHS)) == ["One.", " Two."]
    assert with_spaces(sentences, Text("", PARAGRAPHS, continues=True)) == [" One.", " Two."]
    assert (
        with_spaces(sentences, Text("", LINES)) == training_data([Text("One.\nTwo.", LINES)], BPE, False) == sentences
    )
    assert training_data([Text("One. Two.", PARAGRAPHS)], BPE, False) == ["One.", " Two."]
    assert training_data([Text("One. Two.", PARAGRAPHS)], SENTENCEPIECE, False) == sentences


@pytest.mark.parametrize(("divide_documents", "expected"), [(False, ["abc", "d"]), (True, ["ab", "cd"])])
def test_groups_keep_documents_whole_unless_they_may_be_divided(divide_documents, expected):
    texts = [Text(char, LINES, continues=char in "bc") for char in "abcd"]
    groups = grouped(texts, 2, divide_documents)
    assert ["".join(text.text for text in group) for group in groups] == expected


HINDI = "\u0926\u093f\u0932\u094d\u0932\u0940 " * 9
MARKERS = [f"*** {name} OF THIS PROJECT GUTENBERG EBOOK ***" for name in ("START", "END")]


@pytest.mark.parametrize(
    ("row", "layout", "expected"),
    [
        (
            "\n".join(4 * ["It was the first of May, and the two", "of them had walked along the river", "now."]),
            WRAPPED,
            4,
        ),
        ("\n".join(3 * [HINDI, HINDI, f"{HINDI}\u0964"]), WRAPPED, 3),
        ("\n".join(5 * [f"{HINDI}\u0964"]), PARAGRAPHS, 5),
        ("\n".join(9 * ["item of a list"]), PARAGRAPHS, 9),
        ("\n".join(9 * ["A line of a poem, or of a list of rather long items"]), PARAGRAPHS, 9),
        (f"License.\n{MARKERS[0]}\nOne. Two.\n{MARKERS[1]}\nLicense.", PARAGRAPHS, 2),
    ],
)
def test_rows_of_datasets_are_unwrapped_if_they_are_running_text(row, layout, expected):
    (text,) = rows([row], Counter())
    sentences = split_sentences(text.text, text.layout, Counter())
    assert (text.layout, len(sentences)) == (layout, expected) and "License." not in sentences
