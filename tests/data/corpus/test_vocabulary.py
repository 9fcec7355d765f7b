"""Tests that trained vocabularies are deterministic and work with the tokenizer."""

import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from bertjax.data.corpus.basic_tokenizer import BasicTokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, load_vocabulary
from bertjax.data.corpus.vocabulary_training import sentencepiece_model, wordpieces

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


@pytest.mark.parametrize("kind", ["wordpieces(counts(), 300)", "sentencepiece_model(random_sentences(), 200, True)"])
def test_vocabulary_does_not_depend_on_the_hash_seed(kind):
    code = f"import hashlib; from test_vocabulary import *; print(hashlib.sha256(repr({kind}).encode()).hexdigest())"
    hashes = set()
    for seed in "0", "1":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
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
