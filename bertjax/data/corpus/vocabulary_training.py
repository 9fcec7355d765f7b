"""Deterministic training of vocabularies on a bounded sample of the text."""

import dataclasses
import io
import itertools
import logging
import math
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import Text, grouped, with_spaces
from bertjax.data.corpus.sentences import MAX_SENTENCE_CHARS, split_point, split_sentences
from bertjax.data.corpus.tokenizer import BasicTokenizer
from bertjax.data.corpus.vocabulary import (
    BPE,
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

# Minimum and maximum number of pieces. Byte-level BPE has a piece for each byte.
_MIN_SIZES = {WORDPIECE: 32, SENTENCEPIECE: 32, BPE: 256 + len(SPECIAL_PIECES)}
_MAX_SIZE = 1_000_000

# Sample sizes in characters. The sample for SentencePiece is smaller, because SentencePiece is slow and stores the
# sample several times, whereas WordPiece training needs only word counts.
_SAMPLE_CHARS = {WORDPIECE: 64 << 20, SENTENCEPIECE: 8 << 20, BPE: 32 << 20}
# Characters that get their own pieces (`x` and `##x`): the 1,000 most frequent or, in Chinese and Japanese, as many as
# make up this share of the text. Others become [UNK].
_MIN_CHARACTERS, _CHARACTER_COVERAGE = 1000, 0.9995
# Sample size, in characters, to count nonspacing marks, such as accents or the vowel signs of Hindi; and the maximum
# number of marks per letter that a new vocabulary strips by default. English, French, German, Russian and Spanish have
# fewer; Arabic, Czech, Hindi, Japanese, Thai, Turkish and Vietnamese have more.
_MARKS_SAMPLE_CHARS, _MAX_STRIPPED_MARKS = 1 << 20, 0.05
_MIN_FREQUENCY = 2
_BATCH_CHARS = 1 << 20
_BATCHES_AHEAD = 4
_WORDS_PER_LINE = 10_000


def check_size(size: int, kind: str) -> None:
    """Raises a UsageError if the size of a vocabulary is out of range."""
    if not _MIN_SIZES[kind] <= size <= _MAX_SIZE:
        raise UsageError(f"the vocabulary size is {size:,} pieces; it must be {_MIN_SIZES[kind]} to {_MAX_SIZE:,}")


def sample_training_data(
    sources: Sequence[readers.Source], kind: str, lower_case: bool, pool: Executor
) -> Counter[str] | list[str]:
    """Samples the start of each source, and returns the result of `training_data`, computed in `pool`."""
    groups = grouped(_sample(sources, _SAMPLE_CHARS[kind]), _BATCH_CHARS, divide_documents=True)
    calls = ((list(texts), kind, lower_case) for texts in groups)
    samples = ordered_map(pool, training_data, calls, _BATCHES_AHEAD)
    if kind != WORDPIECE:
        return list(itertools.chain.from_iterable(samples))
    counts: Counter[str] = Counter()
    for words in samples:
        counts.update(words)
    return counts


def strips_letters(sources: Sequence[readers.Source]) -> bool:
    """Returns whether BERT's uncased tokenizer, which strips nonspacing marks, would change many letters of a text."""
    letters = marks = 0
    # Read at most 100 sources, because reading one costs the same for a short sample.
    for text in _sample(sources[:: 1 + len(sources) // 100], _MARKS_SAMPLE_CHARS):
        letters += sum(map(str.isalpha, text.text))
        if not text.text.isascii():
            marks += sum(unicodedata.category(char) == "Mn" for char in unicodedata.normalize("NFD", text.text))
    return marks > _MAX_STRIPPED_MARKS * letters


def learn_vocabulary(data: Counter[str] | list[str], *, kind: str, size: int, lower_case: bool) -> Vocabulary:
    """Trains a vocabulary of at most `size` pieces, starting with `SPECIAL_PIECES`, on `training_data`."""
    if not data:
        raise BertjaxError("the inputs contain no text to train a vocabulary on; check the --input specs")
    unit = "distinct words" if kind == WORDPIECE else "sentences"
    logger.info(f"training a vocabulary of {size:,} pieces from {len(data):,} {unit}")
    if isinstance(data, Counter):
        content = "".join(f"{piece}\n" for piece in wordpieces(data, size)).encode()
    else:
        content = (byte_level_bpe if kind == BPE else sentencepiece_model)(data, size, lower_case)
    return load_vocabulary(VOCABULARY_FILES[TOKENIZER_JSON if kind == BPE else kind], lower_case, content)


def ordered_map(
    pool: Executor, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], max_pending: int
) -> Iterator[Any]:
    """Yields `function(*each)` in order for each of `arguments`, computed in a pool.

    At most `max_pending` calls are pending while the caller processes a result.
    """
    pending: deque[Any] = deque()
    for call in arguments:
        pending.append(pool.submit(function, *call))
        if len(pending) > max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _sample(sources: Sequence[readers.Source], max_chars: int) -> Iterator[Text]:
    """Yields texts from the start of each source, in proportion to the source's size."""
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
                if len(text.text) > chars:
                    text = dataclasses.replace(text, text=text.text[: split_point(text.text, math.ceil(chars))])
                yield text
                bar.update(len(text.text))
                chars -= len(text.text)
                if chars <= 0:
                    break


def training_data(texts: Iterable[Text], kind: str, lower_case: bool) -> Counter[str] | list[str]:
    """Returns the training data of a vocabulary: word counts for WordPiece, sentences for other kinds."""
    if kind != WORDPIECE:
        lines: list[str] = []
        for text in texts:
            sentences = split_sentences(text.text, text.layout, Counter())
            lines += with_spaces(sentences, text) if kind == BPE else sentences
        return lines
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
    char_counts: Counter[str] = Counter()
    for word, count in counts.items():
        for char in word:
            char_counts[char] += count
    frequent = sorted(char_counts, key=lambda char: (-char_counts[char], char))
    covered = itertools.accumulate(char_counts[char] for char in frequent)
    enough = 1 + sum(count < _CHARACTER_COVERAGE * char_counts.total() for count in covered)
    alphabet = {*frequent[: min(max(_MIN_CHARACTERS, enough), size // 4)]}
    words = sorted(word for word in counts if alphabet.issuperset(word))
    # Assign the ids of characters in sorted order, because the trainer breaks ties between merges by these ids. By
    # default, it would assign them in the order of a randomly seeded hash table.
    first_chars = sorted({word[0] for word in words})
    inner_chars = sorted({f"##{char}" for word in words for char in word[1:]})
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
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
    tokenizer = Tokenizer(models.BPE())
    lower = [normalizers.Lowercase()] if lower_case else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *lower])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    *others, mask = SPECIAL_PIECES
    # Strip the space before [MASK] (`lstrip`), because [MASK] stands for a word and the space before it.
    special = [*(AddedToken(piece, special=True) for piece in others), AddedToken(mask, lstrip=True, special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    without_surrogates = (sentence.encode("utf-8", "replace").decode() for sentence in sentences)
    tokenizer.train_from_iterator(without_surrogates, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(piece, SPECIAL_PIECES.index(piece)) for piece in ("[CLS]", "[SEP]")],
    )
    return tokenizer.to_str().encode()
