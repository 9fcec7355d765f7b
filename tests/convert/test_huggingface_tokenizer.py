"""Tokenizers of Hugging Face folders: the token ids of AutoTokenizer, from any of the files that define them."""

import json
import shutil
import string

import pytest
from helpers.checkpoints import edit_json
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bertjax.convert.convert import BERTJAX, convert, read_checkpoint, read_vocabulary
from bertjax.convert.huggingface_tokenizer import read_tokenizer, write_tokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, TOKENIZER_JSON, WORDPIECE, load_vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig

TEXTS = [
    "the <ent>x [e1] [E1]ing y <tag>s <tag>",
    "[E1] Caf\u00e9 12 a@b \u4e2d\u6587 [MASK]",
    f"a{'b' * 150} {'c' * 99}",
]
SPECIAL_TOKENS = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
TEMPLATE_IDS = [("[CLS]", 2), ("[SEP]", 3)]


def encode(folder, texts=TEXTS):
    tokenizer = Tokenizer(read_tokenizer(folder)[0])
    return [tokenizer.encode_with_special(text) for text in texts]


@pytest.fixture
def plain(letters, tmp_path):
    """Returns a folder with only a `vocab.txt` and a config."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "vocab.txt").write_bytes(letters.read_bytes())
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.fixture
def save_json(plain, letters):
    """Returns a function that saves a changed standard tokenizer as `tokenizer.json` of the folder `plain`."""

    def save(change=lambda tokenizer: None, **config):
        write_tokenizer(load_vocabulary(letters, max_word_chars=100), ModelConfig(), plain)
        tokenizer = HuggingFaceTokenizer.from_file(str(plain / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(plain / "tokenizer.json"))
        (plain / "vocab.txt").unlink()
        (plain / "special_tokens_map.json").unlink()
        (plain / "tokenizer_config.json").write_text(json.dumps(config or GENERIC))
        return tokenizer

    return save


def test_tokenizer_json_alone_is_enough(folder):
    vocabulary = read_checkpoint(folder).vocabulary
    for file in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink()
    checkpoint = read_checkpoint(folder)
    # Without a config, the class is BertTokenizer, which ignores the limit of `tokenizer.json`.
    assert (checkpoint.vocabulary.content, checkpoint.vocabulary.kind) == (vocabulary.content, WORDPIECE)
    assert (vocabulary.max_word_chars, checkpoint.vocabulary.max_word_chars) == (200, 100)
    assert [note for note in checkpoint.notes if "ignored max_input_chars_per_word of tokenizer.json" in note]


def added_tokens(ids):
    """Returns the fields of each file that define `<ent>` and the special token `[E1]`, by the place of the tokens."""
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    properties = {"<ent>": {"normalized": True, "special": False}, "[E1]": {"normalized": False, "special": True}}
    decoder = {str(index): {"content": token, **properties[token], **flags} for token, index in ids.items()}
    special = {"special_tokens_map.json": {"additional_special_tokens": ["[E1]"]}}
    return {
        "tokenizer.json": {},
        "added_tokens.json": {"added_tokens.json": ids, **special},
        "decoder": {"tokenizer_config.json": {"added_tokens_decoder": decoder}},
        "config": {"tokenizer_config.json": {"entity_token": "<ent>", "extra_special_tokens": ["[E1]"]}},
        # transformers 4 writes an empty dict, which must not replace the tokens of `special_tokens_map.json`.
        "map": {"tokenizer_config.json": {"entity_token": "<ent>", "extra_special_tokens": {}}, **special},
    }


@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens.json", "decoder", "config", "map"])
def test_added_token_has_one_id_whichever_file_defines_it(place, plain, save_json, letters, tmp_path):
    size = load_vocabulary(letters).size
    if place == "tokenizer.json":
        save_json(lambda tokenizer: tokenizer.add_tokens([AddedToken("<ent>"), AddedToken("[E1]", special=True)]))
    for name, fields in added_tokens({"<ent>": size, "[E1]": size + 1})[place].items():
        edit_json(plain / name, **fields)
    vocabulary = read_tokenizer(plain)[0]
    tokenizer = Tokenizer(vocabulary)
    assert vocabulary.kind == TOKENIZER_JSON and vocabulary.size == size + 2
    for text in ("<ent>", "a<ent>b", "[E1]", "the [E1]."):
        ids = tokenizer.encode(text)
        assert (size in ids, size + 1 in ids) == ("<ent>" in text, "[E1]" in text)
        assert len(ids) == len(tokenizer.encode(text.replace("<ent>", " ").replace("[E1]", " "))) + 1
    assert not vocabulary.is_continuation[[size, size + 1]].any()
    assert tokenizer.decode(tokenizer.encode("<ent> ace")) == "<ent> ace"
    # Export preserves the ids.
    (tmp_path / "out").mkdir()
    assert write_tokenizer(vocabulary, ModelConfig(), tmp_path / "out") == []
    assert encode(tmp_path / "out") == encode(plain)


def test_properties_of_added_tokens_are_applied(save_json, plain):
    tokens = [
        AddedToken("<tag>", single_word=True),
        AddedToken("<ent>", lstrip=True, rstrip=True),
        AddedToken("[E1]", normalized=True),
    ]
    tokenizer = save_json(lambda tokenizer: tokenizer.add_tokens(tokens))
    tag, ent, e1 = (tokenizer.token_to_id(token.content) for token in tokens)
    words, spaces, cases = encode(plain, ["<tag>s <tag>", "a <ent> b", "[e1] [E1]"])
    assert words.count(tag) == 1 and words[-1] == tag
    assert len(spaces) == 3 and spaces[1] == ent
    assert cases == [e1, e1]
    _, spans = Tokenizer(read_tokenizer(plain)[0]).encode_with_offsets("a <ent> b")
    assert spans[1].tolist() == [2, 7]  # The span excludes the spaces that the token strips.


@pytest.mark.parametrize("name, is_special", [("extra_special_tokens", True), ("additional_special_tokens", False)])
def test_text_is_normalized_before_added_tokens_are_found_unless_they_are_special(name, is_special, plain, letters):
    size = load_vocabulary(letters).size
    (plain / "added_tokens.json").write_text(json.dumps({"[E1]": size}))
    edit_json(plain / "special_tokens_map.json", **{name: ["[E1]"]})
    ids = encode(plain, ["[E1]", "[e1]"])
    assert ids[0] == [size] and (ids[1] == [size]) != is_special


def test_dropout_of_a_byte_pair_tokenizer_is_ignored(letters, plain, save_json):
    vocab = {piece: index for index, piece in enumerate((*SPECIAL_PIECES, "a", "b", "ab"))}

    def change(tokenizer):
        tokenizer.model = models.BPE(vocab, [("a", "b")], dropout=0.5, unk_token="[UNK]")

    save_json(change)
    assert "ignored dropout=0.5 of tokenizer.json" in read_tokenizer(plain)[2][0]
    tokenizer = Tokenizer(load_vocabulary(plain / "tokenizer.json"))
    for ids in (*encode(plain, ["ab"] * 30), *(tokenizer.encode("ab") for _ in range(30))):
        assert ids == [vocab["ab"]]


def test_words_are_split_at_punctuation_but_added_and_special_tokens_are_not(plain, save_json):
    text = "Jo-x <ent>, [MASK]y New York [UNK] 中 ∃, e-mail"
    words = ["Jo", "-", "x", "<ent>", ",", "[MASK]", "y", "New York", "[UNK]", "中", "∃", ",", "e-mail"]
    split = ["Jo", "-", "x", "<", "ent", ">", *words[4:7], "New", "York", *words[8:-1], "e", "-", "mail"]

    def add(tokenizer):
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_tokens([AddedToken(name, lstrip=True, rstrip=True) for name in ("<ent>", "e-mail", "new york")])

    for change, expected in ((lambda tokenizer: None, split), (add, words)):
        save_json(change)
        tokenizer = Tokenizer(read_tokenizer(plain)[0])
        assert [text[start:end] for start, end in tokenizer.word_spans(text)] == expected


TOKENIZERS = {
    "digits": lambda t: setattr(
        t, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(True)])
    ),
    "accents": lambda t: setattr(t, "normalizer", normalizers.BertNormalizer(strip_accents=False)),
    "chinese": lambda t: setattr(t, "normalizer", normalizers.BertNormalizer(handle_chinese_chars=False)),
    "limit": lambda t: setattr(t.model, "max_input_chars_per_word", 20),
    "truncation": lambda t: t.enable_truncation(4),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_json_of_a_generic_class_is_used_as_it_is(name, save_json, plain):
    tokenizer = save_json(TOKENIZERS[name])
    tokenizer.no_truncation()
    assert encode(plain) == [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def test_options_of_bert_tokenizer_replace_those_of_tokenizer_json(save_json, plain):
    def change(tokenizer):
        TOKENIZERS["digits"](tokenizer)
        tokenizer.model.continuing_subword_prefix = "@@"
        tokenizer.model.unk_token = "a"
        tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))

    save_json(change, tokenizer_class="BertTokenizerFast", do_lower_case=True)
    vocabulary, _, (note,) = read_tokenizer(plain)
    assert vocabulary.kind == WORDPIECE
    assert note.startswith("ignored pre_tokenizer, unk_token, continuing_subword_prefix, post_processor of")
    save_json(tokenizer_class="BertTokenizerFast", do_lower_case=True)
    assert read_tokenizer(plain)[2] == []
    edit_json(plain / "tokenizer_config.json", model_input_names=["input_ids"])
    assert read_tokenizer(plain)[2][0].startswith("both texts of a pair have segment 0, as in transformers")
    edit_json(plain / "tokenizer_config.json", strip_accents=False)
    accents = Tokenizer(read_tokenizer(plain)[0])
    assert accents.pieces(accents.encode("E\u00e9 e")) == ["[UNK]", "e"]


def test_special_tokens_may_have_other_names(plain):
    text = (plain / "vocab.txt").read_text().replace("[CLS]", "<s>").replace("[SEP]", "</s>")
    (plain / "vocab.txt").write_text(text)
    with pytest.raises(UsageError, match=r"lacks \[(CLS|SEP)\], the (cls|sep)_token of its tokenizer"):
        read_tokenizer(plain)
    edit_json(plain / "tokenizer_config.json", cls_token="<s>", sep_token="</s>")
    vocabulary = read_tokenizer(plain)[0]
    assert [vocabulary.pieces[index] for index in vocabulary.special_ids][2:4] == ["<s>", "</s>"]
    assert encode(plain, ["a</s>b"])[0][1] == vocabulary.sep_id
    (plain / "vocab.txt").write_text(text.replace("[UNK]", "<unk>"))
    edit_json(plain / "special_tokens_map.json", unk_token="<unk>")
    assert encode(plain, ["\u2203"]) == [[vocabulary.unk_id]]


def test_one_special_token_may_have_two_roles(save_json, plain):
    save_json(tokenizer_class="BertTokenizer", cls_token="[SEP]")
    vocabulary = read_tokenizer(plain)[0]
    assert [vocabulary.pieces[index] for index in vocabulary.special_ids][2:4] == ["[SEP]", "[SEP]"]


@pytest.mark.parametrize(
    ("single", "pair", "separators", "pair_segments"),
    [
        ("[CLS] $A", "[CLS] $A [SEP] [SEP] $B:1", (2, 0), True),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", (1, 1), False),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP]:1 $B:1 [SEP]:1", (0, 1), True),
    ],
)
def test_templates_of_a_generic_class_are_used(single, pair, separators, pair_segments, save_json, plain):
    template = processors.TemplateProcessing(single, pair, TEMPLATE_IDS)
    config = GENERIC | {"model_input_names": ["token_type_ids"]}
    save_json(lambda tokenizer: setattr(tokenizer, "post_processor", template), **config)
    vocabulary, *others = read_tokenizer(plain)
    assert (vocabulary.pair_separators, vocabulary.end_separators) == separators
    assert others[0] == pair_segments and bool(others[1]) == (separators[0] == 0)


TRUNCATION = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
SEGMENT_1 = processors.TemplateProcessing(
    "[CLS] $A:1 [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", TEMPLATE_IDS
).__getstate__()


def edit(name, **fields):
    return lambda folder: edit_json(folder / name, **fields)


def remove_json(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, None, "has tokenizer_class 'BertJapaneseTokenizer', which"),
        ({"tokenizer_class": None}, edit("config.json", tokenizer_class="BertJapaneseTokenizer"), "BertJapanese"),
        ({"tokenizer_class": "XLNetTokenizer"}, remove_json, "which bertjax does not support"),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, None, "needs custom code"),
        ({"auto_map": ["a.B", None]}, None, "needs custom code"),
        ({"split_special_tokens": True}, None, "has split_special_tokens=true"),
        ({"truncation_side": "left"}, None, "truncates texts at the left"),
        ({}, edit("tokenizer.json", truncation=TRUNCATION), "truncates texts at the Left"),
        ({"mask_token": "<mask>"}, None, "lacks <mask>, the mask_token"),
        ({}, edit("tokenizer.json", post_processor=None), "encodes the text 'a' as a in the segments"),
        (
            {"model_input_names": ["token_type_ids"]},
            edit("tokenizer.json", post_processor=json.loads(SEGMENT_1)),
            r"'a' as .CLS. a .SEP. in the segments \[0, 1, 0\], not",
        ),
        ({}, edit("added_tokens.json", **{"<ent>": 1000}), "the added token '<ent>' has id 1000, but it is token"),
        ({}, remove_json, "but lacks tokenizer.json, which"),
        (
            {"tokenizer_class": "BertTokenizer"},
            edit("tokenizer.json", model={}),
            "cannot build the tokenizer",
        ),
        ({"tokenizer_class": "BertTokenizer", "unk_token": None}, None, "a special token is None, not a string"),
    ],
)
def test_unsupported_tokenizer_is_rejected(config, change, message, save_json, plain):
    save_json(**GENERIC | config)
    if change:
        change(plain)
    with pytest.raises(UsageError, match=message):
        read_tokenizer(plain)


@pytest.mark.parametrize("name", ["KoBertTokenizer", "XLMRobertaTokenizer"])
def test_tokenizer_json_of_an_unknown_class_or_another_type_of_model_is_used_as_it_is(name, save_json, plain):
    save_json(TOKENIZERS["digits"], tokenizer_class=name)
    vocabulary, _, notes = read_tokenizer(plain)
    assert vocabulary.kind == TOKENIZER_JSON
    assert notes[0] == f"used tokenizer.json as it is, without the code of tokenizer_class {name!r}"


def test_capitals_of_a_bare_vocab_txt_decide_the_case(plain):
    vocabulary, _, notes = read_tokenizer(plain)
    assert vocabulary.lower_case and "do_lower_case is not set in tokenizer_config.json; assuming true" in notes[0]
    assert not read_tokenizer(plain, lower_case=False)[0].lower_case
    with open(plain / "vocab.txt", "a") as file:
        file.write("\n".join(string.ascii_uppercase))
    vocabulary, _, notes = read_tokenizer(plain)
    assert not vocabulary.lower_case and "assuming false, since tokens have capitals" in notes[0]
    # As in transformers, text is lower-cased if the config lacks `do_lower_case`.
    edit_json(plain / "tokenizer_config.json", model_max_length=512)
    vocabulary, _, notes = read_tokenizer(plain)
    assert vocabulary.lower_case and "tokens with capitals never occur: A, B, " in notes[1]


def test_case_option_does_not_change_a_generic_tokenizer_json(save_json, plain):
    save_json(TOKENIZERS["digits"])
    assert read_tokenizer(plain, lower_case=True)[0].lower_case
    with pytest.raises(UsageError, match="--cased has no effect on .*tokenizer.json"):
        read_tokenizer(plain, lower_case=False)


def test_tokenizer_json_survives_in_a_workdir(folder, tmp_path, save_json, plain):
    save_json(TOKENIZERS["digits"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, folder)
    convert(str(folder), str(tmp_path / "own"), BERTJAX, False)
    vocabulary = read_vocabulary(tmp_path / "own")
    tokenizer = Tokenizer(vocabulary)
    assert vocabulary.kind == TOKENIZER_JSON
    assert [tokenizer.encode(text) for text in TEXTS] == encode(plain)
    assert tokenizer.decode(tokenizer.encode("thing 12")) == "thing 1 2"


@pytest.mark.parametrize("tokenizer_class", ["BertTokenizerFast", "PreTrainedTokenizerFast", None, ""])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_equal_those_of_auto_tokenizer(name, tokenizer_class, save_json, plain, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[parity]'")

    def change(tokenizer):
        TOKENIZERS[name](tokenizer)
        tokenizer.add_tokens([AddedToken("<tag>", single_word=True), AddedToken("[E1]", lstrip=True, special=True)])

    save_json(change, **SPECIAL_TOKENS, tokenizer_class=tokenizer_class)
    expected = transformers.AutoTokenizer.from_pretrained(plain)
    vocabulary = read_tokenizer(plain)[0]
    assert encode(plain) == [expected.encode(text, add_special_tokens=False) for text in TEXTS]
    (tmp_path / "out").mkdir()
    write_tokenizer(vocabulary, ModelConfig(), tmp_path / "out")
    edit_json(tmp_path / "out" / "config.json", model_type="bert")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        first, second = expected.encode(text), expected.encode("a b")[1:]
        assert exported(text, "a b")["input_ids"] == first + second
        assert exported(text, "a b")["token_type_ids"] == [0] * len(first) + [1] * len(second)
