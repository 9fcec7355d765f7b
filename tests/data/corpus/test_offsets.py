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


# SentencePiece vocabularies lower-case in the model, lower-case before the model, or keep case.
KINDS = {"wordpiece": (False, True), "folds": (True, False), "lower": (False, True), "cased": (False, False)}


@pytest.fixture(scope="module")
def tokenizers(letters, tmp_path_factory):
    """Returns a tokenizer of each kind."""
    made = {}
    for kind, (folds, lower_case) in KINDS.items():
        path = tmp_path_factory.mktemp("pieces") / "sp.model"
        path.write_bytes(sentencepiece_model([text.replace("x" * 300, "x") for text in TEXTS] * 9, 90, folds))
        made[kind] = Tokenizer(load_vocabulary(letters if kind == "wordpiece" else path, lower_case))
    return made


@pytest.fixture(scope="module")
def tokenizer(tokenizers):
    return tokenizers["wordpiece"]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_ordered_and_ids_match_encode(tokenizers, kind):
    for text in TEXTS:
        ids, spans = tokenizers[kind].encode_with_offsets(text)
        assert ids == tokenizers[kind].encode(text) and len(spans) == len(ids), text
        assert all(0 <= start <= end <= len(text) for start, end in spans), text
        pairs = list(zip(spans, spans[1:], strict=False))
        if kind == "wordpiece":
            assert all(start < end for start, end in spans), text
            assert all(start <= next_start for (start, _), (next_start, _) in pairs), text
        else:
            # Successive spans overlap by at most one character, which both pieces share.
            assert all(end - 1 <= next_start for (_, end), (next_start, _) in pairs), text


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


@pytest.mark.parametrize("kind", ["folds", "lower", "cased"])
@pytest.mark.parametrize(
    "text", ["The cat sat.", "\u00e9 \u0130stanbul \u0130 \u0130zmir", "  two  spaces\tand\na tab "]
)
def test_sentencepiece_spans_cover_words_and_no_spaces(tokenizers, kind, text):
    ids, spans = tokenizers[kind].encode_with_offsets(text)
    covered = {place for start, end in spans for place in range(start, end)}
    assert covered == {place for place, char in enumerate(text) if not char.isspace()}
    for piece, (start, end) in zip(tokenizers[kind].pieces(ids), spans, strict=True):
        if piece != "[UNK]" and "\u0130" not in text:
            assert text[start:end].lower() == piece.removeprefix("\u2581").lower()
