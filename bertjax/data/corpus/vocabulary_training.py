"""Deterministic vocabulary training on a bounded sample of the text."""

import io
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from bertjax.data.corpus import readers
from bertjax.data.corpus.encode import batches
from bertjax.data.corpus.layouts import Text
from bertjax.data.corpus.sentences import MAX_SENTENCE_CHARS, split_sentences
from bertjax.data.corpus.tokenizer import MAX_WORD_CHARS, BasicTokenizer
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES, VOCABULARY_FILES, WORDPIECE, Vocabulary, load_vocabulary
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

MIN_SIZE = 32
MAX_SIZE = 1_000_000

# Sample sizes in characters. SentencePiece is slow and stores its sample several times. WordPiece stores word counts.
_SAMPLE_CHARS = {"wordpiece": 64 << 20, "sentencepiece": 8 << 20}
# Maximum number of characters that get a piece of their own (`x` and `##x`). Rarer characters become [UNK].
_MAX_CHARACTERS = 1000
_MIN_FREQUENCY = 2
_BATCHES_AHEAD = 4
_WORDS_PER_LINE = 10_000

_T = TypeVar("_T")


def check_size(size: int) -> None:
    """Raises a UsageError if the size of a vocabulary is out of range."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UsageError(f"the vocabulary size is {size:,} pieces; it must be {MIN_SIZE} to {MAX_SIZE:,}")


def sample_statistics(
    sources: list[readers.Source], kind: str, lower_case: bool, pool: Executor, progress: bool = False
) -> Iterator[Counter[str] | list[str]]:
    """Computes `statistics` of a sample of the sources in a pool, and yields the result of each batch in order."""
    sample = batches(_sample(sources, kind, progress))
    return ordered_map(pool, statistics, ((batch, kind, lower_case) for batch in sample), _BATCHES_AHEAD)


def train_vocabulary(
    results: Iterable[Counter[str] | list[str]], kind: str, size: int, lower_case: bool, progress: bool = False
) -> Vocabulary:
    """Trains a vocabulary that starts with [PAD] [UNK] [CLS] [SEP] [MASK].

    Args:
      results: results of `statistics`, in order.
      kind: `wordpiece` or `sentencepiece`.
      size: number of pieces; a small text yields fewer pieces.
      lower_case: whether the vocabulary lower-cases text.
      progress: whether to log the size of the sample.

    Raises:
      BertjaxError: the results contain no text, or SentencePiece fails.
    """
    content = _vocabulary_content(results, kind, size, lower_case, progress)
    return load_vocabulary(VOCABULARY_FILES[kind], lower_case, content)


def ordered_map(
    pool: Executor, function: Callable[..., _T], arguments: Iterable[tuple[Any, ...]], max_pending: int
) -> Iterator[_T]:
    """Calls a function in a pool and yields the results in order. At most `max_pending` calls are in flight."""
    pending: deque[Any] = deque()
    for call in arguments:
        pending.append(pool.submit(function, *call))
        if len(pending) > max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def sample_chars(sources: list[readers.Source], kind: str) -> list[float]:
    """Returns the number of characters to sample from the start of each source, in proportion to its size."""
    chars = _SAMPLE_CHARS[kind]
    total = sum(source.size_bytes or 0 for source in sources)
    # A source of unknown size gets as many characters as all sources of known size together.
    per_source = chars / max(1, sum(source.size_bytes is None for source in sources) + (total > 0))
    return [per_source * (1 if source.size_bytes is None else source.size_bytes / max(total, 1)) for source in sources]


def head_of_source(source: readers.Source, chars: float) -> Iterator[Text]:
    """Yields whole texts from the start of a source until they have at least `chars` characters."""
    # Discard the problem counts, since problems are counted when the text is encoded.
    for text in readers.read(source, Counter()):
        yield text
        chars -= len(text.text)
        if chars <= 0:
            break


def _sample(sources: list[readers.Source], kind: str, progress: bool) -> Iterator[Text]:
    sizes = [source.size_bytes for source in sources]
    total = _SAMPLE_CHARS[kind] if None in sizes else min(_SAMPLE_CHARS[kind], sum(sizes))
    with progress_bar("vocabulary: sample", total, " characters", progress) as bar:
        for source, chars in zip(sources, sample_chars(sources, kind), strict=True):
            for text in head_of_source(source, chars):
                yield text
                bar.update(len(text.text))


def statistics(texts: Iterable[Text], kind: str, lower_case: bool) -> Counter[str] | list[str]:
    """Returns the training data of a vocabulary: word counts for WordPiece, sentences for SentencePiece."""
    if kind != WORDPIECE:
        return [sentence for text in texts for sentence in split_sentences(text.text, text.form, Counter())]
    tokenizer = BasicTokenizer(lower_case)
    chunks = Counter(itertools.chain.from_iterable(text.text.replace("\n", " ").split(" ") for text in texts))
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word in tokenizer.words(chunk):
            if len(word) <= MAX_WORD_CHARS:
                words[word] += count
    return words


def _vocabulary_content(
    results: Iterable[Counter[str] | list[str]], kind: str, size: int, lower_case: bool, progress: bool
) -> bytes:
    if kind == WORDPIECE:
        words: Counter[str] = Counter()
        for counts in results:
            words.update(counts)
        if progress:
            logger.info(f"vocabulary: choosing {size:,} pieces for {len(words):,} words")
        return "".join(f"{piece}\n" for piece in wordpieces(words, size)).encode()
    sentences = list(itertools.chain.from_iterable(results))
    if progress:
        logger.info(f"vocabulary: choosing {size:,} pieces for {len(sentences):,} sentences")
    return sentencepiece_model(sentences, size, lower_case)


def wordpieces(counts: Counter[str], size: int) -> list[str]:
    """Trains a WordPiece vocabulary on word counts and returns its pieces, special pieces first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not counts:
        raise BertjaxError("the inputs contain no text to train a vocabulary on; check the --input specs")
    char_counts: Counter[str] = Counter()
    for word, count in counts.items():
        for char in word:
            char_counts[char] += count
    frequent = sorted(char_counts, key=lambda char: (-char_counts[char], char))[: min(_MAX_CHARACTERS, size // 4)]
    alphabet = set(frequent)
    words = sorted(word for word in counts if alphabet.issuperset(word))
    # The trainer breaks ties between merges by the ids of characters. Without these lists, it would assign ids in the
    # order of a randomly seeded hash table.
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
    tokenizer.train_from_iterator(_lines(repeated), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _lines(words: Iterator[str]) -> Iterator[str]:
    while line := " ".join(itertools.islice(words, _WORDS_PER_LINE)):
        yield line


def sentencepiece_model(sentences: Iterable[str], size: int, lower_case: bool) -> bytes:
    """Returns the content of a SentencePiece unigram model whose ids 0 to 4 are BERT's special pieces."""
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
            # Several threads would sum in a different order and select different pieces.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Remove SentencePiece's advice to set an option that `prepare` does not have.
        reason = " ".join(str(error).split()).partition(" or decrease character_coverage")[0]
        raise BertjaxError(
            f"SentencePiece cannot train {size} pieces on this text: {reason}; change --vocab_size"
        ) from error
    return model.getvalue()
