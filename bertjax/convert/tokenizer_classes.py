"""Functions that build tokenizers from a vocabulary and options, as the tokenizer classes of transformers do."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bertjax.data.corpus.vocabulary import (
    CONTINUATION,
    SPECIAL_PIECES,
    WORD_START,
    capital_pieces,
    is_cased,
    load_tokenizer_json,
    vocab_txt_lines,
)
from bertjax.errors import listed

VOCABULARY, CONFIG, TOKENIZER = "vocab.txt", "tokenizer_config.json", "tokenizer.json"
# RoBERTa's tokenizer files in folders without `tokenizer.json`, which old versions of transformers saved.
BPE_VOCABULARY, BPE_MERGES = "vocab.json", "merges.txt"
# Type of the model in `tokenizer.json`, keyed by tokenizer class. From the vocabulary and a few options, transformers
# builds BERT's standard tokenizer (WordPiece), a byte-level tokenizer (BPE) or a unigram tokenizer. It ignores the rest
# of `tokenizer.json`. For generic classes, it uses `tokenizer.json` as it is.
BERT, BYTE_LEVEL, UNIGRAM, GENERIC = "WordPiece", "BPE", "Unigram", ""
MODEL_TYPES = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), BERT),
    **dict.fromkeys(("DPRContextEncoderTokenizer", "DPRQuestionEncoderTokenizer"), BERT),
    **dict.fromkeys(("LayoutLMTokenizer", "LxmertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"), BERT),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LongformerTokenizer"), BYTE_LEVEL),
    **dict.fromkeys(("XLMRobertaTokenizer", "CamembertTokenizer"), UNIGRAM),
    **dict.fromkeys(("PreTrainedTokenizer", "TokenizersBackend", ""), GENERIC),
}
# Types of the parts of `tokenizer.json` that these tokenizers also have, or that hardly change the tokens.
_USED_PARTS = {
    BYTE_LEVEL: {"normalizer": set[str](), "pre_tokenizer": {"ByteLevel"}},
    UNIGRAM: {"normalizer": {"Precompiled", "Replace", "Strip"}, "pre_tokenizer": {"WhitespaceSplit", "Metaspace"}},
}
# Classes of transformers that run Python code, even if the folder has a `tokenizer.json`.
PYTHON_CLASSES = (
    *("BertJapaneseTokenizer", "BertTokenizerLegacy", "BertweetTokenizer", "EsmTokenizer", "PhobertTokenizer"),
    *("RoCBertTokenizer", "RoFormerTokenizer", "TapasTokenizer"),
)
# Maximum word length, in characters, of transformers' BERT tokenizers. Longer words become [UNK].
MAX_WORD_CHARS = 100
# Default special tokens, keyed by name in `tokenizer_config.json`.
_BERT_DEFAULTS = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
_ROBERTA_DEFAULTS = {
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"},
    **{"cls_token": "<s>", "mask_token": "<mask>"},
}
DEFAULTS = {BERT: _BERT_DEFAULTS, BYTE_LEVEL: _ROBERTA_DEFAULTS, UNIGRAM: _ROBERTA_DEFAULTS, GENERIC: {}}


def fits(tokenizer_class: str, tokenizer: dict[str, Any]) -> bool:
    """Returns whether a class in `MODEL_TYPES` has the type of model that `tokenizer.json` contains."""
    model_type, file_type = MODEL_TYPES.get(tokenizer_class), (tokenizer.get("model") or {}).get("type")
    if model_type == BYTE_LEVEL == file_type:
        return "ByteLevel" in _part_types(tokenizer, "pre_tokenizer")
    return model_type == GENERIC or (model_type is not None and file_type in (None, model_type))


def unused_parts(model_type: str, tokenizer: dict[str, Any]) -> list[str]:
    """Returns which of normalizer and pre-tokenizer of `tokenizer.json` contain parts that `build_tokenizer` omits."""
    return [name for name, types in _USED_PARTS[model_type].items() if _part_types(tokenizer, name) - types]


def _part_types(tokenizer: dict[str, Any], name: str) -> set[str]:
    parts = json.dumps(tokenizer.get(name))
    return {*re.findall(r'"type": "(\w+)"', parts)} - {"Sequence"}


def build_tokenizer(
    tokenizer_class: str, folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], lower_case: bool | None
) -> tuple[Tokenizer, list[str]]:
    """Builds the tokenizer of a class in `MODEL_TYPES`, without added tokens. Also returns notes for the user."""
    model_type = MODEL_TYPES[tokenizer_class]
    if model_type == BERT:
        return _bert_tokenizer(folder, config, tokenizer, lower_case)
    if model_type == BYTE_LEVEL:
        return _byte_level_tokenizer(folder, config, tokenizer), []
    if model_type == UNIGRAM:
        # In transformers, XLM-R's unknown token is 3, even if `unk_token` has a different id.
        return _unigram_tokenizer(config, tokenizer, 3 if tokenizer_class == "XLMRobertaTokenizer" else None), []
    dropout = tokenizer["model"].get("dropout")
    note = f"ignored dropout={dropout} of {TOKENIZER}, so that a text always has the same tokens"
    return load_tokenizer_json(folder / TOKENIZER, (folder / TOKENIZER).read_bytes()), [note] if dropout else []


def _bert_tokenizer(
    folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], lower_case: bool | None
) -> tuple[Tokenizer, list[str]]:
    model = tokenizer.get("model") or {}
    file = folder / VOCABULARY
    # Strip only trailing spaces, because tokens may start with spaces, unlike in google-research/bert.
    lines = [] if tokenizer else vocab_txt_lines(file, file.read_bytes())[0]
    vocab = model["vocab"] if tokenizer else {line.rstrip(): index for index, line in enumerate(lines)}
    do_lower_case, notes = config.get("do_lower_case") if lower_case is None else lower_case, []
    if do_lower_case is None:
        # Without this option, transformers lower-cases text, even for a cased vocabulary. If the folder has only a
        # vocab.txt, lower-case unless its tokens contain capitals.
        do_lower_case = bool(tokenizer or (folder / CONFIG).is_file()) or not is_cased(vocab)
        if not tokenizer:
            guess = "true" if do_lower_case else "false, since tokens have capitals"
            notes.append(f"do_lower_case is not set in {CONFIG}; assuming {guess}; use --cased or --uncased to set it")
    if do_lower_case and (capitals := capital_pieces(vocab)):
        notes.append(f"text is lower-cased, so tokens with capitals never occur: {listed(capitals)}")
    unk = str(as_token(config["unk_token"]))
    wordpiece = models.WordPiece(
        vocab, unk_token=unk, max_input_chars_per_word=MAX_WORD_CHARS, continuing_subword_prefix=CONTINUATION
    )
    engine = Tokenizer(wordpiece)
    chinese, accents = config.get("tokenize_chinese_chars"), config.get("strip_accents")
    engine.normalizer = normalizers.BertNormalizer(True, True if chinese is None else chinese, accents, do_lower_case)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return engine, notes


def _byte_level_tokenizer(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Tokenizer:
    if tokenizer:
        vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    else:
        vocab, merges = models.BPE.read_file(str(folder / BPE_VOCABULARY), str(folder / BPE_MERGES))
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    engine = Tokenizer(models.BPE(vocab, [(left, right) for left, right in pairs], fuse_unk=False))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    engine.decoder = decoders.ByteLevel()
    return engine


def _unigram_tokenizer(config: dict[str, Any], tokenizer: dict[str, Any], unk_id: int | None) -> Tokenizer:
    vocab = [(piece, score) for piece, score in tokenizer["model"]["vocab"]]
    if unk_id is None:
        unk_id = [piece for piece, _ in vocab].index(str(as_token(config["unk_token"])))
    engine = Tokenizer(models.Unigram(vocab, unk_id, byte_fallback=False))
    normalizer = tokenizer.get("normalizer") or {}
    for part in normalizer.get("normalizers", [normalizer]):
        if part.get("precompiled_charsmap"):
            engine.normalizer = normalizers.Precompiled(base64.b64decode(part["precompiled_charsmap"]))
    scheme = "always" if config.get("add_prefix_space", True) else "never"
    metaspace = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme=scheme)
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    engine.decoder = decoders.Metaspace(replacement=WORD_START, prepend_scheme=scheme)
    return engine


def as_token(token: Any, **fields: bool) -> AddedToken:
    """Converts a string, or a JSON object of a tokenizer file, to an `AddedToken`. `fields` override its flags."""
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not isinstance(token, dict):
        raise ValueError(f"a special token is {token!r}, not a string")
    fields = {name: value for name, value in token.items() if name not in ("__type", "id", "content")} | fields
    return AddedToken(token["content"], **fields)
