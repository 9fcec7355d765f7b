"""Vocabularies: `vocab.txt` (WordPiece), SentencePiece `.model`, `tokenizer.json`, and their copies in workdirs."""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from etils import epath
from tokenizers import pre_tokenizers

from bertjax.errors import UsageError, first_line, listed, quoted
from bertjax.utils.io import AnyPath, as_path, decode_utf8, read_json, unreadable
from bertjax.utils.json_files import naming

logger = logging.getLogger(__name__)

WORDPIECE = "wordpiece"
SENTENCEPIECE = "sentencepiece"
# Tokenizer other than BERT's standard one, run by the package `tokenizers` and stored in its format.
TOKENIZER_JSON = "tokenizer_json"
# Byte-level BPE, which is stored as a `tokenizer.json`.
BPE = "bpe"
VOCABULARY_FILES = {WORDPIECE: "vocab.txt", SENTENCEPIECE: "spiece.model", TOKENIZER_JSON: "tokenizer.json"}
# A trained vocabulary starts with these pieces, in this order.
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"  # WordPiece: prefix of a piece inside a word
WORD_START = "\u2581"  # SentencePiece: prefix of the first piece of a word
BYTE_LEVEL_START = "\u0120"  # Byte-level BPE: prefix of the first piece of a word
# Maximum characters of a word, as in google-research/bert. Longer words become [UNK].
MAX_WORD_CHARS = 200
# Minimum fraction of words with capitals in a cased vocabulary. Released cased vocabularies have at least 0.3.
_MIN_CAPITALS = 0.1
# Fraction of [UNK] tokens above which a vocabulary probably does not fit a text.
_MAX_UNKNOWN = 0.1
# File in a workdir that describes the run's vocabulary, see `Vocabulary.entry`.
ENTRY = "vocabulary.json"
# Fields that `Vocabulary.entry` omits if they have the default value.
_OPTIONAL = ("max_word_chars", "num_rows", "pair_separators", "end_separators", "prefix")

# Other names of special tokens in SentencePiece models.
_SENTENCEPIECE_NAMES = {"<pad>": "[PAD]", "<unk>": "[UNK]"}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Vocabulary loaded from a file."""

    path: AnyPath  # `vocab.txt` (one piece per line), SentencePiece `.model` or `tokenizer.json`
    content: bytes = dataclasses.field(repr=False)  # bytes of the file
    kind: str  # `wordpiece`, `sentencepiece` or `tokenizer_json`
    # All pieces; the index is the token id. Unused ids of a `tokenizer.json` have the piece "".
    pieces: tuple[str, ...] = dataclasses.field(repr=False)
    lower_case: bool  # whether the tokenizer lower-cases text and, for WordPiece, strips accents
    # `pad_id`, `unk_id`, `cls_id`, `sep_id`, `mask_id`: ids of [PAD], [UNK], [CLS], [SEP] and [MASK].
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    sha256: str  # checksum of the content
    # Length above which a word becomes [UNK], for WordPiece (default: 200, as in google-research/bert).
    max_word_chars: int = MAX_WORD_CHARS
    # Number of token embeddings in the vocabulary's checkpoint, if larger than the number of tokens (default: 0, one
    # embedding per token).
    num_rows: int = 0
    # Number of [SEP] between the texts of a pair (default: 1; 2 in RoBERTa; 0: pairs are unsupported).
    pair_separators: int = 1
    end_separators: int = 1  # number of [SEP] at the end of a row (default: 1; 0 in Llama's tokenizers)
    # Character that a `tokenizer.json` puts before each text, see `Tokenizer.missing_prefix` (default: "").
    prefix: str = ""

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD], [UNK], [CLS], [SEP] and [MASK], in this order."""
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    def room(self, seq_len: int, num_texts: int = 1) -> int:
        """Returns how many tokens of one text, or of a pair, fit into a row besides the special tokens."""
        return seq_len - 1 - self.end_separators - (num_texts > 1) * self.pair_separators

    @functools.cached_property
    def declared_special_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that a `tokenizer.json` declares as special. () for other kinds of vocabularies."""
        return tuple(token["id"] for token in self._added_tokens if token["special"])

    @functools.cached_property
    def _added_tokens(self) -> list[dict[str, Any]]:
        return json.loads(self.content)["added_tokens"] if self.kind == TOKENIZER_JSON else []

    @functools.cached_property
    def word_marker(self) -> tuple[str, bool]:
        """Prefix such as `##`, and whether pieces with this prefix start a word (True) or continue one (False)."""
        if self.kind != TOKENIZER_JSON:
            return (CONTINUATION, False) if self.kind == WORDPIECE else (WORD_START, True)
        model = json.loads(self.content)["model"]
        if model["type"] in ("WordPiece", "WordLevel") or model.get("continuing_subword_prefix"):
            return model.get("continuing_subword_prefix") or "", False
        return (BYTE_LEVEL_START if b'"ByteLevel"' in self.content else WORD_START), True

    @functools.cached_property
    def is_continuation(self) -> np.ndarray:
        """Mask of the pieces that continue a word instead of starting one, bool [V]. False for special pieces."""
        marker, starts_word = self.word_marker
        marked = np.array([bool(marker) and piece.startswith(marker) for piece in self.pieces])
        # If no piece has the marker, as in a vocabulary of characters, each piece is a word.
        continues = marked != (starts_word and marked.any())
        continues[[*self.special_ids, *(token["id"] for token in self._added_tokens)]] = False
        return continues

    def engine(self) -> Any:
        """Returns the tokenizer of a `tokenizer.json`, or the `SentencePieceProcessor` of a SentencePiece model."""
        if self.kind == SENTENCEPIECE:
            return load_sentencepiece(self.path, self.content)
        return load_tokenizer_json(self.path, self.content, self.prefix)

    def unknown_problem(self, ids: np.ndarray) -> str:
        """Returns a warning if many of the token ids of a text are [UNK], else ""."""
        share = np.mean(ids == self.unk_id) if ids.size else 0.0
        return (
            f"{share:.0%} of the tokens are [UNK]; check that {self.path} fits the text" if share > _MAX_UNKNOWN else ""
        )

    def entry(self) -> dict[str, Any]:
        """Returns the settings that `load_entry` needs besides the file. Omits `_OPTIONAL` fields with the default."""
        entry = {"file": VOCABULARY_FILES[self.kind], "lower_case": self.lower_case, "sha256": self.sha256}
        values = {name: getattr(self, name) for name in _OPTIONAL}
        entry |= {name: value for name, value in values.items() if value != getattr(Vocabulary, name)}
        return entry | ({"special_ids": named_special_ids(self)} if self.kind == TOKENIZER_JSON else {})


def load_vocabulary(
    path: str | os.PathLike,
    lower_case: bool | None = None,
    content: bytes | None = None,
    max_word_chars: int = MAX_WORD_CHARS,
    special_ids: Mapping[str, int] | None = None,
) -> Vocabulary:
    """Loads a `vocab.txt` in the format of the released BERT models, a SentencePiece `.model`, or a `tokenizer.json`.

    Args:
      path: local or `gs://` path; the suffix `.model` selects SentencePiece, and `.json` a `tokenizer.json`.
      lower_case: whether to lower-case text (default: None, True only for a `vocab.txt` whose pieces are not cased, see
        `is_cased`). Ignored for a `tokenizer.json`, which defines its own normalization.
      content: bytes of the file (default: None, read from `path`).
      max_word_chars: length above which a word becomes [UNK], for `vocab.txt`.
      special_ids: ids of the special tokens, keyed by `pad`, `unk`, `cls`, `sep` and `mask`, for `tokenizer.json`
        (default: None, the tokens [PAD], [UNK], [CLS], [SEP] and [MASK]).
    """
    path = as_path(path)
    if content is None:
        try:
            content = path.read_bytes()
        except Exception as error:  # Catch everything, because storage backends raise different types.
            fix = "use hf:ORG/NAME with --vocab or --init_from, or the vocab.txt or .model file in a folder"
            raise UsageError(f"cannot read the vocabulary {path}: {first_line(error)}; {fix}") from error
    if path.suffix == ".model":
        model = load_sentencepiece(path, content)
        kind, pieces = SENTENCEPIECE, tuple(model.id_to_piece(list(range(model.get_piece_size()))))
    elif path.suffix == ".json":
        engine = load_tokenizer_json(path, content)
        if "type" not in json.loads(content)["model"]:  # Early versions of `tokenizers` wrote no type.
            content = engine.to_str().encode()
        size = max(engine.get_vocab().values(), default=-1) + 1
        # Read added tokens separately, because `id_to_token` lower-cases those with `normalized=true`.
        added = {index: token.content for index, token in engine.get_added_tokens_decoder().items()}
        kind, pieces = TOKENIZER_JSON, tuple(added.get(i) or engine.id_to_token(i) or "" for i in range(size))
        normalized = engine.normalizer.normalize_str("A") if engine.normalizer else "A"
        lower_case = "a" in normalized
    else:
        lines, content = vocab_txt_lines(path, content)
        kind, pieces = WORDPIECE, tuple(line.strip() for line in lines)
    if kind != TOKENIZER_JSON or special_ids is None:
        special_ids = _special_ids(path, kind, pieces)
    if lower_case is None:
        lower_case = kind == WORDPIECE and not is_cased(pieces)
        if lower_case and (capitals := capital_pieces(pieces)):
            logger.warning(
                f"text is lower-cased, so tokens of {path} with capitals never occur: {listed(capitals)}; use --cased "
                "with prepare or convert if the model is cased"
            )
    ids: dict[str, Any] = {f"{name}_id": index for name, index in special_ids.items()}
    sha256 = hashlib.sha256(content).hexdigest()
    return Vocabulary(path, content, kind, pieces, lower_case, **ids, sha256=sha256, max_word_chars=max_word_chars)


def _special_ids(path: AnyPath, kind: str, pieces: tuple[str, ...]) -> dict[str, int]:
    """Finds BERT's special tokens in a vocabulary. Returns their ids, keyed by name, such as `cls`."""
    # If several lines are equal, the last line determines the piece's id, as in google-research/bert's `load_vocab`.
    ids = {piece: index for index, piece in enumerate(pieces)}
    if kind == SENTENCEPIECE:
        ids = {piece: ids[name] for name, piece in _SENTENCEPIECE_NAMES.items() if name in ids} | ids
    if missing := [piece for piece in SPECIAL_PIECES if piece not in ids]:
        raise UsageError(f"the vocabulary {path} lacks {listed(missing)}; BERT needs {listed(SPECIAL_PIECES)}")
    return {piece[1:-1].lower(): ids[piece] for piece in SPECIAL_PIECES}


def is_cased(pieces: Iterable[str]) -> bool:
    """Returns whether at least a tenth of the words in a WordPiece vocabulary have capitals, such as `The` or `A`.

    Ignores tokens that were added to a vocabulary, such as `[CLS]`, `<NUM>` or `COVID`.
    """
    words = [piece for piece in pieces if piece[:1].isalpha() and piece.lower() != piece.upper()]
    capitals = [word for word in words if word != word.lower() and (len(word) == 1 or word != word.upper())]
    return len(capitals) >= _MIN_CAPITALS * len(words) > 0


def capital_pieces(pieces: Iterable[str]) -> list[str]:
    """Returns the pieces with capitals, except those that start with `[`, such as [CLS]."""
    return [piece for piece in pieces if piece != piece.lower() and not piece.startswith("[")]


def vocab_txt_lines(path: os.PathLike, content: bytes) -> tuple[list[str], bytes]:
    """Returns the lines of a `vocab.txt`, not stripped, and the file's content in google-research/bert's format."""
    # Remove a byte-order mark, which would become part of the first piece, and replace CR line endings of old Macs.
    content = content.removeprefix(BOM_UTF8)
    if b"\n" not in content:
        content = content.replace(b"\r", b"\n")
    lines = decode_utf8(path, content).removesuffix("\n").split("\n")
    if all(len(line.split()) > 1 for line in lines):
        columns = f"several columns, such as {quoted(lines[0].strip())}"
        raise UsageError(f"each line of the vocabulary {path} has {columns}; write only one token per line")
    return lines, content


def load_sentencepiece(path: os.PathLike, content: bytes) -> Any:
    """Returns the `SentencePieceProcessor` of a model file."""
    import sentencepiece

    try:
        # Pass invalid bytes for an empty file, because SentencePiece would load it without an error.
        return sentencepiece.SentencePieceProcessor(model_proto=content or b"empty")
    except (RuntimeError, OSError) as error:
        raise unreadable(path, "not a SentencePiece model") from error


def load_tokenizer_json(path: os.PathLike, content: bytes, prefix: str = "") -> tokenizers.Tokenizer:
    """Loads a `tokenizer.json`; disables truncation, padding and BPE dropout. Prepends `prefix` to each text."""
    try:
        engine = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # `tokenizers` raises a bare Exception.
        raise unreadable(path, f"not a tokenizer.json: {first_line(error)}") from error
    engine.no_truncation()
    engine.no_padding()
    if isinstance(engine.model, tokenizers.models.BPE):
        engine.model.dropout = None
    if prefix:
        first = pre_tokenizers.Metaspace(replacement=prefix, prepend_scheme="first", split=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([first, *filter(None, [engine.pre_tokenizer])])
    return engine


def named_special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Returns the ids of the special tokens, keyed by `pad`, `unk`, `cls`, `sep` and `mask`."""
    return {piece[1:-1].lower(): index for piece, index in zip(SPECIAL_PIECES, vocabulary.special_ids, strict=True)}


def load_entry(folder: AnyPath, entry: Mapping[str, Any], content: bytes | None = None) -> Vocabulary:
    """Loads the vocabulary that `entry` (see `Vocabulary.entry`) describes, from `content` or, if None, `folder`."""
    special_ids = entry.get("special_ids")
    vocabulary = load_vocabulary(folder / entry["file"], entry["lower_case"], content, special_ids=special_ids)
    return dataclasses.replace(vocabulary, **{name: entry[name] for name in _OPTIONAL if name in entry})


def vocabulary_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Returns the files that store a vocabulary in a workdir, as a dict from name to content."""
    entry = vocabulary.entry()
    return {entry["file"]: vocabulary.content, ENTRY: (json.dumps(entry, indent=1, sort_keys=True) + "\n").encode()}


def workdir_vocabulary(workdir: epath.Path) -> Vocabulary:
    """Loads the vocabulary of a workdir."""
    if not (workdir / ENTRY).exists():
        raise UsageError(f"{workdir} has no {ENTRY}; use the workdir of a run, or a checkpoint inside it")
    return open_vocabulary(workdir / ENTRY)


def open_vocabulary(path: str | os.PathLike) -> Vocabulary:
    """Loads a `vocab.txt`, `.model` or `tokenizer.json`, or the vocabulary that a workdir's `vocabulary.json` names."""
    path = as_path(path)
    if path.name != ENTRY:
        return load_vocabulary(path)
    with naming(path):
        entry = read_json(path)
        vocabulary = load_entry(path.parent, entry)
    if vocabulary.sha256 != entry["sha256"]:
        raise UsageError(f"{vocabulary.path} is not the vocabulary of the training run; restore the original file")
    return vocabulary
