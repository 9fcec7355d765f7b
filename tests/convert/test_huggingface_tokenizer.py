"""Tokenizers of Hugging Face folders: their files, and options that bertjax does not support."""

import json

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bertjax.convert.convert import read_checkpoint
from bertjax.convert.huggingface_tokenizer import read_tokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.errors import UsageError


def edit_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_tokenizer_json_alone_is_enough(folder):
    vocabulary = read_checkpoint(folder).vocabulary
    for file in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink()
    checkpoint = read_checkpoint(folder)
    assert checkpoint.vocabulary == vocabulary and checkpoint.notes == ()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not read_checkpoint(folder).vocabulary.lower_case
    edit_json(folder / "tokenizer.json", model=tokenizer["model"] | {"type": "BPE"})
    with pytest.raises(UsageError, match="a tokenizer of type 'BPE'; BERT needs WordPiece"):
        read_checkpoint(folder)
    tokenizer["model"]["vocab"]["a"] = 10_000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="does not define a token for each id"):
        read_checkpoint(folder)


def test_exported_tokenizer_json_encodes_text_as_bertjax_does(folder):
    text = f"caf\u00e9 {'a' * 150} {'b' * 201} THE!"
    tokenizer = HuggingFaceTokenizer.from_file(str(folder / "tokenizer.json"))
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert Tokenizer(read_checkpoint(folder).vocabulary).encode(text) == expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"strip_accents": False}, "strip_accents=False with do_lower_case=True"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=False"),
        ({"do_lower_case": "false"}, "do_lower_case='false'; it must be true or false"),
    ],
)
def test_unsupported_options_are_refused(fields, message, folder):
    edit_json(folder / "tokenizer_config.json", **fields)
    with pytest.raises(UsageError, match=message):
        read_checkpoint(folder)


def test_missing_do_lower_case_defaults_to_true_with_a_note(folder):
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (folder / file).unlink()
    vocabulary, notes = read_tokenizer(folder)
    assert vocabulary.lower_case and "do_lower_case is not set in tokenizer_config.json; assuming true" in notes[0]
