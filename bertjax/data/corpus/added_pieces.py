"""Extension of a WordPiece vocabulary by pieces that a text needs."""

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import CONTINUATION, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
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

    The candidates are the pieces of a WordPiece vocabulary that is trained on the words that `vocabulary` splits. Each
    step adds the candidate that saves most: the sum, over the words that it shortens, of the word's count times the
    saved pieces.
    """
    pieces = {*vocabulary.pieces}
    lengths = {word: length for word in counts if (length := _length(word, pieces)) > 1}
    if not lengths:
        return []
    # Even if all old pieces are among the trained pieces, `number` trained pieces are new.
    trained = wordpieces(Counter({word: counts[word] for word in lengths}), vocabulary.size + number)
    words = _words_of_pieces(lengths, {*trained} - pieces)

    def saving(piece: str) -> int:
        return sum(counts[word] * (lengths[word] - _length(word, pieces, piece)) for word in words[piece])

    heap = [(-saving(piece), piece) for piece in words]
    heapq.heapify(heap)
    added: list[str] = []
    while heap and len(added) < number:
        # An added piece changes the savings of others, mostly to less. Only the best candidates are computed again.
        piece = heapq.heappop(heap)[1]
        entry = -saving(piece), piece
        if entry[0] > -_MIN_SAVING:
            continue
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        added.append(piece)
        pieces.add(piece)
        lengths.update({word: _length(word, pieces) for word in words[piece]})
    return added


def _length(word: str, pieces: set[str], candidate: str = "") -> int:
    """Returns the number of pieces of a word, by longest match from the left, with a candidate beside the pieces.

    A character without a piece counts as two pieces, so that a piece for it saves one.
    """
    length = start = 0
    while start < len(word):
        prefix = CONTINUATION if start else ""
        for end in range(len(word), start, -1):
            piece = prefix + word[start:end]
            if piece in pieces or piece == candidate:
                length += 1
                break
        else:
            end = start + 1
            length += 2
        start = end
    return length


def _words_of_pieces(words: Iterable[str], pieces: set[str]) -> dict[str, list[str]]:
    """Returns the words that contain each piece, for pieces in any word."""
    words_of: dict[str, list[str]] = {}
    for word in words:
        spans = itertools.combinations(range(len(word) + 1), 2)
        for piece in {(CONTINUATION if start else "") + word[start:end] for start, end in spans} & pieces:
            words_of.setdefault(piece, []).append(word)
    return words_of


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
