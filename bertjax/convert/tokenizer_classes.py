"""Functions that build tokenizers from a vocabulary and options, as the tokenizer classes of transformers do."""

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bertjax.data.corpus.vocabulary import (
    CONTINUATION,
    SPECIAL_PIECES,
    WORD_START,
    capital_pieces,
    is_cased,
    vocab_txt_lines,
)
from bertjax.errors import first_line, listed
from bertjax.utils.io import unreadable

VOCABULARY = "vocab.txt"
CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
# RoBERTa's tokenizer files in folders without `tokenizer.json`, which old versions of transformers saved.
BPE_VOCABULARY, BPE_MERGES = "vocab.json", "merges.txt"
# Classes for which transformers builds BERT's standard tokenizer from the vocabulary and a few options. It ignores the
# rest of `tokenizer.json`.
BERT_CLASSES = (
    "BertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "LayoutLMTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
)
# Classes for which transformers builds a byte-level or a unigram tokenizer from the vocabulary and options.
BYTE_LEVEL_CLASSES, UNIGRAM_CLASSES = ("RobertaTokenizer",), ("XLMRobertaTokenizer", "CamembertTokenizer")
# Type of the model in `tokenizer.json`, keyed by tokenizer class.
MODEL_TYPES = {
    **dict.fromkeys(BERT_CLASSES, "WordPiece"),
    **dict.fromkeys(BYTE_LEVEL_CLASSES, "BPE"),
    **dict.fromkeys(UNIGRAM_CLASSES, "Unigram"),
}
# Maximum word length, in characters, of transformers' BERT tokenizers. Longer words become [UNK].
MAX_WORD_CHARS = 100
# Default special tokens, keyed by name in `tokenizer_config.json`.
BERT_DEFAULTS = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
ROBERTA_DEFAULTS = {
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"},
    **{"cls_token": "<s>", "mask_token": "<mask>"},
}


def bert_tokenizer(
    folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], lower_case: bool | None
) -> tuple[Tokenizer, list[str]]:
    """Builds the tokenizer of the class `BertTokenizer`, without added tokens."""
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


def read_bpe(folder: Path) -> dict[str, Any]:
    """Returns the content of `vocab.json` and `merges.txt` in the form of `tokenizer.json`."""
    try:
        vocab, merges = models.BPE.read_file(str(folder / BPE_VOCABULARY), str(folder / BPE_MERGES))
    except Exception as error:  # The package `tokenizers` raises `Exception` for all errors.
        raise unreadable(folder / BPE_VOCABULARY, first_line(error)) from error
    return {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}


def byte_level_tokenizer(config: dict[str, Any], tokenizer: dict[str, Any]) -> Tokenizer:
    """Builds the tokenizer of RoBERTa, without added tokens."""
    model = tokenizer["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    engine = Tokenizer(models.BPE(model["vocab"], [(left, right) for left, right in pairs], fuse_unk=False))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    engine.decoder = decoders.ByteLevel()
    return engine


def unigram_tokenizer(config: dict[str, Any], tokenizer: dict[str, Any]) -> Tokenizer:
    """Builds the tokenizer of XLM-R and CamemBERT, without added tokens."""
    vocab = [(piece, score) for piece, score in tokenizer["model"]["vocab"]]
    unk_id = [piece for piece, _ in vocab].index(str(as_token(config["unk_token"])))
    if config["tokenizer_class"] == "XLMRobertaTokenizer":
        unk_id = 3  # fixed in transformers, even if `unk_token` has a different id
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
    """Converts a string, or an object of a tokenizer's files, to `AddedToken`. `fields` override flags of objects."""
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not isinstance(token, dict):
        raise ValueError(f"a special token is {token!r}, not a string")
    fields = {name: value for name, value in token.items() if name not in ("__type", "id", "content")} | fields
    return AddedToken(token["content"], **fields)
