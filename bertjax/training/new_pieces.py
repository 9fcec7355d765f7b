"""Vocabularies that extend the vocabulary of a checkpoint, and initial rows of the pieces that they add."""

import dataclasses

import numpy as np

from bertjax.data.corpus.vocabulary import CONTINUATION, WORDPIECE, Vocabulary

# Parameters of masked-LM models with one row per piece.
VOCABULARY_PARAMS = ("encoder/embeddings/token", "masked_lm/bias")


@dataclasses.dataclass(frozen=True)
class NewPieces:
    """Pieces that a vocabulary adds after those of a checkpoint.

    Attributes:
      first_id: id of the first new piece, the size of the checkpoint's vocabulary.
      parts: for each new piece, the ids of the old pieces that it was split into.
    """

    first_id: int
    parts: tuple[tuple[int, ...], ...]

    def extend(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Returns a parameter with rows for the new pieces. The row of a new piece is the mean of its parts' rows.

        Args:
          rows: parameter of the checkpoint, [padded old vocabulary, ...].
          num_rows: size of the new vocabulary with padding. Padding rows are 0.
        """
        old = rows[: self.first_id]
        new = np.stack([old[list(part)].mean(axis=0) for part in self.parts])
        padding = np.zeros((num_rows - len(old) - len(new), *rows.shape[1:]), rows.dtype)
        return np.concatenate([old, new, padding])


def find_new_pieces(old: Vocabulary, new: Vocabulary) -> NewPieces | None:
    """Returns the pieces that `new` adds to `old`. Returns None if `new` does not begin with all pieces of `old`."""
    is_extended = new.kind == old.kind == WORDPIECE and new.lower_case == old.lower_case and new.size > old.size
    if not is_extended or new.pieces[: old.size] != old.pieces:
        return None
    ids = {piece: index for index, piece in enumerate(old.pieces)}
    return NewPieces(old.size, tuple(_split(piece, ids, old.unk_id) for piece in new.pieces[old.size :]))


def _split(piece: str, ids: dict[str, int], unk_id: int) -> tuple[int, ...]:
    """Splits a piece by WordPiece's longest match. A piece with `##` is split into pieces with `##`.

    `Tokenizer` cannot split a piece with `##`, because it takes text.
    """
    prefix = CONTINUATION if piece.startswith(CONTINUATION) else ""
    rest, parts = piece.removeprefix(CONTINUATION), []
    while rest:
        length = next((length for length in range(len(rest), 0, -1) if prefix + rest[:length] in ids), 0)
        if not length:
            return (unk_id,)
        parts.append(ids[prefix + rest[:length]])
        prefix, rest = CONTINUATION, rest[length:]
    return tuple(parts) or (unk_id,)
