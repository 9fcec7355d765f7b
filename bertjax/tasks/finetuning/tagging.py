"""Token tagging at the first piece of each word, without a CRF (section 5.3 of the paper)."""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.finetuning.batches import in_input_order
from bertjax.data.finetuning.cells import sort_labels
from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.tables import Row
from bertjax.data.finetuning.tagged import OUTSIDE, TaggedText, encode_tagged, gather_words
from bertjax.data.schema import TOKEN_LABELS
from bertjax.metrics.entities import entity_report, entity_scores, has_entities
from bertjax.metrics.metric import Metric, loss_metric
from bertjax.metrics.report import ClassReport, class_report
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.tasks.finetuning.output_layer import TAGS, OutputLayer, saved_labels
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.classification import Classification
from bertjax.tasks.records import RECORDS_FILE, PredictionRecords, Record, tags_record
from bertjax.tasks.task import Batch, MetricSums, Outputs
from bertjax.utils.io import write_atomic


@dataclasses.dataclass(frozen=True)
class TagObjective(Classification):
    """Objective that predicts the tag of each word at its first piece. Batches have `token_labels`, not `labels`.

    Attributes:
      outputs_logits: whether evaluation outputs contain the logits of all tags instead of the predicted tags.
    """

    metrics = (loss_metric("cross_entropy"), Metric("word_accuracy"))
    label_spec = TOKEN_LABELS
    outputs_logits: bool = False

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        sums, outputs = super().compute(params, batch, dropout_key)
        if self.outputs_logits:
            return sums, outputs
        return sums, {"example": batch["example"], "tags": jnp.argmax(outputs["logits"], axis=-1)}


class TaggingTask(FinetuningTask):
    """Base class of token tagging tasks. Subclasses define `read_words` and `output_name`.

    Attributes:
      output_name: task name stored with the output layer, such as `ner`.
      read_columns: function that reads named columns of the evaluated file (default: None, it has no columns).
    """

    output_name: str
    read_columns: Callable[[Sequence[str]], Iterator[Row]] | None = None

    @property
    def by_document(self) -> bool:
        """True if rows contain as many sentences of a document as fit (default: False, one sentence per row)."""
        return False

    def read_words(self, split: str) -> TaggedText:
        """Reads the words of "train", "dev" or "test", and their tags if known. Appends row counts to `read_stats`."""
        raise NotImplementedError

    def make_objective(self, model: ModelConfig) -> TagObjective:
        # Only `predict` needs the logits of all tags. Collecting them in evaluations of a run would take much memory.
        predicts = self.config.has_data and self.train_examples is None
        module = TokenModel(model, len(self.labels), head_dropout=True)
        return TagObjective(module, self.class_weighting(), outputs_logits=predicts)

    def output_layer(self) -> OutputLayer:
        return OutputLayer(TAGS, tuple(self.labels), self.output_name)

    def load(self, train: bool) -> None:
        data = self.config.data
        labels = saved_labels(data.labels, TAGS)
        self._train_words: TaggedText | None = None
        words: TaggedText | None = None
        if train or labels is None or self.split == splits.HELD_OUT:
            all_words = self.read_words("train")
            # Use the tags of the entire file, so that the label set does not depend on `train_share` and `dev_share`.
            labels = labels or _sorted_tags(all_words, self.read_stats[-1].file)
            self._train_words, words = splits.divide_tagged(data, all_words, self.by_document, self.read_stats)
        self.labels = labels
        train_file = self.read_stats[0].file if self.read_stats else ""
        if self.split in SPLITS:
            words = self.read_words(self.split)
        if words is not None:
            self._words = words
            rows = self._encode(words, self.read_stats[-1].file)
            self.eval_examples, self._example_of_word, self._positions = rows
        if train and self._train_words:
            self.train_examples = self._encode(self._train_words, train_file)[0]
        self.default_metric = "f1" if has_entities(labels) else "word_accuracy"

    def is_labeled(self) -> bool:
        return self._words.has_tags

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return self._entity_scores(self._predicted_tags(outputs))

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of predicting each word's most frequent training tag."""
        if self._train_words is None or not self._words.has_tags:
            return {}
        predicted = _most_frequent_tags(self._train_words, self._words)
        correct = [guess == tag for guess, tag in zip(predicted, self._words.tags, strict=True) if tag]
        return {"word_accuracy": float(np.mean(correct)), **self._entity_scores(predicted)}

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        gold, predicted = self._labeled_sentences(self._predicted_tags(outputs))
        if has_entities(self.labels):
            return {"": entity_report(gold, predicted)}
        ids = ([self.labels.index(tag) for sentence in tags for tag in sentence] for tags in (predicted, gold))
        return {"": class_report(self.labels, *map(np.array, ids))}

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the format of `conlleval`.

        A line contains a word, the gold tag if known, and the predicted tag. A blank line ends a sentence.
        """
        words = self._words
        gold = [[tag or "_" for tag in words.tags]] if words.has_tags else []
        columns = [words.words, *gold, self._predicted_tags(outputs)]
        sentences = zip(*(words.sentences(values) for values in columns), strict=True)
        lines = ["".join(f"{' '.join(row)}\n" for row in zip(*sentence, strict=True)) for sentence in sentences]
        return [write_atomic(folder / "predictions.conll", "\n".join(lines))]

    def prediction_records(self) -> list[PredictionRecords]:
        def make(outputs: list[dict[str, np.ndarray]], include_logits: bool) -> Iterator[Record]:
            row_logits = in_input_order(outputs, len(self.evaluated_examples))["logits"]
            logits = gather_words(self._example_of_word, self._positions, row_logits)
            words = self._words
            for sentence, rows in zip(words.sentences(words.words), words.sentences(logits), strict=True):
                yield tags_record(sentence, self.labels, rows, include_logits)

        return [PredictionRecords(RECORDS_FILE, make, self._words.lines, self.read_columns)]

    def _encode(self, words: TaggedText, file: str) -> tuple[Examples, np.ndarray, np.ndarray]:
        return encode_tagged(words, self.labels, self.tokenizer, self.config.data.seq_len, self.by_document, file)

    def _predicted_tags(self, outputs: list[dict[str, np.ndarray]]) -> list[str]:
        """Returns the predicted tag of each word, in the order of the file."""
        arrays = in_input_order(outputs, len(self.evaluated_examples))
        values = gather_words(self._example_of_word, self._positions, arrays["tags" if "tags" in arrays else "logits"])
        return [self.labels[tag] for tag in (values.argmax(axis=-1) if values.ndim > 1 else values)]

    def _labeled_sentences(self, predicted: list[str]) -> tuple[list[list[str]], list[list[str]]]:
        """Returns the gold tags and the predicted tags of each sentence that has gold tags."""
        words = self._words
        pairs = zip(words.sentences(words.tags), words.sentences(predicted), strict=True)
        gold, predicted_sentences = zip(*(pair for pair in pairs if any(pair[0])), strict=True)
        return list(gold), list(predicted_sentences)

    def _entity_scores(self, predicted: list[str]) -> dict[str, float]:
        if not (has_entities(self.labels) and self._words.has_tags):
            return {}
        return entity_scores(*self._labeled_sentences(predicted))


def _sorted_tags(words: TaggedText, file: str) -> list[str]:
    """Returns the distinct tags of a file, sorted, with O first. Adds O if the tags mark entities."""

    def place_of(tag: str) -> str:
        return f"{file} line {words.lines[bisect.bisect(words.sentence_ends, words.tags.index(tag))]}"

    tags = {*words.tags, *([OUTSIDE] if has_entities(words.tags, place_of) else [])}
    return sorted(sort_labels(tags), key=lambda tag: tag != OUTSIDE)


def _most_frequent_tags(train: TaggedText, words: TaggedText) -> list[str]:
    """Predicts each word's most frequent training tag. For unseen words, predicts the most frequent tag overall."""
    counts: dict[str, Counter[str]] = {}
    for word, tag in zip(train.words, train.tags, strict=True):
        counts.setdefault(word, Counter())[tag] += 1
    best = {word: max(tags, key=lambda tag: (tags[tag], tag)) for word, tags in counts.items()}
    default = Counter(train.tags).most_common(1)[0][0]
    return [best.get(word, default) for word in words.words]
