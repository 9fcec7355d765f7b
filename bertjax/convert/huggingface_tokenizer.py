"""Tokenizer of a Hugging Face folder: `vocab.txt` or `tokenizer.json`, and `tokenizer_config.json`."""

import json
from pathlib import Path
from typing import Any

from bertjax.convert.portable import read_vocabulary_file
from bertjax.data.corpus.tokenizer import MAX_WORD_CHARS
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.utils.io import read_json_object

VOCABULARY = "vocab.txt"
_CONFIG, _TOKENIZER, _SPECIAL_TOKENS = "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"
FILES = (VOCABULARY, _CONFIG, _TOKENIZER, _SPECIAL_TOKENS, "*.model")


def read_tokenizer(folder: Path) -> tuple[Vocabulary | None, list[str]]:
    """Returns the vocabulary of a folder (None if the folder contains no vocabulary), and notes for the user."""
    config, tokenizer = _read_object(folder / _CONFIG), _read_object(folder / _TOKENIZER)
    normalizer = tokenizer.get("normalizer") or {}
    options = {
        "do_lower_case": config.get("do_lower_case", normalizer.get("lowercase")),
        "strip_accents": config.get("strip_accents", normalizer.get("strip_accents")),
        "tokenize_chinese_chars": config.get("tokenize_chinese_chars", normalizer.get("handle_chinese_chars", True)),
    }
    for name, value in options.items():
        if not isinstance(value, bool | None):
            raise UsageError(f"the tokenizer of {folder} has {name}={value!r}; it must be true or false")
    lower_case, strip_accents, tokenize_chinese_chars = options.values()
    vocabulary = _read_vocabulary(folder, tokenizer, lower_case)
    if vocabulary is None:
        return None, []
    unsupported = None
    if tokenize_chinese_chars is False:
        unsupported = "tokenize_chinese_chars=False"
    elif strip_accents not in (None, vocabulary.lower_case):
        unsupported = f"strip_accents={strip_accents}"
    if unsupported:
        raise UsageError(
            f"the tokenizer of {folder} has {unsupported} with do_lower_case={vocabulary.lower_case}, which bertjax "
            "does not support; use a different tokenizer"
        )
    if lower_case is None and vocabulary.kind == WORDPIECE:
        guess = "true, since no token has capitals" if vocabulary.lower_case else "false, since tokens have capitals"
        return vocabulary, [f"do_lower_case is not set in {_CONFIG}; assuming {guess}"]
    return vocabulary, []


def write_tokenizer(vocabulary: Vocabulary | None, config: ModelConfig, folder: Path) -> list[str]:
    """Writes the files that `AutoTokenizer` reads, and returns notes for the user."""
    if vocabulary is None:
        return ["the source has no vocabulary; AutoTokenizer will not find one"]
    file_name = VOCABULARY_FILES[vocabulary.kind]
    (folder / file_name).write_bytes(vocabulary.content)
    if vocabulary.kind != WORDPIECE:
        return [f"{file_name} is a SentencePiece model, which Hugging Face's BERT tokenizers cannot read"]
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(str(folder / file_name), lowercase=vocabulary.lower_case)
    # Use google-research/bert's limit instead of the library's default of 100. Longer words become [UNK].
    tokenizer._tokenizer.model.max_input_chars_per_word = MAX_WORD_CHARS
    tokenizer.save(str(folder / _TOKENIZER))
    special_tokens = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
    tokenizer_config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": config.max_position_embeddings,
        **special_tokens,
    }
    (folder / _CONFIG).write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
    (folder / _SPECIAL_TOKENS).write_text(json.dumps(special_tokens, indent=2) + "\n", encoding="utf-8")
    return []


def _read_vocabulary(folder: Path, tokenizer: dict[str, Any], lower_case: bool | None) -> Vocabulary | None:
    file = folder / VOCABULARY
    if tokenizer and not file.is_file():
        return load_vocabulary(file, lower_case, _vocab_txt(folder / _TOKENIZER, tokenizer))
    return read_vocabulary_file(folder, lower_case)


def _vocab_txt(file: Path, tokenizer: dict[str, Any]) -> bytes:
    """Returns the content of a `vocab.txt` with the tokens of a `tokenizer.json`."""
    try:
        model = tokenizer["model"]
        kind = model["type"]
        added_tokens = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        tokens = {index: token for token, index in {**model["vocab"], **added_tokens}.items()}
        lines = [tokens[index] for index in range(len(tokens))]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} does not define a token for each id ({type(error).__name__}: {error}); copy the file again"
        ) from error
    if kind != "WordPiece":
        raise UsageError(f"{file} contains a tokenizer of type {kind!r}; BERT needs WordPiece")
    return "".join(f"{line}\n" for line in lines).encode()


def _read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object; returns {} if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}; correct or remove it") from error
