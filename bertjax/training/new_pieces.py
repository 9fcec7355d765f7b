"""Vocabulary pieces that a run adds to those of its initial checkpoint, and their initial embeddings and biases."""

import dataclasses
import json
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer, wordpiece_model
from bertjax.data.corpus.vocabulary import TOKENIZER_JSON, WORDPIECE, Vocabulary, load_tokenizer_json

# Parameters with one row per vocabulary entry.
VOCABULARY_PARAMS = ("encoder/embeddings/token", "masked_lm/bias", "masked_lm/decoder", "generator_lm/bias")


@dataclasses.dataclass(frozen=True)
class NewPieces:
    """Pieces that a vocabulary appends to the vocabulary of a checkpoint."""

    first_id: int  # id of the first new piece, equal to the size of the checkpoint's vocabulary
    parts: tuple[tuple[int, ...], ...]  # for each new piece, the ids of the old pieces that it consists of

    def extend(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Returns a parameter with `num_rows` rows: old pieces, new pieces, and zeros for the padding.

        `rows` is the checkpoint's parameter, [padded old vocabulary, ...]. The row of a new piece is the mean of the
        rows of its parts.
        """
        extended = np.zeros((num_rows, *rows.shape[1:]), rows.dtype)
        extended[: self.first_id] = rows[: self.first_id]
        for row, part in enumerate(self.parts, self.first_id):
            extended[row] = rows[list(part)].mean(axis=0)
        return extended


def find_new_pieces(old: Vocabulary, new: Vocabulary) -> NewPieces | None:
    """Returns the pieces that `new` adds to `old`. Returns None if `new` does not begin with all pieces of `old`."""
    is_extended = new.kind == old.kind and new.lower_case == old.lower_case and new.size > old.size
    if not is_extended or new.pieces[: old.size] != old.pieces:
        return None
    added: set[str] = set()
    if new.kind == WORDPIECE:
        # Call the WordPiece model directly, because `Tokenizer` would treat a piece's prefix `##` as punctuation.
        model = wordpiece_model(old, max(map(len, new.pieces)))
    elif new.kind == TOKENIZER_JSON:
        # Call the model directly here, too, because pieces are not plain text, unlike tokens that the user added.
        model = load_tokenizer_json(old.path, old.content).model
        added = {token["content"] for token in json.loads(new.content)["added_tokens"]}
        (settings, merges), (new_settings, new_merges) = map(_settings_and_merges, (old, new))
        if new_settings != settings or new_merges[: len(merges)] != merges:
            return None
    else:
        return None
    encode = Tokenizer(old).encode
    parts = [
        tuple(encode(piece) if piece in added else (token.id for token in model.tokenize(piece)))
        for piece in new.pieces[old.size :]
    ]
    # An empty line of a vocabulary file is a piece without parts, so use [UNK] as its only part.
    return NewPieces(old.size, tuple(ids or (old.unk_id,) for ids in parts))


def _settings_and_merges(vocabulary: Vocabulary) -> tuple[dict[str, Any], list[Any]]:
    """Returns the settings of a `tokenizer.json` without its pieces, and the merges of BPE ([]: not BPE)."""
    data = json.loads(load_tokenizer_json(vocabulary.path, vocabulary.content).to_str())
    del data["added_tokens"], data["model"]["vocab"]
    return data, data["model"].pop("merges", [])
