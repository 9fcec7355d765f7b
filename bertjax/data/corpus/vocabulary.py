"""Training a vocabulary on a bounded sample of the text, the same bytes every time."""

import io
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from bertjax.data.corpus import readers
from bertjax.data.corpus.encoding import batches
from bertjax.data.corpus.layouts import Text
from bertjax.data.corpus.sentences import MAX_SENTENCE_CHARS, split_sentences
from bertjax.data.corpus.tokenizer import (
    MAX_WORD_CHARS,
    SPECIAL_PIECES,
    WORDPIECE,
    BasicTokenizer,
    Vocabulary,
    load_vocabulary,
)
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

MIN_SIZE = 32
MAX_SIZE = 1_000_000

# SentencePiece holds its sample in memory several times over and takes long; WordPiece needs only word counts.
_SAMPLE_CHARS = {"wordpiece": 64 << 20, "sentencepiece": 8 << 20}
# Characters beyond the most frequent become [UNK] rather than fill the vocabulary twice, alone and as ##x.
_MAX_ALPHABET = 1000
_MIN_FREQUENCY = 2
_BATCHES_AHEAD = 4
_WORDS_A_LINE = 10_000

_T = TypeVar("_T")


def check_size(size: int) -> None:
    """Raises a UsageError if no vocabulary can have so many pieces."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UsageError(f"a vocabulary of {size:,} pieces: ask for {MIN_SIZE} to {MAX_SIZE:,}")


def train_vocabulary(
    sources: list[readers.Source],
    path: Path,
    *,
    kind: str,
    size: int,
    lower_case: bool,
    pool: Executor,
    progress: bool = False,
) -> Vocabulary:
    """Trains a vocabulary, [PAD] [UNK] [CLS] [SEP] [MASK] first, writes it to `path` and loads it.

    Args:
      size: pieces wanted; a text with fewer distinct pieces gives fewer.
      pool: processes that split the text.
      progress: a progress bar of the sample on standard error.

    Raises:
      UsageError: the size is out of range.
      BertjaxError: the sources hold no text, or SentencePiece cannot make a vocabulary of them.
    """
    check_size(size)
    sample = batches(_sample(sources, kind, progress))
    counts = ordered_map(pool, counted, ((batch, kind, lower_case) for batch in sample), _BATCHES_AHEAD)
    path.write_bytes(vocabulary_of(counts, kind, size, lower_case, progress))
    return load_vocabulary(path, lower_case)


def ordered_map(
    pool: Executor, function: Callable[..., _T], arguments: Iterable[tuple[Any, ...]], ahead: int
) -> Iterator[_T]:
    """Results in the order of the arguments, with at most `ahead` calls handed out and not yet taken."""
    pending: deque[Any] = deque()
    for call in arguments:
        pending.append(pool.submit(function, *call))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def sample_chars(sources: list[readers.Source], kind: str) -> list[float]:
    """Characters to sample of each source, from its head on: its share by size of 64 M for WordPiece, of 8 M else."""
    chars = _SAMPLE_CHARS[kind]
    total = sum(source.size_bytes or 0 for source in sources)
    # Sources of unknown size share evenly, each as much as all files together.
    whole = chars / max(1, sum(source.size_bytes is None for source in sources) + (total > 0))
    return [whole * (1 if source.size_bytes is None else source.size_bytes / max(total, 1)) for source in sources]


def sampled(source: readers.Source, chars: float) -> Iterator[Text]:
    """The head of a source: texts of so many characters, the last one whole."""
    # What is wrong with the text is counted when the corpus is made of it.
    for text in readers.read(source, Counter(), lambda _: None):
        yield text
        chars -= len(text.text)
        if chars <= 0:
            break


def _sample(sources: list[readers.Source], kind: str, progress: bool) -> Iterator[Text]:
    chars = _SAMPLE_CHARS[kind]
    sizes = [source.size_bytes for source in sources]
    whole = chars if None in sizes else min(chars, sum(sizes))
    with progress_bar("vocabulary: sample", whole, " characters", progress) as bar:
        for source, share in zip(sources, sample_chars(sources, kind), strict=True):
            for text in sampled(source, share):
                yield text
                bar.update(len(text.text))


def counted(texts: Iterable[Text], kind: str, lower_case: bool) -> Counter[str] | list[str]:
    """What `vocabulary_of` needs of some texts: counts of words for WordPiece, else sentences."""
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


def vocabulary_of(
    counts: Iterable[Counter[str] | list[str]], kind: str, size: int, lower_case: bool, progress: bool = False
) -> bytes:
    """The file of a vocabulary for a sample of which `counted` gave these, in order.

    Raises:
      BertjaxError: the sample holds no text, or SentencePiece cannot make a vocabulary of it.
    """
    if kind == WORDPIECE:
        words: Counter[str] = Counter()
        for found in counts:
            words.update(found)
        if progress:
            logger.info(f"vocabulary: choosing {size:,} pieces for {len(words):,} words")
        return "".join(f"{piece}\n" for piece in wordpieces(words, size)).encode()
    sentences = list(itertools.chain.from_iterable(counts))
    if progress:
        logger.info(f"vocabulary: choosing {size:,} pieces for {len(sentences):,} sentences")
    return sentencepiece_model(sentences, size, lower_case)


def wordpieces(counts: Counter[str], size: int) -> list[str]:
    """The pieces of a WordPiece vocabulary for words with these counts, special pieces first.

    Raises:
      BertjaxError: there are no words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not counts:
        raise BertjaxError("the inputs hold no text to train a vocabulary on; check the --input specs")
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for char in word:
            characters[char] += count
    kept = sorted(characters, key=lambda char: (-characters[char], char))[: min(_MAX_ALPHABET, size // 4)]
    alphabet = set(kept)
    words = sorted(word for word in counts if alphabet.issuperset(word))
    # Given in order, since the trainer numbers the characters it meets in the order of a randomly seeded hash table,
    # and ties between merges fall by number.
    first = sorted({word[0] for word in words})
    inside = sorted({f"##{char}" for word in words for char in word[1:]})
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*SPECIAL_PIECES, *first, *inside],
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    repeated = itertools.chain.from_iterable(itertools.repeat(word, counts[word]) for word in words)
    tokenizer.train_from_iterator(_lines(repeated), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _lines(words: Iterator[str]) -> Iterator[str]:
    while line := " ".join(itertools.islice(words, _WORDS_A_LINE)):
        yield line


def sentencepiece_model(sentences: Iterable[str], size: int, lower_case: bool) -> bytes:
    """The bytes of a SentencePiece unigram model with BERT's special pieces, 0 to 4.

    Raises:
      BertjaxError: SentencePiece cannot make one of these sentences.
    """
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
            # The sums over the text, and with them the last pieces, depend on how it is divided among threads.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Without the advice to set an option of its own.
        reason = " ".join(str(error).split()).partition(" or decrease character_coverage")[0]
        raise BertjaxError(f"SentencePiece cannot train {size} pieces on this text: {reason}") from error
    return model.getvalue()
