"""Extension of a WordPiece vocabulary by pieces that a text needs."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.data.corpus.vocabulary_training import wordpieces

logger = logging.getLogger(__name__)

# A piece that saves less would occur at most once in the sample, too rarely to train its embedding.
_MIN_SAVING = 2


def extend_vocabulary(
    vocabulary: Vocabulary, number: int, results: Iterable[Counter[str]], progress: bool = False
) -> tuple[Vocabulary, dict[str, float]]:
    """Appends the pieces that shorten a text most.

    Args:
      vocabulary: WordPiece vocabulary; its pieces retain their ids.
      number: maximum number of pieces to add.
      results: word counts of the text, from `statistics`.
      progress: whether to log the number of words.

    Returns:
      A tuple of the extended vocabulary and the manifest's entry `added_pieces`: the `count` of added pieces, and for
      the vocabulary before and after, the mean number of pieces per word and the fraction of words that are [UNK].
      Punctuation characters are words.
    """
    counts: Counter[str] = Counter()
    for words in results:
        counts.update(words)
    if progress:
        logger.info(f"vocabulary: choosing {number:,} pieces to add for {len(counts):,} words")
    added = added_pieces(vocabulary, number, counts)
    extended = _append(vocabulary, added)
    entry: dict[str, float] = {"count": len(added)}
    for name, measured in ("before", vocabulary), ("after", extended):
        entry[f"pieces_per_word_{name}"], entry[f"unknown_words_{name}"] = _rates(measured, counts)
    return extended, entry


def added_pieces(vocabulary: Vocabulary, number: int, counts: Counter[str]) -> list[str]:
    """Returns at most `number` new pieces, the most useful first.

    The candidates are the pieces of a WordPiece vocabulary that is trained on the words that `vocabulary` splits. A
    candidate saves, summed over the words that use it, the word's count times the pieces that the word saves. Repeated
    halving discards the candidates that save least, since a word of a discarded candidate may use others.
    """
    old_lengths = _lengths_of_split_words(vocabulary, counts)
    if not old_lengths:
        return []
    split_words = Counter({word: counts[word] for word in old_lengths})
    # Even if all old pieces are among the trained ones, `number` pieces are new.
    trained = wordpieces(split_words, vocabulary.size + number)
    candidates = sorted({*trained} - {*vocabulary.pieces})
    while True:
        savings = _savings(vocabulary, candidates, old_lengths, split_words)
        useful = [piece for piece in candidates if savings[piece] >= _MIN_SAVING]
        useful.sort(key=lambda piece: (-savings[piece], piece))
        if len(candidates) <= 2 * number:
            return useful[:number]
        candidates = useful[: max(number, len(candidates) // 2)]


def _lengths_of_split_words(vocabulary: Vocabulary, counts: Counter[str]) -> dict[str, int]:
    """Returns the number of pieces of each word that has several or is [UNK]."""
    tokenizer = Tokenizer(vocabulary)
    lengths = {}
    for word in counts:
        ids = tokenizer.encode(word)
        # Pieces for an unknown word must count as a saving, so [UNK] counts as more pieces than the word can have.
        length = len(word) + 1 if vocabulary.unk_id in ids else len(ids)
        if length > 1:
            lengths[word] = length
    return lengths


def _savings(
    vocabulary: Vocabulary, candidates: Sequence[str], old_lengths: dict[str, int], counts: Counter[str]
) -> Counter[str]:
    """Returns the number of pieces that each candidate saves if all candidates are added."""
    extended = _append(vocabulary, candidates)
    tokenizer = Tokenizer(extended)
    savings: Counter[str] = Counter()
    for word, count in counts.items():
        ids = tokenizer.encode(word)
        for new_id in {index for index in ids if index >= vocabulary.size}:
            savings[extended.pieces[new_id]] += count * (old_lengths[word] - len(ids))
    return savings


def _append(vocabulary: Vocabulary, pieces: Sequence[str]) -> Vocabulary:
    lines = "".join(f"{piece}\n" for piece in pieces).encode()
    content = vocabulary.content.removesuffix(b"\n") + b"\n" + lines
    return load_vocabulary(VOCABULARY_FILES[WORDPIECE], vocabulary.lower_case, content)


def _rates(vocabulary: Vocabulary, counts: Counter[str]) -> tuple[float, float]:
    """Returns the pieces per word and the fraction of unknown words, rounded for the manifest."""
    tokenizer = Tokenizer(vocabulary)
    pieces = unknown = 0
    for word, count in counts.items():
        ids = tokenizer.encode(word)
        pieces += count * len(ids)
        unknown += count * (vocabulary.unk_id in ids)
    words = max(1, counts.total())
    return round(pieces / words, 4), round(unknown / words, 6)
