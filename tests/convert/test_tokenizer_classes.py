"""Which `tokenizer.json` fits a tokenizer class, and which of its parts the class ignores."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bertjax.convert.tokenizer_classes import fits, unused_parts
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, load_vocabulary

BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
BYTES = {"type": "ByteLevel"}


@pytest.mark.parametrize(
    ("name", "content", "is_used"),
    [
        ("RobertaTokenizer", {"model": BPE, "normalizer": None, "pre_tokenizer": BYTES}, []),
        (
            "RobertaTokenizer",
            {"model": BPE, "normalizer": {"type": "Lowercase"}, "pre_tokenizer": BYTES},
            ["normalizer"],
        ),
        ("RobertaTokenizer", {"model": BPE, "pre_tokenizer": {"type": "Whitespace"}}, None),
        ("CamembertTokenizer", {"model": {"type": "Unigram"}, "normalizer": {"type": "NFKC"}}, ["normalizer"]),
        ("BertTokenizer", {"model": {"type": "Unigram"}}, None),
    ],
)
def test_parts_that_a_class_ignores_are_named_and_models_of_another_type_do_not_fit(name, content, is_used):
    assert fits(name, content) == (is_used is not None)
    if is_used is not None:
        assert unused_parts(content["model"]["type"], content) == is_used


def test_file_without_the_type_of_its_model_is_completed(tmp_path):
    pieces = {piece: index for index, piece in enumerate([*SPECIAL_PIECES, "a", "##b"])}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*SPECIAL_PIECES])
    content = json.loads(tokenizer.to_str())
    del content["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_vocabulary(tmp_path / "tokenizer.json").word_marker == ("##", False)
