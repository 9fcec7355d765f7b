"""The tokenizer compared with a simple implementation of google-research/bert's rules, and character offsets."""

import itertools
import pickle
import random
import subprocess
import sys
import unicodedata

import numpy as np
import pytest

from bertjax.data.corpus import tokenizer as tokenizer_module
from bertjax.data.corpus.tokenizer import BasicTokenizer, Tokenizer
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, _special_ids, load_vocabulary
from bertjax.data.corpus.vocabulary_training import sentencepiece_model
from bertjax.errors import UsageError

SPECIAL = [*SPECIAL_PIECES]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [
    *SPECIAL,
    *LETTERS,
    *(f"##{c}" for c in LETTERS),
    *"0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    *(f"##{c}" for c in "0123456789"),
    *["the", "un", "##aff", "##able", "hello", "world", "mask", "cls", "##ing", "run", "##n", "##ning", "cafe"],
    *"\u4e2d\u6587\u03c3\u03b1\u00df\u2014\u201c",
    *(f"##{c}" for c in "\u03c3\u03c2\u03b1\u00df"),
]

HARD = [
    "Hello, world! unaffable running",
    "  leading and   double  spaces ",
    "tabs\tand\nnew\r\nlines",
    "vertical\x0btab form\x0cfeed file\x1cseparator next\x85line",
    "line\u2028separator para\u2029graph nb\u00a0space ideographic\u3000space ogham\u1680space",
    "zero\u200bwidth soft\u00adhyphen bom\ufeffhere word\u2060joiner rtl\u200fmark",
    "nul\x00here replacement\ufffdhere only\x00",
    "Caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m \u0130stanbul STRA\u1e9eE stra\u00dfe na\u00efve",
    "\u03a3\u0391\u03a3 \u03b1\u03a3, \u03b1\u03a3! \u03b1\u03a3\u4e2d",
    "\u4e2d\u6587abc\u4e2d \u3042\u4e2d\ud55c\uae00 \uf900 \U00020000x \U0002f800",
    "\u0301 \u0301a a\u0301\u0302",
    "[MASK] [CLS][SEP] a[UNK]b [PAD ] ##ing x##y",
    "a" * 199 + " " + "a" * 200 + " " + "a" * 201,
    "x" * 300 + ".",
    "\u00e9" * 201,
    "don't e-mail me@x.org $5.00 50% a_b ^~`|",
    "\u201cquoted\u201d \u2014 dash \u2026 \u00bfque? \u00a1si! \u00ab\u00bb",
    "\U0001f600 emoji\U0001f600joined \U0001f468\u200d\U0001f469",
    "\u1fef \u212a \u2126 \ufb01 \u2167 \u00bd",
    "\ud7a3 \uac00\u11a8 \u0e33 \u0f73",
    "",
    " ",
    "\x00",
    "lone\ud800surrogate hello",
]


def is_punctuation(char):
    code = ord(char)
    ascii_symbol = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return ascii_symbol or unicodedata.category(char).startswith("P")


CJK_RANGES = "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF F900-FAFF 2F800-2FA1F"


def is_cjk(code):
    ends = (text.split("-") for text in CJK_RANGES.split())
    return any(int(first, 16) <= code <= int(last, 16) for first, last in ends)


def plain_words(text, lower_case):
    cleaned = ""
    for char in text:
        if char in " \t\n\r" or unicodedata.category(char) == "Zs":
            cleaned += " "
        elif ord(char) not in (0, 0xFFFD) and unicodedata.category(char) not in ("Cc", "Cf"):
            cleaned += char
    spaced = "".join(f" {char} " if is_cjk(ord(char)) else char for char in cleaned)
    words = []
    for word in spaced.split():
        if lower_case:
            word = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
        current = ""
        for char in word:
            if is_punctuation(char):
                words += [current, char]
                current = ""
            else:
                current += char
        words.append(current)
    return " ".join(words).split()


def plain_pieces(word, vocabulary):
    if len(word) > 200:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


@pytest.fixture(scope="module")
def vocabulary_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return path


@pytest.mark.ci
@pytest.mark.parametrize("lower_case", [True, False])
def test_unicode_code_points_match_the_reference_implementation(lower_case):
    basic = BasicTokenizer(lower_case)
    wrong = []
    # Test all code points of the Unicode planes 0 to 3 and the assigned part of plane 14. Of the others, a sample is
    # enough: planes 4 to 13 are unassigned, and planes 15 and 16 are for private use.
    for code in itertools.chain(range(0x40000), range(0x40000, 0x110000, 97), range(0xE0000, 0xE0200)):
        text = f"A{chr(code)}b"
        if basic.words(text) != plain_words(text, lower_case):
            wrong.append(hex(code))
        spans = [text[origins[0] : origins[-1] + 1] for _, origins in basic.words_with_origins(text)]
        if [word for span in spans for word in basic.words(span)] != basic.words(text):
            wrong.append(f"spans of {code:x}")
    assert wrong == []


@pytest.mark.parametrize("lower_case", [True, False])
def test_difficult_and_random_texts_match_the_reference_implementation(vocabulary_file, lower_case, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_CACHE_ENTRIES", 200)
    tokenizer = Tokenizer(load_vocabulary(vocabulary_file, lower_case))
    draw, vocabulary = random.Random(7), {*PIECES}
    ascii_range = (0x20, 0x7F)
    ranges = [*[ascii_range] * 2, (0, 0x250), (0x300, 0x400), (0x2000, 0x2070), (0x4E00, 0x4E40), (0, 0x110000)]
    texts = ["".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(40))) for _ in range(3000)]
    for text in [*HARD, *HARD, *texts]:  # The second pass uses the tokenizer's cache.
        expected = [piece for word in plain_words(text, lower_case) for piece in plain_pieces(word, vocabulary)]
        assert tokenizer.pieces(tokenizer.encode(text)) == expected, repr(text)


def test_encode_splits_special_tokens_but_model_inputs_keep_them(vocabulary_file):
    tokenizer = Tokenizer(load_vocabulary(vocabulary_file))
    assert tokenizer.pieces(tokenizer.encode("[MASK]")) == ["[", "mask", "]"]
    text = "the [MASK]the[SEP] [mask]"
    ids = tokenizer.encode_with_special(text)
    mask, sep = tokenizer.vocabulary.mask_id, tokenizer.vocabulary.sep_id
    assert (ids.count(mask), ids.count(sep)) == (1, 1)
    offset_ids, spans = tokenizer.encode_with_offsets(text)
    assert offset_ids == ids
    assert [text[slice(*spans[ids.index(index)])] for index in (mask, sep)] == ["[MASK]", "[SEP]"]


@pytest.mark.parametrize(
    "pieces, lower_case",
    [
        (["the", "good", "film", "NUM", "COVID", "<ENT>"], True),
        (["the", "good", "film"] * 4 + ["Berlin"], True),
        (["the", "good", "The", "A", "##a"], False),
        (["\u4e2d"] * 100 + ["A", "b"], False),
        (["\u4e2d"] * 100, True),
    ],
)
def test_few_tokens_with_capitals_do_not_make_a_vocabulary_cased(pieces, lower_case, tmp_path, log_lines):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *pieces]), encoding="utf-8")
    assert load_vocabulary(path).lower_case == lower_case
    has_capitals = any(piece != piece.lower() for piece in pieces)
    assert any("never occur" in line for line in log_lines) == (lower_case and has_capitals)
    assert load_vocabulary(path, lower_case=not lower_case).lower_case != lower_case


@pytest.mark.parametrize("encoding, line_end", [("utf-8-sig", "\n"), ("utf-8", "\r\n"), ("utf-8", "\r")])
def test_byte_order_mark_and_line_ends_are_not_part_of_a_piece(encoding, line_end, tmp_path):
    (tmp_path / "vocab.txt").write_text(line_end.join([*SPECIAL, "a"]), encoding=encoding, newline="")
    vocabulary = load_vocabulary(tmp_path / "vocab.txt")
    assert vocabulary.pieces == (*SPECIAL, "a")
    assert [line.strip() for line in vocabulary.content.split(b"\n")] == [piece.encode() for piece in vocabulary.pieces]


def test_tokenizer_json_file_is_a_vocabulary(tmp_path):
    import tokenizers

    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "the", "##ing"]))
    engine = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"))
    engine._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    engine.add_tokens(["<ent>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    vocabulary, wordpiece = load_vocabulary(tmp_path / "tokenizer.json"), load_vocabulary(tmp_path / "vocab.txt")
    tokenizer = Tokenizer(pickle.loads(pickle.dumps(vocabulary)))
    assert vocabulary.lower_case and vocabulary.special_ids == wordpiece.special_ids
    np.testing.assert_array_equal(vocabulary.is_continuation[:-1], wordpiece.is_continuation)
    assert tokenizer.encode("The<ent>") == [wordpiece.pieces.index("the"), wordpiece.size]
    assert tokenizer.encode("\ud800 [MASK]")[-1] == vocabulary.mask_id


def test_special_ids_come_from_the_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["a", *reversed(SPECIAL), "##b"]))
    vocabulary = load_vocabulary(tmp_path / "vocab.txt")
    assert vocabulary.special_ids == (5, 4, 3, 2, 1)
    assert Tokenizer(vocabulary).encode("ab z") == [0, 6, 4]
    np.testing.assert_array_equal(vocabulary.is_continuation, [False] * 6 + [True])
    # SentencePiece models may have other names of [PAD] and [UNK].
    pieces = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    ids = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert _special_ids(tmp_path / "spiece.model", "sentencepiece", pieces) == ids
    with pytest.raises(UsageError, match=r"lacks \[PAD\], \[UNK\]"):
        _special_ids(tmp_path / "vocab.txt", "wordpiece", pieces)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot read"),
        ("", None, "the vocab.txt or .model file in a folder"),
        ("bad.txt", b"[PAD]\n\xff\xfe\n", "not UTF-8"),
        ("vocab.txt", "\n".join(SPECIAL[:-1]).encode(), r"lacks \[MASK\]"),
        ("tokenizer.json", b"{}", "not a tokenizer.json"),
        ("bad.model", b"no model", "not a SentencePiece model"),
        ("empty.model", b"", "not a SentencePiece model"),
    ],
)
def test_invalid_vocabulary_file_is_rejected(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_vocabulary(tmp_path / name)


def test_decode_joins_the_pieces_of_a_word_and_rejects_unknown_ids(vocabulary_file):
    tokenizer = Tokenizer(load_vocabulary(vocabulary_file))
    assert tokenizer.decode(tokenizer.encode("Unaffable running, hello")) == "unaffable running , hello"
    for index in (-1, 10**6):
        with pytest.raises(UsageError, match=f"token id {index} is outside the vocabulary"):
            tokenizer.decode([index])
    with pytest.raises(UsageError, match="text must be a str"):
        tokenizer.encode(["a"])


def test_import_does_not_load_tensorflow_or_jax():
    code = "import sys, bertjax.data.corpus.chunks; print([m for m in ('tensorflow', 'jax') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# SentencePiece vocabularies lower-case in the model, lower-case before the model, or keep case.
KINDS = {"wordpiece": (False, True), "folds": (True, False), "lower": (False, True), "cased": (False, False)}


@pytest.fixture(scope="module")
def tokenizers(letters, tmp_path_factory):
    """Returns a tokenizer of each kind."""
    made = {}
    for kind, (folds, lower_case) in KINDS.items():
        path = tmp_path_factory.mktemp("pieces") / "sp.model"
        path.write_bytes(sentencepiece_model([text[:150] for text in HARD[:-1]] * 9, 300, folds))
        made[kind] = Tokenizer(load_vocabulary(letters if kind == "wordpiece" else path, lower_case))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_ordered_and_ids_match_encode(tokenizers, kind):
    for text in HARD:
        ids, spans = tokenizers[kind].encode_with_offsets(text)
        assert ids == tokenizers[kind].encode_with_special(text) and len(spans) == len(ids), text
        assert all(0 <= start <= end <= len(text) for start, end in spans), text
        # Successive spans overlap by at most one character, which both pieces share.
        assert all(end - 1 <= next_start for (_, end), (next_start, _) in itertools.pairwise(spans)), text


def test_spans_cover_the_text_of_each_piece(tokenizers):
    tokenizer = tokenizers["wordpiece"]
    # The span of a letter includes its accent, and the span of [UNK] covers the word.
    text = 'The "c", F\u00c9 e\u0301s; doing \u0434\u0430'
    ids, spans = tokenizer.encode_with_offsets(text)
    pieces = ["the", '"', "c", '"', ",", "f", "##e", "e", "##s", ";", "d", "##o", "##ing", "[UNK]"]
    assert tokenizer.pieces(ids) == pieces
    covered = ["The", '"', "c", '"', ",", "F", "\u00c9", "e\u0301", "s", ";", "d", "o", "ing", "\u0434\u0430"]
    assert [text[start:end] for start, end in spans] == covered


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
