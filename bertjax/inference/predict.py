"""What a fine-tuned model says of texts: a class, a number, one of several endings, tags, or an answer in a passage."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.questions import Question, make_windows
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import Tagged, make_rows, of_words
from bertjax.errors import UsageError
from bertjax.inference.batches import batches
from bertjax.inference.texts import PAIR
from bertjax.inference.trained_model import TrainedModel
from bertjax.tasks.finetuning import records
from bertjax.tasks.finetuning import spans as squad_answers
from bertjax.tasks.finetuning.output_layer import CHOICES, MULTILABEL, SPANS, TAGS
from bertjax.tasks.finetuning.records import Record

# Texts in memory at a time.
_TEXTS = 256
_SHOWN_CLASSES = 5


def check_model(trained: TrainedModel, context: str | None) -> None:
    """Refuses a model that cannot answer.

    Raises:
      UsageError: it has no output layer, or a passage is missing or of no use.
    """
    if trained.layer is None:
        raise UsageError(
            f"{trained.path} is pre-trained alone and has no output layer to predict with; `bertjax train --init_from` "
            "fine-tunes it, and `bertjax fill_mask` asks a masked language model for words"
        )
    kind = trained.layer.kind
    if kind == SPANS and not context:
        raise UsageError(f"{trained.path} answers questions on a passage; give it with --context or --context_file")
    if kind != SPANS and context:
        raise UsageError(f"--context is for a checkpoint that answers questions; {trained.path} tells {kind}")


def answers(
    trained: TrainedModel, texts: Iterable[str], *, context: str = "", seq_len: int | None = None, logits: bool = False
) -> Iterator[Record]:
    """A record of `tasks/finetuning/records.py` for each text, in order; few texts are in memory at a time.

    Args:
      trained: the model.
      texts: for a model of classes or numbers a sentence, or a pair with ` ||| ` between; of endings the beginning and
        each ending likewise; of tags words with blanks between; else questions on the context.
      context: the passage that has the answers.
      seq_len: tokens a row at most; None is what the model was trained on, or else takes.
      logits: whether records have them as well.

    Raises:
      UsageError: a text is not what the model takes.
    """
    check_model(trained, context)
    most = trained.config.max_position_embeddings
    seq_len = min(trained.habits.seq_len or most, most) if seq_len is None else seq_len
    if not 8 <= seq_len <= most:
        raise UsageError(f"--seq_len is {seq_len}; it must be between 8 and the model's {most}")
    asked = _Asked(trained, seq_len, _runner(trained, seq_len), logits)
    of_texts: dict[str, Callable[[Sequence[str]], list[Record]]] = {
        CHOICES: asked.choices,
        TAGS: asked.tags,
        SPANS: lambda questions: asked.spans(questions, context),
    }
    remaining = iter(texts)
    while some := list(itertools.islice(remaining, _TEXTS)):
        yield from of_texts.get(trained.layer.kind, asked.rows)(some)


def _runner(trained: TrainedModel, seq_len: int) -> Callable[[Examples], list[np.ndarray]]:
    """Examples to the logits of each: float32 [outputs], of a model of tokens [length, outputs]."""
    of_tokens = trained.layer.kind in (TAGS, SPANS)

    def run(examples: Examples) -> list[np.ndarray]:
        found: list[Any] = [None] * len(examples)
        lengths = examples.lengths
        for batch in batches(examples, seq_len):
            for example, logits in zip(batch["example"], trained.outputs(batch), strict=True):
                if example >= 0:
                    found[example] = logits[: lengths[example]] if of_tokens else logits
        return found

    return run


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A model and how to ask it; each method makes of some texts as many records."""

    trained: TrainedModel
    seq_len: int
    run: Callable[[Examples], list[np.ndarray]]
    logits: bool

    def rows(self, texts: Sequence[str]) -> list[Record]:
        """A class, labels or a number for each sentence or pair."""
        labels = self.trained.layer.labels
        found = self.run(make_examples([self._encoded(self._parts(text)) for text in texts], {}))
        if not labels:
            return [records.number_record(values[0]) for values in found]
        if self.trained.layer.kind == MULTILABEL:
            return [
                records.multilabel_record(labels, values, self.trained.habits.threshold, self.logits)
                for values in found
            ]
        return [records.class_record(labels, values, self.logits) for values in found]

    def choices(self, texts: Sequence[str]) -> list[Record]:
        """One of the endings of each text."""
        parts = [text.split(PAIR) for text in texts]
        for text, (_, *endings) in zip(texts, parts, strict=True):
            if len(endings) < 2:
                raise UsageError(
                    f"{text[:60]!r} has {len(endings)} endings; the model chooses among several: BEGINNING{PAIR}ENDING"
                    f"{PAIR}ENDING"
                )
        sequences = [self._encoded((first, ending)) for first, *endings in parts for ending in endings]
        scores = iter(self.run(make_examples(sequences, {})))
        return [
            records.choice_record(np.array([next(scores)[0] for _ in endings]), self.logits) for _, *endings in parts
        ]

    def tags(self, texts: Sequence[str]) -> list[Record]:
        """A tag for each word of each text."""
        sentences = [text.split() for text in texts]
        words = list(itertools.chain.from_iterable(sentences))
        ends = np.cumsum([len(sentence) for sentence in sentences]).tolist()
        labels = list(self.trained.layer.labels)
        tagged = Tagged(words, [""] * len(words), ends, ends)
        examples, row_of_word, positions = make_rows(
            tagged, labels, self.trained.tokenizer, self.seq_len, False, "the text"
        )
        inputs = {name: examples.tokens[name] for name in ("input_ids", "segment_ids")}
        logits = self.run(dataclasses.replace(examples, tokens=inputs))
        by_word = of_words(row_of_word, positions, logits)
        return [
            records.tags_record(sentence, labels, by_word[end - len(sentence) : end], self.logits)
            for sentence, end in zip(sentences, ends, strict=True)
        ]

    def spans(self, texts: Sequence[str], context: str) -> list[Record]:
        """An answer in the context to each question."""
        questions = [Question(str(index), text, context, (), -1) for index, text in enumerate(texts)]
        windows = make_windows(
            questions,
            self.trained.tokenizer,
            ReadStats("the questions"),
            seq_len=self.seq_len,
            doc_stride=min(self.trained.habits.doc_stride, self.seq_len),
            max_query_len=min(self.trained.habits.max_query_len, self.seq_len // 2),
        )
        logits = self.run(dataclasses.replace(windows.examples, rows={}))
        outputs = {
            "example": np.arange(len(logits)),
            "start": [row[:, 0] for row in logits],
            "end": [row[:, 1] for row in logits],
        }
        found = squad_answers.best_answers(self.trained.habits, questions, windows, [outputs])
        return [
            squad_answers.answer_record(answer, self.trained.habits.null_threshold, self.logits) for answer in found
        ]

    def _parts(self, text: str) -> Sequence[str]:
        parts = text.split(PAIR, 1)
        if self.trained.habits.texts == 2 and len(parts) < 2:
            raise UsageError(f"{text[:60]!r} is one text, the model takes pairs: FIRST{PAIR}SECOND")
        if len(parts) > 1 and (self.trained.habits.texts == 1 or self.trained.config.type_vocab_size < 2):
            raise UsageError(f"{text[:60]!r} is a pair, the model takes one text; leave{PAIR}out")
        return parts

    def _encoded(self, parts: Sequence[str]) -> dict[str, list[int]]:
        vocabulary = self.trained.vocabulary
        first, *second = (self.trained.tokenizer.encode(part) for part in parts)
        pair = second[0] if second else None
        return encode_pair(first, pair, self.seq_len, vocabulary.cls_id, vocabulary.sep_id)


def described(text: str, record: Record) -> str:
    """A text and what the model says of it, for a person."""
    return "\n".join([text, *(f"  {line}" for line in _lines(record))])


def _lines(record: Record) -> list[str]:
    prediction, probabilities = record["prediction"], record.get("probabilities")
    if "words" in record:
        rows = zip(record["words"], prediction, probabilities, strict=True)
        width = max(map(len, record["words"]), default=0)
        return [f"{word:<{width}} {tag} {_percent(told[tag])}" for word, tag, told in rows]
    if "probability" in record:
        return [f"{prediction or '(no answer)'} {_percent(record['probability'])}"]
    if probabilities is None:
        return [f"{prediction:g}"]
    named = probabilities.items() if isinstance(probabilities, dict) else enumerate(probabilities)
    best = sorted(named, key=lambda pair: -pair[1])[:_SHOWN_CLASSES]
    return ["   ".join(f"{name} {_percent(probability)}" for name, probability in best)]


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"
