"""Token tagging at the first piece of each word, without a CRF (section 5.3 of the paper)."""

import dataclasses
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.batches import in_input_order
from bertjax.data.finetuning.cells import is_integer, sort_labels
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.tagged import OUTSIDE, TaggedText, encode_tagged, gather_words
from bertjax.data.schema import TOKEN_LABELS
from bertjax.errors import quoted
from bertjax.metrics.entities import entity_report, entity_scores, has_entities
from bertjax.metrics.metric import Metric, loss_metric
from bertjax.metrics.report import ClassReport, class_report
from bertjax.model.config import ModelConfig
from bertjax.model.models import TokenModel
from bertjax.tasks.finetuning.output_layer import TAGS, OutputLayer, saved_labels
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.classification import LabelObjective
from bertjax.tasks.records import RECORDS_FILE, PredictionRecords, Record, tags_record
from bertjax.tasks.task import Batch, MetricSums, Outputs
from bertjax.utils.io import write_atomic

logger = logging.getLogger(__name__)

# Tag that looks like an entity tag, but is not one, such as b-x, B_X or X-B.
_OTHER_SCHEME = re.compile("[BIbi][-_].|.+[-_][BIbi]$")


@dataclasses.dataclass(frozen=True)
class TagObjective(LabelObjective):
    """Objective that predicts the tag of each word at its first piece. Batches have `token_labels`, not `labels`."""

    accuracy = "word_accuracy"
    metrics = (loss_metric("cross_entropy"), Metric(accuracy))
    label_spec = TOKEN_LABELS
    # Whether evaluation outputs contain the logits of all tags instead of the predicted tags.
    outputs_logits: bool = False

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        sums, outputs = super().compute(params, batch, dropout_key)
        if self.outputs_logits:
            return sums, outputs
        return sums, {"example": batch["example"], "tags": jnp.argmax(outputs["logits"], axis=-1)}


class TaggingTask(FinetuningTask):
    """Base class of token tagging tasks. Subclasses define `read_words` and `output_name`."""

    output_name: str  # task name stored with the output layer, such as `ner`
    # Function that reads named columns of the evaluated file (default: None, it has no columns).
    read_columns: Callable[[Sequence[str]], Iterator[Row]] | None = None

    def read_words(self, split: str) -> TaggedText:
        """Reads the words of "train", "dev" or "test", and their tags if known. Appends row counts to `read_stats`."""
        raise NotImplementedError

    def make_objective(self, model: ModelConfig) -> TagObjective:
        # Output the logits of all tags only for `predict`, because an evaluation would need a lot of memory for them.
        predicts = self.config.has_data and self.train_examples is None
        module = TokenModel(model, len(self.labels), head_dropout=True)
        return TagObjective(module, self.class_weighting(), outputs_logits=predicts)

    def output_layer(self) -> OutputLayer:
        return OutputLayer(TAGS, tuple(self.labels), self.output_name)

    def load(self, train: bool) -> None:
        self._train_words: TaggedText | None = None
        self.labels = saved_labels(self.config.data.labels, TAGS) or ()
        if prefix := self.tokenizer.missing_prefix:
            # Add a space before words, because F1 on CoNLL-2003 is lower without it (AnswerDotAI/ModernBERT#149).
            logger.info(
                "adding a space before each word, unlike the original tokenizer; exported tokenizers also add it"
            )
            self.vocabulary = dataclasses.replace(self.vocabulary, prefix=prefix)
            self.tokenizer = Tokenizer(self.vocabulary)
        super().load(train or not self.labels)
        self.default_metric = "f1" if has_entities(self.labels) else "word_accuracy"

    def read_source(self, split: str) -> TaggedText:
        words = self.read_words(split)
        # Use the tags of the entire file, so that the label set does not depend on `train_share` and `dev_share`.
        self.labels = self.labels or _sorted_tags(words, self.read_stats[-1].file)
        return words

    def encode(self, source: TaggedText, stats: ReadStats, training: bool) -> Examples:
        seq_len = self.config.data.seq_len
        examples, places = encode_tagged(source, self.labels, self.tokenizer, seq_len, self.by_document, stats.file)
        if training:
            self._train_words = source
        else:
            self._words, self._places = source, places
        return examples

    def is_labeled(self) -> bool:
        return self._words.has_tags

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return self._entity_scores(self._predicted_tags(outputs))

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of predicting each word's most frequent training tag."""
        if self._train_words is None or not self._words.has_tags:
            return {}
        predicted = _most_frequent_tags(self._train_words, self._words)
        pairs = zip(itertools.chain(*predicted), itertools.chain(*self._words.tags), strict=True)
        accuracy = float(np.mean([guess == tag for guess, tag in pairs if tag]))
        return {"word_accuracy": accuracy, **self._entity_scores(predicted)}

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        gold, predicted = self._labeled_sentences(self._predicted_tags(outputs))
        if has_entities(self.labels):
            return {"": entity_report(gold, predicted)}
        ids = ([self.labels.index(tag) for tag in itertools.chain(*tags)] for tags in (predicted, gold))
        return {"": class_report(self.labels, *map(np.array, ids))}

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the format of `conlleval`.

        A line contains a word, the gold tag if known, and the predicted tag. A blank line ends a sentence.
        """
        words = self._words
        gold = [[[tag or "_" for tag in tags] for tags in words.tags]] if words.has_tags else []
        sentences = zip(words.sentences, *gold, self._predicted_tags(outputs), strict=True)
        lines = ["".join(f"{' '.join(row)}\n" for row in zip(*sentence, strict=True)) for sentence in sentences]
        return [write_atomic(folder / "predictions.conll", "\n".join(lines))]

    def prediction_records(self) -> list[PredictionRecords]:
        def make(outputs: list[dict[str, np.ndarray]]) -> Iterator[Record]:
            for words, rows in zip(self._words.sentences, self._gather(outputs, "logits"), strict=True):
                yield tags_record(words, self.labels, rows)

        return [PredictionRecords(RECORDS_FILE, make, self._words.lines, self.read_columns)]

    def _gather(self, outputs: list[dict[str, np.ndarray]], name: str) -> list[list[np.ndarray]]:
        """Returns the evaluation output `name`, such as `logits`, of each word in each sentence."""
        return gather_words(self._places, in_input_order(outputs, len(self.evaluated_examples))[name])

    def _predicted_tags(self, outputs: list[dict[str, np.ndarray]]) -> list[list[str]]:
        if "tags" in outputs[0]:
            return [[self.labels[int(tag)] for tag in sentence] for sentence in self._gather(outputs, "tags")]
        return [[self.labels[int(row.argmax())] for row in sentence] for sentence in self._gather(outputs, "logits")]

    def _labeled_sentences(self, predicted: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        """Returns the gold tags and the predicted tags of each sentence that has gold tags."""
        pairs = [pair for pair in zip(self._words.tags, predicted, strict=True) if any(pair[0])]
        return [gold for gold, _ in pairs], [tags for _, tags in pairs]

    def _entity_scores(self, predicted: list[list[str]]) -> dict[str, float]:
        if not (has_entities(self.labels) and self._words.has_tags):
            return {}
        return entity_scores(*self._labeled_sentences(predicted))


def _sorted_tags(words: TaggedText, file: str) -> list[str]:
    """Returns the distinct tags of a file, sorted, with O first. Adds O if the tags mark entities."""

    def place_of(tag: str) -> str:
        return f"{file} line {next(line for line, tags in zip(words.lines, words.tags, strict=True) if tag in tags)}"

    tags = {*itertools.chain(*words.tags)}
    if has_entities(tags, place_of):
        tags.add(OUTSIDE)
    elif unclear := sorted(tags if all(map(is_integer, tags)) else filter(_OTHER_SCHEME.match, tags)):
        logger.warning(
            f"entities of {file} are not scored, because its tags are numbers or of an unknown scheme, such as "
            f"{quoted(unclear[0])}; if the tags mark entities, write O, B-TYPE and I-TYPE"
        )
    return sorted(sort_labels(tags), key=lambda tag: tag != OUTSIDE)


def _most_frequent_tags(train: TaggedText, words: TaggedText) -> list[list[str]]:
    """Predicts each word's most frequent training tag. For unseen words, predicts the most frequent tag overall."""
    counts: dict[str, Counter[str]] = {}
    for word, tag in zip(itertools.chain(*train.sentences), itertools.chain(*train.tags), strict=True):
        counts.setdefault(word, Counter())[tag] += 1
    best = {word: max(tags, key=lambda tag: (tags[tag], tag)) for word, tags in counts.items()}
    default = Counter(itertools.chain(*train.tags)).most_common(1)[0][0]
    return [[best.get(word, default) for word in sentence] for sentence in words.sentences]
