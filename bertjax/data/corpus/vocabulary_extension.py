"""Extension of a vocabulary by pieces that are learned from text, for `prepare --add_pieces`."""

import dataclasses
import heapq
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import (
    BPE,
    BYTE_LEVEL_START,
    CONTINUATION,
    TOKENIZER_JSON,
    WORDPIECE,
    Vocabulary,
    load_entry,
)
from bertjax.data.corpus.vocabulary_training import wordpieces
from bertjax.errors import UsageError

logger = logging.getLogger(__name__)

# An added piece must shorten the tokenized sample by at least this many tokens. A piece that saves less usually occurs
# at most once in the sample, too rarely to train its embedding.
_MIN_SAVING = 2


def extended_kind(vocabulary: Vocabulary) -> str:
    """Returns the kind of pieces that can be added to a vocabulary: `wordpiece`, or `bpe` for byte-level BPE.

    Byte-level BPE includes the tokenizers of RoBERTa, ModernBERT and EuroBERT. Raises a UsageError for other kinds.
    """
    if vocabulary.kind == WORDPIECE:
        return WORDPIECE
    is_bpe = vocabulary.kind == TOKENIZER_JSON and json.loads(vocabulary.content)["model"]["type"] == "BPE"
    if not is_bpe or vocabulary.word_marker[0] != BYTE_LEVEL_START:
        supported = "a vocab.txt, or a tokenizer.json with byte-level BPE"
        raise UsageError(f"--add_pieces extends {supported}, but not {vocabulary.path}; omit --add_pieces")
    return BPE


def extend_vocabulary(
    base: Vocabulary, data: Counter[str] | list[str], number: int
) -> tuple[Vocabulary, dict[str, float]]:
    """Appends at most `number` pieces to a vocabulary. The old pieces retain their ids.

    `data` is from `training_data` with `kind=extended_kind(base)`. Also returns the manifest's entry `added_pieces`.
    """
    counts = data if isinstance(data, Counter) else _byte_level_words(base, data)
    logger.info(f"adding up to {number:,} pieces from {len(counts):,} distinct words")
    if base.kind == WORDPIECE:
        lines = "".join(f"{piece}\n" for piece in added_pieces(base, number, counts))
        content = base.content.removesuffix(b"\n") + b"\n" + lines.encode()
    else:
        merges = added_merges(base, number, counts)
        # Without new merges, keep the bytes of the file, whose checksum identifies the vocabulary.
        content = _with_merges(base, merges) if merges else base.content
    extended = dataclasses.replace(load_entry(base.path.parent, base.entry(), content), num_rows=0)
    report: dict[str, float] = {"count": extended.size - base.size}
    for name, measured in ("before", base), ("after", extended):
        report[f"pieces_per_word_{name}"], report[f"unknown_words_{name}"] = _rates(measured, counts)
    return extended, report


def added_pieces(vocabulary: Vocabulary, number: int, counts: Counter[str]) -> list[str]:
    """Returns at most `number` new pieces for a WordPiece vocabulary, the most useful first.

    The candidates are the new pieces of a second vocabulary, trained on the words that `vocabulary` splits. Each step
    adds the candidate that most reduces the number of pieces in a text with these word `counts`.
    """
    pieces = {*vocabulary.pieces}
    lengths = {word: length for word in counts if (length := _count_pieces(word, pieces)) > 1}
    if not lengths:
        return []
    # Train enough pieces that at least `number` are new, even if training finds all old pieces again.
    trained = wordpieces(Counter({word: counts[word] for word in lengths}), vocabulary.size + number)
    candidates = {*trained} - pieces
    words: dict[str, list[str]] = {}
    for word in lengths:
        spans = itertools.combinations(range(len(word) + 1), 2)
        for piece in {(CONTINUATION if start else "") + word[start:end] for start, end in spans} & candidates:
            words.setdefault(piece, []).append(word)

    def saving(piece: str) -> int:
        return sum(counts[word] * (lengths[word] - _count_pieces(word, pieces, piece)) for word in words[piece])

    heap = [(-saving(piece), piece) for piece in words]
    heapq.heapify(heap)
    added: list[str] = []
    while heap and len(added) < number:
        # After a piece is added, the savings in the heap are outdated, and usually too large. Recompute only the
        # largest one, and add its candidate if the saving is still the largest.
        piece = heapq.heappop(heap)[1]
        item = -saving(piece), piece
        if item[0] > -_MIN_SAVING:
            continue
        if heap and item > heap[0]:
            heapq.heappush(heap, item)
            continue
        added.append(piece)
        pieces.add(piece)
        lengths.update({word: _count_pieces(word, pieces) for word in words[piece]})
    return added


def _count_pieces(word: str, pieces: set[str], candidate: str = "") -> int:
    """Returns the number of pieces of a word, by longest match from the left. `candidate` counts as one of `pieces`.

    A character without a piece counts as two pieces, so that adding a piece for this character saves one.
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


def added_merges(vocabulary: Vocabulary, number: int, counts: Counter[str]) -> list[tuple[str, str]]:
    """Continues the training of byte-level BPE: returns at most `number` new merges, the most frequent pair first.

    Every merge creates a new piece. `counts` contains the count of each word, spelled in the byte-level alphabet.
    """
    model = vocabulary.engine().model
    pieces = {*vocabulary.pieces}
    words = {word: [token.value for token in model.tokenize(word)] for word in counts}
    frequencies: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], set[str]] = {}

    def count_pairs(word: str, sign: int) -> None:
        for pair in itertools.pairwise(words[word]):
            frequencies[pair] += sign * counts[word]
            places.setdefault(pair, set()).add(word)

    for word in words:
        count_pairs(word, 1)
    heap = [(-frequency, pair) for pair, frequency in frequencies.items()]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    while heap and len(merges) < number:
        negative, pair = heapq.heappop(heap)
        if -negative != frequencies[pair]:
            # Earlier merges have changed the frequency since the pair was pushed.
            heapq.heappush(heap, (-frequencies[pair], pair))
            continue
        if -negative < _MIN_SAVING:
            break
        merged = "".join(pair)
        if merged in pieces:
            continue
        merges.append(pair)
        pieces.add(merged)
        changed: set[tuple[str, str]] = set()
        for word in places[pair]:
            count_pairs(word, -1)
            words[word] = _merge(words[word], pair)
            count_pairs(word, 1)
            changed.update(itertools.pairwise(words[word]))
        for neighbor in changed:
            if merged in neighbor:
                heapq.heappush(heap, (-frequencies[neighbor], neighbor))
    return merges


def _merge(pieces: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Returns the pieces of a word after each occurrence of a pair is merged, from left to right."""
    merged: list[str] = []
    for piece in pieces:
        # If `merged[-1]` is already a merged pair, it is a new piece, and thus differs from `pair[0]`.
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _byte_level_words(vocabulary: Vocabulary, sentences: Iterable[str]) -> Counter[str]:
    """Counts the words into which a `tokenizer.json` pre-tokenizes sentences, spelled in the byte-level alphabet."""
    engine = vocabulary.engine()
    counts: Counter[str] = Counter()
    for sentence in sentences:
        text = sentence.encode("utf-8", "replace").decode()
        text = engine.normalizer.normalize_str(text) if engine.normalizer else text
        counts.update(word for word, _ in engine.pre_tokenizer.pre_tokenize_str(text))
    return counts


def _with_merges(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]) -> bytes:
    """Returns the content of the `tokenizer.json` with `merges` added. New pieces get the next free ids."""
    data = json.loads(vocabulary.content)
    model = data["model"]
    # Enter the added tokens in the model's vocabulary. Otherwise, they would get new ids after the new pieces.
    model["vocab"] |= {token["content"]: token["id"] for token in data["added_tokens"]}
    model["vocab"] |= {"".join(pair): index for index, pair in enumerate(merges, vocabulary.size)}
    # Old files contain merges as strings.
    as_strings = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] += [" ".join(pair) if as_strings else [*pair] for pair in merges]
    return json.dumps(data, ensure_ascii=False).encode()


def _rates(vocabulary: Vocabulary, counts: Counter[str]) -> tuple[float, float]:
    """Returns the pieces per word, and the fraction of words that contain [UNK]. Words include punctuation."""
    if vocabulary.kind == TOKENIZER_JSON:
        model = vocabulary.engine().model
        ids_of_words = ([token.id for token in model.tokenize(word)] for word in counts)
    else:
        ids_of_words = map(Tokenizer(vocabulary).encode, counts)
    pieces = unknown = 0
    for count, ids in zip(counts.values(), ids_of_words, strict=True):
        pieces += count * len(ids)
        unknown += count * (vocabulary.unk_id in ids)
    words = max(1, counts.total())
    return round(pieces / words, 4), round(unknown / words, 6)
