"""Tokenizers of Hugging Face's folders: what is read from where, and what bertjax's own does not do."""

import json

import pytest
from checkpoints import portable
from tokenizers import Tokenizer as TheirTokenizer

from bertjax.convert import huggingface
from bertjax.convert.convert import read
from bertjax.convert.foreign_tokenizer import read_tokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.errors import UsageError


@pytest.fixture
def folder(letters, tmp_path):
    huggingface.write(portable(letters), tmp_path)
    return tmp_path


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_tokenizer_json_alone_tells_pieces_and_case(folder):
    before = read(folder).vocabulary
    for file in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink()
    found = read(folder)
    assert found.vocabulary == before and found.notes == ()
    fast = json.loads((folder / "tokenizer.json").read_text())
    fast["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    assert not read(folder).vocabulary.lower_case
    change(folder / "tokenizer.json", model=fast["model"] | {"type": "BPE"})
    with pytest.raises(UsageError, match="a model of type 'BPE', BERT's is WordPiece"):
        read(folder)
    fast["model"]["vocab"]["a"] = 10_000
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    with pytest.raises(UsageError, match="no tokenizer with a piece for each id"):
        read(folder)


def test_words_have_the_same_ids_up_to_the_longest_that_are_cut(folder):
    text = f"caf\u00e9 {'a' * 150} {'b' * 201} THE!"
    theirs = TheirTokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert Tokenizer(read(folder).vocabulary).encode(text) == theirs


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"strip_accents": False}, "strip_accents=False with do_lower_case=True"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=False"),
        ({"do_lower_case": "false"}, "do_lower_case='false'; it is true or false"),
    ],
)
def test_what_our_tokenizer_does_not_do_is_refused(fields, says, folder):
    change(folder / "tokenizer_config.json", **fields)
    with pytest.raises(UsageError, match=says):
        read(folder)


def test_a_case_that_nothing_tells_is_told(folder):
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (folder / file).unlink()
    vocabulary, notes = read_tokenizer(folder)
    assert vocabulary.lower_case and "taken as lower-cased" in notes[0]
