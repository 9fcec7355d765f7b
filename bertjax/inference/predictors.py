"""Predictions of fine-tuned models for texts, one function per kind of output layer."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.batches import in_input_order, inference_batches
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText, encode_tagged, gather_words
from bertjax.data.finetuning.windows import make_windows
from bertjax.errors import UsageError, quoted
from bertjax.inference.inputs import PAIR_SEPARATOR, Texts, TruncationCount, encode_row
from bertjax.inference.loaded_model import LoadedModel
from bertjax.metrics.entities import follows_scheme
from bertjax.tasks import records
from bertjax.tasks.finetuning import spans as squad_spans
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.tasks.records import Record


@dataclasses.dataclass(frozen=True)
class TextPredictor:
    """Fine-tuned model with prediction options.

    Attributes:
      model: fine-tuned model.
      labels: names of the outputs.
      seq_len: maximum tokens per row.
      context: passage that contains the answers, for spans.
      with_logits: whether records include logits.
      truncation: counts of encoded and of truncated texts, updated in place.
    """

    model: LoadedModel
    labels: tuple[str, ...]
    seq_len: int
    context: str
    with_logits: bool
    truncation: TruncationCount

    def logits(self, examples: Examples) -> list[np.ndarray]:
        """Returns each example's logits: float32 [outputs], or [length, outputs] if the model classifies tokens."""
        batches = inference_batches(examples, self.seq_len)
        outputs = [{"example": batch["example"], "logits": self.model.apply(batch)} for batch in batches]
        rows = in_input_order(outputs, len(examples)).get("logits", [])
        return [row[:length] if row.ndim > 1 else row for row, length in zip(rows, examples.lengths, strict=True)]

    def encode(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Encodes one text or a pair as a row with [CLS] and [SEP]."""
        ids = [self.model.tokenizer.encode_with_special(text) for text in texts]
        return encode_row(ids, self.model.vocabulary, self.truncation)

    def sequence_logits(self, inputs: Sequence[Texts]) -> list[np.ndarray]:
        """Returns the logits [outputs] of each text or pair."""
        for texts in inputs:
            expected = self.model.defaults.texts or len(texts)
            if len(texts) < expected:
                form = f"FIRST{PAIR_SEPARATOR}SECOND"
                raise UsageError(f"{quoted(texts)} is a single text; use a pair (on the command line, {form})")
            if len(texts) > min(expected, 2):
                raise UsageError(f"{quoted(texts)} is a pair, but the model takes single texts; use one text")
        return self.logits(make_examples([self.encode(texts) for texts in inputs], {}))


def predict_classes(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts one class for each text or pair. A regression model predicts a number."""
    logits = predictor.sequence_logits(inputs)
    if not predictor.labels:
        return [records.number_record(row[0]) for row in logits]
    return [records.class_record(predictor.labels, row, predictor.with_logits) for row in logits]


def predict_labels(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts any number of labels for each text or pair."""
    threshold = predictor.model.defaults.threshold
    logits = predictor.sequence_logits(inputs)
    return [records.multilabel_record(predictor.labels, row, threshold, predictor.with_logits) for row in logits]


def predict_choices(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts the most plausible ending of each context."""
    if wrong := [texts for texts in inputs if len(texts) < 3]:
        form = PAIR_SEPARATOR.join(("CONTEXT", "ENDING", "ENDING"))
        raise UsageError(f"too few endings: {quoted(wrong[0])}; use at least two (on the command line, {form})")
    sequences = [predictor.encode((context, ending)) for context, *endings in inputs for ending in endings]
    scores = iter(predictor.logits(make_examples(sequences, {})))
    return [
        records.choice_record(np.array([next(scores)[0] for _ in endings]), predictor.with_logits)
        for _, *endings in inputs
    ]


def predict_tags(predictor: TextPredictor, inputs: Sequence[str | Texts]) -> list[Record]:
    """Predicts a tag for each word of each text. An input is a text, or a tuple of words to join with spaces."""
    split = predictor.model.tokenizer.word_spans
    texts = [text if isinstance(text, str) else " ".join(text) for text in inputs]
    spans = [split(text) if isinstance(text, str) else _joined_spans(text) for text in inputs]
    sentences = [[text[start:end] for start, end in text_spans] for text, text_spans in zip(texts, spans, strict=True)]
    tagged = TaggedText(sentences, [[""] * len(words) for words in sentences], range(len(sentences)))
    labels, tokenizer = list(predictor.labels), predictor.model.tokenizer
    examples, places = encode_tagged(tagged, labels, tokenizer, predictor.seq_len, False, "the text")
    tokens = {name: examples.tokens[name] for name in ("input_ids", "segment_ids")}
    logits = gather_words(places, predictor.logits(dataclasses.replace(examples, tokens=tokens)))
    tag_records = []
    for text, text_spans, words, rows in zip(texts, spans, sentences, logits, strict=True):
        record = records.tags_record(words, labels, rows, predictor.with_logits)
        record["spans"] = [list(span) for span in text_spans]
        if follows_scheme(labels):
            record["entities"] = records.entity_records(text, text_spans, record["prediction"])
        tag_records.append(record)
    return tag_records


def _joined_spans(words: Texts) -> list[tuple[int, int]]:
    """Returns the start and end of each word, in characters, after joining the words with spaces."""
    ends = list(itertools.accumulate(len(word) + 1 for word in words))
    return [(end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True)]


def predict_spans(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts the answer to each question, a span of the context."""
    defaults, seq_len = predictor.model.defaults, predictor.seq_len
    questions = [Question(str(index), text, predictor.context, (), -1) for index, (text,) in enumerate(inputs)]
    examples, windows = make_windows(
        questions,
        predictor.model.tokenizer,
        ReadStats("the questions"),
        seq_len=seq_len,
        doc_stride=min(defaults.doc_stride, seq_len),
        max_query_len=min(defaults.max_query_len, seq_len // 2),
    )
    logits = predictor.logits(dataclasses.replace(examples, rows={}))
    outputs: dict[str, Any] = {
        "example": np.arange(len(logits)),
        "start": [row[:, 0] for row in logits],
        "end": [row[:, 1] for row in logits],
    }
    answers = squad_spans.best_answers(questions, windows, [outputs], defaults.n_best, defaults.max_answer_len)
    threshold = defaults.null_threshold
    return [squad_spans.answer_record(answer, threshold, predictor.with_logits) for answer in answers.values()]


# Functions that predict one record per input, by the kind of output layer.
PREDICTORS: dict[str, Callable[[TextPredictor, Sequence[Any]], list[Record]]] = {
    CLASSES: predict_classes,
    MULTILABEL: predict_labels,
    CHOICES: predict_choices,
    TAGS: predict_tags,
    SPANS: predict_spans,
}
