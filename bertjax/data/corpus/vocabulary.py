"""Vocabularies: WordPiece `vocab.txt` files, SentencePiece `.model` files, and their copies in workdirs."""

import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

import numpy as np
from etils import epath

from bertjax.errors import UsageError, first_line
from bertjax.utils.io import AnyPath, as_path, read_json, reject_utf16

WORDPIECE = "wordpiece"
SENTENCEPIECE = "sentencepiece"
KINDS = (WORDPIECE, SENTENCEPIECE)
VOCABULARY_FILES = {WORDPIECE: "vocab.txt", SENTENCEPIECE: "spiece.model"}
# A trained vocabulary starts with these pieces, in this order.
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"  # WordPiece: prefix of a piece inside a word
WORD_START = "\u2581"  # SentencePiece: prefix of the first piece of a word
# File in a workdir that records the file name, `lower_case` and checksum of the run's vocabulary.
ENTRY = "vocabulary.json"

_SENTENCEPIECE_NAMES = {"[PAD]": ("[PAD]", "<pad>"), "[UNK]": ("[UNK]", "<unk>")}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Vocabulary loaded from a file.

    Attributes:
      path: `vocab.txt` (one piece per line) or SentencePiece `.model`.
      content: bytes of the file.
      kind: `wordpiece` or `sentencepiece`.
      pieces: all pieces; the index is the token id.
      lower_case: whether the tokenizer lower-cases text and, for WordPiece, strips accents.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of [PAD], [UNK], [CLS], [SEP] and [MASK].
      sha256: checksum of the content.
    """

    path: AnyPath
    content: bytes = dataclasses.field(repr=False)
    kind: str
    pieces: tuple[str, ...] = dataclasses.field(repr=False)
    lower_case: bool
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    sha256: str

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD], [UNK], [CLS], [SEP] and [MASK], in this order."""
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    @functools.cached_property
    def is_continuation(self) -> np.ndarray:
        """Mask of the pieces that continue a word instead of starting one, bool [V]. False for special pieces."""
        if self.kind == WORDPIECE:
            continues = np.array([piece.startswith(CONTINUATION) for piece in self.pieces])
        else:
            continues = np.array([not piece.startswith(WORD_START) for piece in self.pieces])
        continues[list(self.special_ids)] = False
        return continues


def load_vocabulary(
    path: str | os.PathLike, lower_case: bool | None = None, content: bytes | None = None
) -> Vocabulary:
    """Loads a `vocab.txt` in the format of the released BERT models, or a SentencePiece `.model`.

    Args:
      path: local path or `gs://` address; the suffix `.model` selects SentencePiece.
      lower_case: whether to lower-case text (default: None, True for a WordPiece vocabulary without upper-case
        letters, otherwise False). SentencePiece models normalize text themselves.
      content: bytes of the file (default: None, read from `path`).
    """
    path = as_path(path)
    if content is None:
        try:
            content = path.read_bytes()
        except Exception as error:  # Storage backends raise different exception types.
            reason = getattr(error, "strerror", None) or first_line(error)
            fix = "check the path, or use hf:ORG/NAME with --vocab or --init_from"
            if isinstance(error, IsADirectoryError):
                fix = "use the vocab.txt or .model file in it"
            raise UsageError(f"cannot read the vocabulary {path}: {reason}; {fix}") from error
    if path.suffix == ".model":
        model = load_sentencepiece(path, content)
        kind, pieces = SENTENCEPIECE, tuple(model.id_to_piece(list(range(model.get_piece_size()))))
    else:
        kind, pieces = WORDPIECE, _wordpiece_pieces(path, content)
    # If several lines are equal, the last line determines the piece's id, as in google-research/bert's `load_vocab`.
    ids = {piece: index for index, piece in enumerate(pieces)}
    special_ids = {}
    for piece in SPECIAL_PIECES:
        names = _SENTENCEPIECE_NAMES.get(piece, (piece,)) if kind == SENTENCEPIECE else (piece,)
        known_names = [name for name in names if name in ids]
        if not known_names:
            raise UsageError(
                f"the vocabulary {path} lacks {' or '.join(names)}; BERT needs {', '.join(SPECIAL_PIECES)}"
            )
        if pieces.count(piece) > 1:
            raise UsageError(
                f"the vocabulary {path} has {piece} on {pieces.count(piece)} lines; keep one of these lines"
            )
        special_ids[f"{piece[1:-1].lower()}_id"] = ids[known_names[0]]
    if lower_case is None:
        lower_case = kind == WORDPIECE and not has_upper_case(pieces)
    return Vocabulary(
        path, content, kind, pieces, lower_case, **special_ids, sha256=hashlib.sha256(content).hexdigest()
    )


def has_upper_case(pieces: tuple[str, ...]) -> bool:
    """Returns whether any piece has an upper-case letter. Ignores pieces that start with `[`, such as [CLS]."""
    return any(piece != piece.lower() for piece in pieces if not piece.startswith("["))


def _wordpiece_pieces(path: os.PathLike, content: bytes) -> tuple[str, ...]:
    reject_utf16(path, content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the vocabulary {path} is not UTF-8 text at byte {error.start}; convert it to UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"the vocabulary {path} is damaged: NUL byte on line {line}; copy it again")
    return tuple(line.strip() for line in text.removesuffix("\n").split("\n"))


def load_sentencepiece(path: os.PathLike, content: bytes) -> Any:
    """Returns the `SentencePieceProcessor` of a model file."""
    import sentencepiece

    try:
        if not content:
            raise RuntimeError("SentencePiece loads an empty file without an error")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        raise UsageError(f"the vocabulary {path} is not a SentencePiece model; copy the file again") from error


def vocabulary_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Returns the files of a vocabulary in a workdir, as a dict from name to content."""
    name = VOCABULARY_FILES[vocabulary.kind]
    entry = {"file": name, "lower_case": vocabulary.lower_case, "sha256": vocabulary.sha256}
    return {name: vocabulary.content, ENTRY: (json.dumps(entry, indent=1, sort_keys=True) + "\n").encode()}


def workdir_vocabulary(workdir: epath.Path) -> Vocabulary:
    """Loads the vocabulary of a workdir."""
    if not (workdir / ENTRY).exists():
        raise UsageError(f"{workdir} has no {ENTRY}; use the workdir of a run, or a checkpoint inside it")
    return open_vocabulary(workdir / ENTRY)


def open_vocabulary(path: str | os.PathLike) -> Vocabulary:
    """Loads a `vocab.txt`, a SentencePiece `.model`, or the vocabulary that a workdir's `vocabulary.json` names."""
    path = as_path(path)
    if path.name != ENTRY:
        return load_vocabulary(path)
    try:
        entry = read_json(path)
        vocabulary = load_vocabulary(path.parent / entry["file"], entry["lower_case"])
        sha256 = entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {path}: {error}; copy it again") from error
    if vocabulary.sha256 != sha256:
        raise UsageError(f"{vocabulary.path} is not the vocabulary of the training run; restore the original file")
    return vocabulary
