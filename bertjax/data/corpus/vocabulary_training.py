"""Deterministic training and extension of vocabularies on a bounded sample of the text."""

import heapq
import io
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from bertjax.data.corpus import readers
from bertjax.data.corpus.basic_tokenizer import BasicTokenizer
from bertjax.data.corpus.documents import MAX_SENTENCE_CHARS, Text, batches, split_sentences
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import (
    BPE,
    CONTINUATION,
    MAX_WORD_CHARS,
    SENTENCEPIECE,
    SPECIAL_PIECES,
    TOKENIZER_JSON,
    VOCABULARY_FILES,
    WORDPIECE,
    Vocabulary,
    load_vocabulary,
)
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

MIN_SIZE = 32
MAX_SIZE = 1_000_000

# Sample sizes in characters. The sample for SentencePiece is smaller, because SentencePiece is slow and stores the
# sample several times, whereas WordPiece training needs only word counts.
_SAMPLE_CHARS = {WORDPIECE: 64 << 20, SENTENCEPIECE: 8 << 20, BPE: 32 << 20}
# Maximum number of characters that get their own pieces (`x` and `##x`). Rarer characters become [UNK].
_MAX_CHARACTERS = 1000
_MIN_FREQUENCY = 2
_BATCHES_AHEAD = 4
_WORDS_PER_LINE = 10_000
# An added piece must shorten the tokenized sample by at least this many tokens. A piece that saves less usually occurs
# at most once in the sample, too rarely to train its embedding.
_MIN_SAVING = 2

_T = TypeVar("_T")


def check_size(size: int) -> None:
    """Raises a UsageError if the size of a vocabulary is out of range."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UsageError(f"the vocabulary size is {size:,} pieces; it must be {MIN_SIZE} to {MAX_SIZE:,}")


def sample_training_data(
    sources: Sequence[readers.Source], kind: str, lower_case: bool, pool: Executor
) -> Iterator[Counter[str] | list[str]]:
    """Samples the start of each source. Yields `training_data` of each batch of texts, computed in `pool`."""
    sample = batches(_sample(sources, _SAMPLE_CHARS[kind]))
    return ordered_map(pool, training_data, ((batch, kind, lower_case) for batch in sample), _BATCHES_AHEAD)


def learn_vocabulary(
    samples: Iterable[Counter[str] | list[str]],
    *,
    kind: str,
    size: int,
    lower_case: bool,
    base: Vocabulary | None = None,
    add_pieces: int = 0,
) -> tuple[Vocabulary, dict[str, float] | None]:
    """Trains a vocabulary of at most `size` pieces, or appends at most `add_pieces` pieces to a WordPiece vocabulary.

    A new vocabulary starts with [PAD] [UNK] [CLS] [SEP] [MASK]. The pieces of `base` retain their ids. `samples` are
    the results of `training_data`, in order.

    Returns:
      The vocabulary and, if `base` is given, the value of `added_pieces` in the manifest (else None).
    """
    file = VOCABULARY_FILES[TOKENIZER_JSON if kind == BPE else kind]
    if kind != WORDPIECE:
        sentences = list(itertools.chain.from_iterable(samples))
        logger.info(f"training a vocabulary of {size:,} pieces from {len(sentences):,} sentences")
        train = byte_level_bpe if kind == BPE else sentencepiece_model
        return load_vocabulary(file, lower_case, train(sentences, size, lower_case)), None
    counts: Counter[str] = Counter()
    for words in samples:
        counts.update(words)
    action = f"training a vocabulary of {size:,}" if base is None else f"adding up to {add_pieces:,}"
    logger.info(f"{action} pieces from {len(counts):,} distinct words")
    pieces = added_pieces(base, add_pieces, counts) if base else wordpieces(counts, size)
    lines = "".join(f"{piece}\n" for piece in pieces).encode()
    if base is None:
        return load_vocabulary(file, lower_case, lines), None
    content = base.content.removesuffix(b"\n") + b"\n" + lines
    extended = load_vocabulary(file, base.lower_case, content, base.max_word_chars)
    report: dict[str, float] = {"count": len(pieces)}
    for name, measured in ("before", base), ("after", extended):
        report[f"pieces_per_word_{name}"], report[f"unknown_words_{name}"] = _rates(measured, counts)
    return extended, report


def ordered_map(
    pool: Executor, function: Callable[..., _T], arguments: Iterable[tuple[Any, ...]], max_pending: int
) -> Iterator[_T]:
    """Calls a function in a pool, once for each tuple of `arguments`, and yields the results in order.

    At most `max_pending` calls are submitted ahead of the result that the caller is processing.
    """
    pending: deque[Any] = deque()
    for call in arguments:
        pending.append(pool.submit(function, *call))
        if len(pending) > max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _sample(sources: Sequence[readers.Source], max_chars: int) -> Iterator[Text]:
    """Yields complete texts from the start of each source, in proportion to the source's size."""
    known_bytes = sum(source.size_bytes or 0 for source in sources)
    unknown = sum(source.size_bytes is None for source in sources)
    # A source of unknown size gets the same number of characters as all sources of known size combined.
    per_source = max_chars / max(1, unknown + (known_bytes > 0))
    total = max_chars if unknown else min(max_chars, known_bytes)
    with progress_bar("vocabulary: sample", total, " characters") as bar:
        for source in sources:
            share = 1 if source.size_bytes is None else source.size_bytes / max(known_bytes, 1)
            chars = per_source * share
            # Discard the problem counts, since problems are counted when the text is encoded.
            for text in readers.read(source, Counter()):
                yield text
                bar.update(len(text.text))
                chars -= len(text.text)
                if chars <= 0:
                    break


def training_data(texts: Iterable[Text], kind: str, lower_case: bool) -> Counter[str] | list[str]:
    """Returns the training data of a vocabulary: word counts for WordPiece, sentences for other kinds."""
    if kind != WORDPIECE:
        return [sentence for text in texts for sentence in split_sentences(text.text, text.layout, Counter())]
    tokenizer = BasicTokenizer(lower_case)
    chunks = Counter(itertools.chain.from_iterable(text.text.replace("\n", " ").split(" ") for text in texts))
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word in tokenizer.words(chunk):
            if len(word) <= MAX_WORD_CHARS:
                words[word] += count
    return words


def wordpieces(counts: Counter[str], size: int) -> list[str]:
    """Trains a WordPiece vocabulary on word counts and returns its pieces, special tokens first."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if not counts:
        raise BertjaxError("the inputs contain no text to train a vocabulary on; check the --input specs")
    char_counts: Counter[str] = Counter()
    for word, count in counts.items():
        for char in word:
            char_counts[char] += count
    frequent = sorted(char_counts, key=lambda char: (-char_counts[char], char))[: min(_MAX_CHARACTERS, size // 4)]
    alphabet = set(frequent)
    words = sorted(word for word in counts if alphabet.issuperset(word))
    # Assign the ids of characters in sorted order, because the trainer breaks ties between merges by these ids. By
    # default, it would assign them in the order of a randomly seeded hash table.
    first_chars = sorted({word[0] for word in words})
    inner_chars = sorted({f"##{char}" for word in words for char in word[1:]})
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*SPECIAL_PIECES, *first_chars, *inner_chars],
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    repeated = itertools.chain.from_iterable(itertools.repeat(word, counts[word]) for word in words)
    lines = iter(lambda: " ".join(itertools.islice(repeated, _WORDS_PER_LINE)), "")
    tokenizer.train_from_iterator(lines, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def sentencepiece_model(sentences: Iterable[str], size: int, lower_case: bool) -> bytes:
    """Returns the content of a SentencePiece unigram model whose ids 0 to 4 are BERT's special tokens."""
    import sentencepiece

    pad, unk, *control = SPECIAL_PIECES
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(sentence.replace("\0", "") for sentence in sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
            pad_id=0,
            pad_piece=pad,
            unk_id=1,
            unk_piece=unk,
            bos_id=-1,
            eos_id=-1,
            control_symbols=control,
            max_sentence_length=4 * MAX_SENTENCE_CHARS,
            # Use one thread, because several would sum in a different order and select different pieces.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Remove SentencePiece's advice to set an option that `prepare` does not have.
        reason = " ".join(str(error).split()).partition(" or decrease character_coverage")[0]
        raise BertjaxError(f"SentencePiece cannot train {size} pieces: {reason}; change --vocab_size") from error
    return model.getvalue()


def byte_level_bpe(sentences: Sequence[str], size: int, lower_case: bool) -> bytes:
    """Returns the content of a `tokenizer.json` with byte-level BPE, whose ids 0 to 4 are BERT's special tokens.

    Rows are [CLS] A [SEP] B [SEP]. As in ModernBERT, text is normalized to NFC, and a space belongs to the next word.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not sentences:
        raise BertjaxError("the inputs contain no text to train a vocabulary on; check the --input specs")
    if size < len(alphabet) + len(SPECIAL_PIECES):
        raise UsageError(
            f"the vocabulary size is {size:,} pieces; byte-level BPE needs at least "
            f"{len(alphabet) + len(SPECIAL_PIECES)}"
        )
    tokenizer = Tokenizer(models.BPE())
    lower = [normalizers.Lowercase()] if lower_case else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *lower])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    *others, mask = SPECIAL_PIECES
    # Strip the space before [MASK] (`lstrip`), because [MASK] stands for a word and the space before it.
    special = [*(AddedToken(piece, special=True) for piece in others), AddedToken(mask, lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    without_surrogates = (sentence.encode("utf-8", "replace").decode() for sentence in sentences)
    tokenizer.train_from_iterator(without_surrogates, trainer)
    ids = {piece: index for index, piece in enumerate(SPECIAL_PIECES)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(piece, ids[piece]) for piece in ("[CLS]", "[SEP]")],
    )
    return tokenizer.to_str().encode()


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


def _rates(vocabulary: Vocabulary, counts: Counter[str]) -> tuple[float, float]:
    """Returns the pieces per word and the fraction of words that are [UNK]. Punctuation characters count as words."""
    tokenizer = Tokenizer(vocabulary)
    pieces = unknown = 0
    for word, count in counts.items():
        ids = tokenizer.encode(word)
        pieces += count * len(ids)
        unknown += count * (vocabulary.unk_id in ids)
    words = max(1, counts.total())
    return round(pieces / words, 4), round(unknown / words, 6)
