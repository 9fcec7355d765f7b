"""The tokenizer of a folder of Hugging Face: `vocab.txt` or `tokenizer.json`, and `tokenizer_config.json`."""

import json
from pathlib import Path
from typing import Any

from bertjax.data.corpus.tokenizer import MAX_WORD_CHARS
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.utils.io import read_json_object

VOCABULARY = "vocab.txt"
_CONFIG, _FAST, _SPECIAL = "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"
FILES = (VOCABULARY, _CONFIG, _FAST, _SPECIAL, "*.model")


def read_tokenizer(folder: Path) -> tuple[Vocabulary | None, list[str]]:
    """The vocabulary of a folder, None where it has none, and what there is to say of it.

    Raises:
      UsageError: a file cannot be read, or the tokenizer does what google-research/bert's does not.
    """
    settings, fast = _read_object(folder / _CONFIG), _read_object(folder / _FAST)
    normalizer = fast.get("normalizer") or {}
    lower_case = settings.get("do_lower_case", normalizer.get("lowercase"))
    accents = settings.get("strip_accents", normalizer.get("strip_accents"))
    spaced = settings.get("tokenize_chinese_chars", normalizer.get("handle_chinese_chars", True))
    for name, value in (("do_lower_case", lower_case), ("strip_accents", accents), ("tokenize_chinese_chars", spaced)):
        if not isinstance(value, bool | None):
            raise UsageError(f"the tokenizer of {folder} has {name}={value!r}; it is true or false")
    vocabulary = _vocabulary(folder, fast, lower_case)
    if vocabulary is None:
        return None, []
    if accents not in (None, vocabulary.lower_case) or spaced is False:
        odd = f"strip_accents={accents}" if spaced is not False else "tokenize_chinese_chars=False"
        raise UsageError(
            f"the tokenizer of {folder} has {odd} with do_lower_case={vocabulary.lower_case}, which bertjax does not "
            "support"
        )
    if lower_case is None and vocabulary.kind == WORDPIECE:
        how = "lower-cased, for no piece has a capital" if vocabulary.lower_case else "cased, for pieces have capitals"
        return vocabulary, [f"no {_CONFIG} tells do_lower_case; taken as {how}"]
    return vocabulary, []


def write_tokenizer(vocabulary: Vocabulary | None, model: ModelConfig, folder: Path) -> list[str]:
    """Writes what `AutoTokenizer` reads, and returns what there is to say about it."""
    if vocabulary is None:
        return ["no vocabulary: the source has none, and AutoTokenizer will find none"]
    name = VOCABULARY_FILES[vocabulary.kind]
    (folder / name).write_bytes(vocabulary.content)
    if vocabulary.kind != WORDPIECE:
        return [f"{name} is a SentencePiece model, which no BERT tokenizer of Hugging Face reads"]
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(str(folder / name), lowercase=vocabulary.lower_case)
    # Of words up to this length google-research/bert looks for pieces; the library's own limit is 100.
    tokenizer._tokenizer.model.max_input_chars_per_word = MAX_WORD_CHARS
    tokenizer.save(str(folder / _FAST))
    special = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIAL_PIECES}
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": model.max_position_embeddings,
        **special,
    }
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / _SPECIAL).write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
    return []


def _vocabulary(folder: Path, fast: dict[str, Any], lower_case: bool | None) -> Vocabulary | None:
    if (folder / VOCABULARY).is_file():
        return load_vocabulary(folder / VOCABULARY, lower_case)
    if fast:
        return load_vocabulary(folder / VOCABULARY, lower_case, _pieces(folder / _FAST, fast))
    models = sorted(folder.glob("*.model"))
    return load_vocabulary(models[0], lower_case) if models else None


def _pieces(file: Path, fast: dict[str, Any]) -> bytes:
    """The content that a `vocab.txt` of the same pieces would have."""
    try:
        kind = fast["model"]["type"]
        ids = {**fast["model"]["vocab"], **{token["content"]: token["id"] for token in fast.get("added_tokens") or []}}
        pieces = {index: piece for piece, index in ids.items()}
        lines = [pieces[index] for index in range(len(pieces))]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} is no tokenizer with a piece for each id ({what})") from error
    if kind != "WordPiece":
        raise UsageError(f"{file} has a model of type {kind!r}, BERT's is WordPiece")
    return "".join(f"{line}\n" for line in lines).encode()


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; {} where the file is not there."""
    if not file.is_file():
        return {}
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file} ({error}); mend it, or take it away") from error
