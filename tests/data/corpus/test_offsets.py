"""Each piece knows the characters it was made of."""

import pytest

from bertjax.data.corpus.offsets import encode_with_offsets
from bertjax.data.corpus.tokenizer import Tokenizer, load_vocabulary
from bertjax.data.corpus.vocabulary import sentencepiece_model

TEXTS = [
    "The cat sat.",
    "  two  spaces\tand\na tab ",
    "Caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",  # composed accents, which are stripped
    "cafe\u0301s",  # a combining one
    "\u4e2d\u6587x and \u4e00",
    "soft\u00adhyphen zero\u200bwidth \ufffd\x00null",
    "\u039f\u0394\u039f\u03a3 \u03c3\u03bf\u03c6\u03bf\u03a3",  # final sigmas
    "don't--stop (now)!",
    "\u0130stanbul stra\u00dfe \ufb01sh",
    "x" * 300 + " unknown",
    "\u00a0nbsp\u00a0and\u3000wide",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(letters):
    return Tokenizer(load_vocabulary(letters))


@pytest.fixture(scope="module", params=[(True, False), (False, True), (False, False)], ids=["folds", "lower", "cased"])
def sentencepieces(request, tmp_path_factory):
    """Lower-cased by the model itself, by us before it, by neither."""
    folds, lower_case = request.param
    path = tmp_path_factory.mktemp("pieces") / "sp.model"
    path.write_bytes(sentencepiece_model([text.replace("x" * 300, "x") for text in TEXTS] * 9, 90, folds))
    return Tokenizer(load_vocabulary(path, lower_case=lower_case))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_tokenizer_s_and_spans_follow_each_other(tokenizer, text):
    ids, spans = encode_with_offsets(tokenizer, text)
    assert ids == tokenizer.encode(text)
    assert len(spans) == len(ids)
    for (start, end), (next_start, _) in zip(spans, spans[1:], strict=False):
        assert 0 <= start < end <= len(text) and start <= next_start


def test_spans_cover_what_the_piece_spells(tokenizer):
    text = 'The "cat", CAF\u00c9 cafe\u0301s; doing'
    ids, spans = encode_with_offsets(tokenizer, text)
    shown = [
        (piece.removeprefix("##"), text[start:end])
        for piece, (start, end) in zip(tokenizer.pieces(ids), spans, strict=True)
    ]
    assert shown[:6] == [("the", "The"), ('"', '"'), ("c", "c"), ("a", "a"), ("t", "t"), ('"', '"')]
    assert ("e", "\u00c9") in shown  # an accent goes with its letter
    assert ("e", "e\u0301") in shown
    assert shown[-1] == ("ing", "ing")


def test_an_unknown_word_is_covered_whole(tokenizer):
    text = "a \u0434\u0430 b"
    ids, spans = encode_with_offsets(tokenizer, text)
    assert [text[start:end] for start, end in spans] == ["a", "\u0434\u0430", "b"]
    assert ids[1] == tokenizer.vocabulary.unk_id


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_sentencepieces_are_the_tokenizer_s_and_spans_follow_each_other(sentencepieces, text):
    ids, spans = encode_with_offsets(sentencepieces, text)
    assert ids == sentencepieces.encode(text)
    assert len(spans) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    # Both pieces of a character that has become two cover it.
    assert all(end - 1 <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize(
    "text", ["The cat sat.", "\u00e9 \u0130stanbul \u0130 \u0130zmir", "  two  spaces\tand\na tab "]
)
def test_spans_of_sentencepieces_cover_every_word_and_no_space(sentencepieces, text):
    ids, spans = encode_with_offsets(sentencepieces, text)
    covered = {place for start, end in spans for place in range(start, end)}
    assert covered == {place for place, char in enumerate(text) if not char.isspace()}
    for piece, (start, end) in zip(sentencepieces.pieces(ids), spans, strict=True):
        if piece != "[UNK]" and "\u0130" not in text:
            assert text[start:end].lower() == piece.removeprefix("\u2581").lower()
