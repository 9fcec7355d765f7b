"""Trained vocabularies are deterministic; `--add_pieces` appends the pieces that save the most tokens."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.commanding import printed
from helpers.preparing import leftovers, make_text, prepare_text, write_text

from bertjax.data.corpus import prepare, store, vocabulary_training
from bertjax.data.corpus.readers import find_sources
from bertjax.data.corpus.tokenizer import BasicTokenizer, Tokenizer
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, WORDPIECE, load_vocabulary
from bertjax.data.corpus.vocabulary_extension import added_pieces, extend_vocabulary
from bertjax.data.corpus.vocabulary_training import byte_level_bpe, sentencepiece_model, wordpieces
from bertjax.errors import UsageError

SYLLABLES = ["ba", "ko", "mi", "ter", "lon", "shi", "gra", "pel", "un", "ing", "\u4e2d", "\u00e9l", "ness"]


def random_sentences():
    draw = random.Random(3)
    words = ["".join(draw.choice(SYLLABLES) for _ in range(draw.randrange(1, 5))) for _ in range(600)]
    return [" ".join(draw.choice(words) for _ in range(12)).capitalize() + "." for _ in range(800)]


def counts():
    tokenizer = BasicTokenizer(lower_case=True)
    return Counter(word for sentence in random_sentences() for word in tokenizer.words(sentence))


def test_trained_wordpiece_vocabulary_encodes_its_text_without_unknown_tokens(tmp_path):
    pieces = wordpieces(counts(), 300)
    assert tuple(pieces[:5]) == SPECIAL_PIECES
    assert len(pieces) == len(set(pieces)) == 300
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    vocabulary = load_vocabulary(path)
    assert vocabulary.lower_case
    tokenizer = Tokenizer(vocabulary)
    ids = [index for sentence in random_sentences() for index in tokenizer.encode(sentence)]
    assert vocabulary.unk_id not in ids
    assert len(ids) < 2.5 * sum(counts().values())  # words have 5.5 letters on average


def test_vocabularies_of_small_texts_and_of_many_rare_characters():
    assert 10 < len(wordpieces(Counter(["one", "two", "three"] * 2), 30522)) < 40
    many = Counter({chr(0x4E00 + i): 1 for i in range(5000)}) + Counter({"the": 100, "then": 50})
    pieces = wordpieces(many, 200)
    assert len(pieces) <= 200 and {"the", "then"} <= set(pieces)
    # 3,000 of the characters are frequent, and make up 99.95 % of the text.
    ideographs = [chr(0x4E00 + i) for i in range(5000)]
    frequent = Counter({char: 2000 if i < 3000 else 1 for i, char in enumerate(ideographs)})
    assert {*wordpieces(frequent, 30522)} == {*SPECIAL_PIECES, *ideographs[:3000]}


# Vowel signs of Hindi and tones of Vietnamese are marks that BERT's uncased tokenizer strips.
@pytest.mark.parametrize(
    ("sentence", "strips"),
    [
        ("Le caf\u00e9 de la rue est ouvert toute la nuit.", False),
        ("\u0926\u093f\u0932\u094d\u0932\u0940 \u092d\u093e\u0930\u0924 \u092e\u0947\u0902", True),
        ("H\u00e0 N\u1ed9i l\u00e0 th\u1ee7 \u0111\u00f4", True),
    ],
)
@pytest.mark.parametrize("lower_case", [True, False, None])
def test_new_vocabulary_is_cased_if_many_letters_would_lose_marks(sentence, strips, lower_case, tmp_path, log_lines):
    settings = {"lower_case": lower_case, "vocabulary_size": 40}
    manifest = prepare_text(tmp_path, [[sentence, sentence.lower()]] * 9, **settings)
    assert manifest["vocabulary"]["lower_case"] == (not strips if lower_case is None else lower_case)
    (warning,) = [line for line in log_lines if "accents or vowel signs" in line] or [""]
    expected = {True: "omit --uncased", None: "the new vocabulary is cased", False: ""}
    assert warning.endswith(expected[lower_case] if strips else "")
    assert bool(warning) == (strips and lower_case is not False)


def test_sample_of_many_files_has_the_start_of_each(tmp_path, monkeypatch):
    monkeypatch.setitem(vocabulary_training._SAMPLE_CHARS, WORDPIECE, 90)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"word{number} " + "more " * 100)
    with ThreadPoolExecutor(1) as pool:
        sources, _ = find_sources([f"prose:{tmp_path}/*.txt"])
        counts = vocabulary_training.sample_training_data(sources, WORDPIECE, True, pool)
    assert counts == {"word0": 1, "word1": 1, "word2": 1, "more": 12}


@pytest.mark.parametrize("kind", ["wordpieces(counts(), 300)", "sentencepiece_model(random_sentences(), 200, True)"])
def test_vocabulary_does_not_depend_on_the_hash_seed(kind):
    code = f"import hashlib; from test_vocabulary import *; print(hashlib.sha256(repr({kind}).encode()).hexdigest())"
    hashes = set()
    for seed in "0", "1":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        hashes.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert len(hashes) == 1


def test_trained_sentencepiece_vocabulary_encodes_and_decodes_a_sentence(tmp_path):
    path = tmp_path / "spiece.model"
    path.write_bytes(sentencepiece_model(random_sentences(), 200, True))
    vocabulary = load_vocabulary(path)
    assert vocabulary.pieces[:5] == SPECIAL_PIECES and vocabulary.special_ids == (0, 1, 2, 3, 4)
    tokenizer = Tokenizer(vocabulary)
    sentence = random_sentences()[0]
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence.lower()
    assert not {2, 3, 4} & set(tokenizer.encode("[MASK] [CLS] [SEP]"))
    inside = vocabulary.is_continuation[tokenizer.encode(sentence)]
    assert int((~inside).sum()) == len(sentence.split()) and not vocabulary.is_continuation[:5].any()


DOMAIN = ["insulin", "glucose", "kinase", "protease", "lipase", "λ"]


def rates(text, vocabulary):
    """Returns the pieces per word and the fraction of unknown words."""
    basic, tokenizer = BasicTokenizer(vocabulary.lower_case), Tokenizer(vocabulary)
    words = [word for sentences in text for sentence in sentences for word in basic.words(sentence)]
    ids = [tokenizer.encode(word) for word in words]
    return sum(map(len, ids)) / len(words), sum(vocabulary.unk_id in word for word in ids) / len(words)


def test_old_pieces_keep_their_ids_and_the_manifest_has_piece_statistics(tmp_path, vocabulary, capfd):
    text = make_text(60)
    text = [[f"{s} {DOMAIN[(d + i) % 6]} ." for i, s in enumerate(sentences)] for d, sentences in enumerate(text)]
    write_text(tmp_path / "a.txt", text)
    flags = ["--input", f"text:{tmp_path}/a.txt", f"--vocab={vocabulary}", "--add_pieces=8", "--workers=1"]
    summary = printed(capfd, "prepare", *flags, f"--output={tmp_path}/corpus")
    manifest = store.read_manifest(tmp_path / "corpus")
    file = tmp_path / "corpus" / "vocab.txt"
    assert file.read_bytes().startswith(vocabulary.read_bytes())
    old, new = load_vocabulary(vocabulary), load_vocabulary(file)
    assert new.size == old.size + 8 == manifest["vocabulary"]["size"]
    assert {*DOMAIN} - {*new.pieces[old.size :]} == set()
    entry = manifest["added_pieces"]
    for name, measured in ("before", old), ("after", new):
        expected = entry[f"pieces_per_word_{name}"], entry[f"unknown_words_{name}"]
        assert rates(text, measured) == pytest.approx(expected, abs=1e-4)
    assert entry["unknown_words_before"] > 0 == entry["unknown_words_after"]
    assert entry["pieces_per_word_after"] < 0.8 * entry["pieces_per_word_before"]
    assert "8 pieces were added to --vocab: 1." in summary


def test_pieces_that_save_the_most_tokens_are_first(vocabulary):
    old = load_vocabulary(vocabulary)
    assert added_pieces(old, 2, Counter(glucose=10, insulin=20, river=1000)) == ["insulin", "glucose"]
    # A long word can save more tokens than a frequent short one.
    assert added_pieces(old, 1, Counter(ab=10, phosphorylation=3)) == ["phosphorylation"]
    stems = [f"{a}{b}" for a in "bcdf" for b in "ghjk"]
    words = Counter({f"{stem}otomy": 2 for stem in stems} | {"phosphorylation": 3})
    assert added_pieces(old, 2, words) == ["##otomy", "phosphorylation"]
    # Once "##otomy" is added, "##gotomy" saves fewer tokens than "abc".
    assert added_pieces(old, 3, words | {"abc": 5})[2] == "abc"
    # A word of the vocabulary (river) and words that occur once (qx, λ) need no new piece.
    assert added_pieces(old, 5, Counter({"river": 9, "qx": 1, "λ": 1})) == []


def test_unknown_characters_get_pieces(vocabulary):
    counts = Counter({"λ": 4, "river": 30} | {f"{letter}λ": 2 for letter in "abcdefgh"})
    base = load_vocabulary(vocabulary)
    new, entry = extend_vocabulary(base, counts, 9)
    assert {"λ", "##λ"} <= {*new.pieces} and entry["unknown_words_before"] == 0.4
    assert entry["unknown_words_after"] == 0
    # A piece for λ or μ counts as one token fewer, although words are [UNK] until both characters have pieces.
    words = Counter({f"{first}λ{second}μ": 2 for first in "abcd" for second in "efgh"})
    assert added_pieces(load_vocabulary(vocabulary), 2, words) == ["##λ", "##μ"]


def moved_special_tokens(content: bytes) -> bytes:
    """Returns a `tokenizer.json` whose special tokens follow the pieces and are not in the model, as in ModernBERT."""
    data = json.loads(content)
    pieces = [piece for piece in data["model"]["vocab"] if piece not in SPECIAL_PIECES]
    data["model"]["vocab"] = {piece: index for index, piece in enumerate(pieces)}
    ids = {piece: len(pieces) + index for index, piece in enumerate(SPECIAL_PIECES)}
    for token in data["added_tokens"]:
        token["id"] = ids[token["content"]]
    for piece, entry in data["post_processor"]["special_tokens"].items():
        entry["ids"] = [ids[piece]]
    return json.dumps(data).encode()


@pytest.mark.parametrize("layout", [bytes, moved_special_tokens], ids=["trained", "special tokens last"])
def test_added_merges_continue_the_training_of_byte_level_bpe(layout):
    text = random_sentences()
    base = load_vocabulary("tokenizer.json", content=layout(byte_level_bpe(text, 300, False)))
    new, entry = extend_vocabulary(base, text, 100)
    assert new.pieces[:300] == base.pieces and new.size == 400 and new.special_ids == base.special_ids
    # The order of pairs with the same frequency may differ.
    trained = load_vocabulary("tokenizer.json", content=byte_level_bpe(text, 400, False))
    assert len({*new.pieces} - {*trained.pieces}) <= 5
    counts = [sum(map(len, Tokenizer(each).encode_all(text))) for each in (base, new, trained)]
    assert counts[1] == pytest.approx(counts[2], rel=0.002) and counts[1] < 0.8 * counts[0]
    words = sum(len(sentence.split()) + 1 for sentence in text)  # The period is a word.
    rates = [entry["pieces_per_word_before"], entry["pieces_per_word_after"]]
    assert counts[:2] == pytest.approx([words * rate for rate in rates], rel=1e-3)
    assert Tokenizer(new).encode_with_special("[MASK]") == [base.mask_id]
    assert extend_vocabulary(base, ["a"], 100)[0].sha256 == base.sha256


def test_text_with_few_useful_pieces_yields_fewer_than_requested(tmp_path, vocabulary):
    text = [["river stone", "green glucose"], ["glucose lamp"]] * 5
    manifest = prepare_text(tmp_path, text, vocabulary=vocabulary, add_pieces=50)
    assert manifest["added_pieces"]["count"] == 1
    assert "the text yields 1 useful pieces instead of 50" in prepare.summary("corpus", manifest)


def test_casing_and_unused_lines_of_the_vocabulary_are_kept(tmp_path, vocabulary):
    content = b"[unused0]\n" + vocabulary.read_bytes() + "\n".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ").encode()
    (tmp_path / "cased.txt").write_bytes(content)
    text = [["river Glucose", "Glucose lamp"]] * 5
    manifest = prepare_text(tmp_path, text, vocabulary=tmp_path / "cased.txt", add_pieces=1)
    assert (tmp_path / "corpus" / "vocab.txt").read_bytes() == content + b"\nGlucose\n"
    assert manifest["vocabulary"]["lower_case"] is False and manifest["splits"]["train"]["tokens"] == 20


def test_invalid_add_pieces_is_rejected(tmp_path, vocabulary):
    model = tmp_path / "spiece.model"
    model.write_bytes(sentencepiece_model(random_sentences(), 60, True))
    with pytest.raises(UsageError, match="--add_pieces extends a vocab.txt, or a tokenizer.json with byte-level BPE"):
        prepare_text(tmp_path, make_text(1), vocabulary=model, add_pieces=5)
    with pytest.raises(UsageError, match="the vocabulary size is 1,000,0.. pieces"):
        prepare_text(tmp_path, make_text(1), vocabulary=vocabulary, add_pieces=10**6)
    assert leftovers(tmp_path) == []
