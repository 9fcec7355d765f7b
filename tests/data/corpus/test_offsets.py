"""Character offsets of token ids."""

import pytest

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.corpus.vocabulary_training import sentencepiece_model

TEXTS = [
    "The cat sat.",
    "  two  spaces\tand\na tab ",
    "Caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",  # precomposed accents
    "cafe\u0301s",  # combining accent
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
    """Returns a SentencePiece tokenizer that lower-cases in its model, lower-cases before its model, or keeps case."""
    folds, lower_case = request.param
    path = tmp_path_factory.mktemp("pieces") / "sp.model"
    path.write_bytes(sentencepiece_model([text.replace("x" * 300, "x") for text in TEXTS] * 9, 90, folds))
    return Tokenizer(load_vocabulary(path, lower_case=lower_case))


@pytest.mark.parametrize("text", TEXTS)
def test_wordpiece_offsets_are_ordered_and_ids_match_encode(tokenizer, text):
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(spans) == len(ids)
    for (start, end), (next_start, _) in zip(spans, spans[1:], strict=False):
        assert 0 <= start < end <= len(text) and start <= next_start


def test_spans_cover_the_text_of_each_piece(tokenizer):
    text = 'The "cat", CAF\u00c9 cafe\u0301s; doing'
    ids, spans = tokenizer.encode_with_offsets(text)
    shown = [
        (piece.removeprefix("##"), text[start:end])
        for piece, (start, end) in zip(tokenizer.pieces(ids), spans, strict=True)
    ]
    assert shown[:6] == [("the", "The"), ('"', '"'), ("c", "c"), ("a", "a"), ("t", "t"), ('"', '"')]
    assert ("e", "\u00c9") in shown  # the span of a letter includes its accent
    assert ("e", "e\u0301") in shown
    assert shown[-1] == ("ing", "ing")


def test_span_of_an_unknown_word_covers_the_word(tokenizer):
    text = "a \u0434\u0430 b"
    ids, spans = tokenizer.encode_with_offsets(text)
    assert [text[start:end] for start, end in spans] == ["a", "\u0434\u0430", "b"]
    assert ids[1] == tokenizer.vocabulary.unk_id


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_offsets_are_ordered_and_ids_match_encode(sentencepieces, text):
    ids, spans = sentencepieces.encode_with_offsets(text)
    assert ids == sentencepieces.encode(text)
    assert len(spans) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    # Successive spans overlap by at most one character, which both pieces share.
    assert all(end - 1 <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize(
    "text", ["The cat sat.", "\u00e9 \u0130stanbul \u0130 \u0130zmir", "  two  spaces\tand\na tab "]
)
def test_sentencepiece_spans_cover_words_and_no_spaces(sentencepieces, text):
    ids, spans = sentencepieces.encode_with_offsets(text)
    covered = {place for start, end in spans for place in range(start, end)}
    assert covered == {place for place, char in enumerate(text) if not char.isspace()}
    for piece, (start, end) in zip(sentencepieces.pieces(ids), spans, strict=True):
        if piece != "[UNK]" and "\u0130" not in text:
            assert text[start:end].lower() == piece.removeprefix("\u2581").lower()
