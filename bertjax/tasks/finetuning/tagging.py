"""A tag for each word, at its first piece, without a CRF (section 5.3 of the paper); what NER and own tags share."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.data.finetuning.dev_split import share_of, subset_of_tagged, unit_texts, units
from bertjax.data.finetuning.examples import Examples, in_input_order
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.data.finetuning.tagged import OUTSIDE, Tagged, make_rows, of_words
from bertjax.data.schema import EXAMPLE, SEQUENCE, TOKEN_LABELS
from bertjax.metrics.entities import entity_scores, has_entities
from bertjax.metrics.report import ClassReport, of_classes, of_entities
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks.finetuning import common as finetuning
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.output_layer import TAGS, OutputLayer, saved_labels
from bertjax.tasks.finetuning.records import RECORDS, FileRecords, Record, of_sentence
from bertjax.tasks.finetuning.settings import SPLITS, FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.weighting import PLAIN, Weighting, weighting_of
from bertjax.tasks.objectives import classes as objectives
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs, Task
from bertjax.utils.io import write_atomic


def tags_of(tagged: Tagged) -> list[str]:
    """The tags there are, in the order of their ids: O first, which is always there where tags mark entities."""
    tags = {*tagged.tags, *([OUTSIDE] if has_entities(tagged.tags) else [])}
    return sorted(tags, key=lambda tag: (tag != OUTSIDE, tag))


def tagging_task(
    settings: FinetuningConfig,
    vocabulary: Vocabulary,
    readings: list[ReadStats],
    train: bool,
    *,
    read_training: Callable[[], Tagged],
    read_split: Callable[[str], Tagged],
    output: str,
    documents: bool,
    table: Callable[[Sequence[str]], Iterator[Row]] | None = None,
) -> Task:
    """The task of tagging words.

    Args:
      readings: gains one of each file that is read.
      train: False for evaluation alone.
      read_training, read_split: the words of the training file, and of "dev" or "test", with tags or without.
      output: what the output layer tells.
      documents: a row is as much of a document as fits, not a sentence.
      table: columns to the rows of the file that is evaluated, where it has columns.

    Raises:
      UsageError: a tag is none of the training file's, or of those the config names.
    """
    data, split = settings.data, splits.evaluated(settings.data, train)
    labels = saved_labels(data.labels)
    trained = tagged = None
    if train or labels is None or split == splits.SHARE:
        whole = read_training()
        # Of all of it, so that a share of the file has the same ones.
        labels = labels or tags_of(whole)
        trained, tagged = _divided(data, whole, readings, documents)
    training_file = readings[0].file if readings else ""
    if split in SPLITS:
        tagged = read_split(split)

    def rows(tagged: Tagged, file: str) -> tuple[Examples, np.ndarray, list[np.ndarray]]:
        return make_rows(tagged, labels, Tokenizer(vocabulary), data.seq_len, documents, file)

    examples, row_of_word, positions = rows(tagged, readings[-1].file) if tagged else (None, np.zeros(0), [])
    trained_rows = rows(trained, training_file)[0] if train else None
    entities = has_entities(labels)

    def score(predicted: list[str]) -> dict[str, float]:
        if not (entities and tagged.has_tags):
            return {}
        return entity_scores(*_scored(tagged, predicted))

    def baseline() -> dict[str, float]:
        if trained is None or not tagged.has_tags:
            return {}
        guesses = _most_frequent(trained, tagged)
        right = np.mean([guess == tag for guess, tag in zip(guesses, tagged.tags, strict=True) if tag])
        return {"word_accuracy": float(right), **score(guesses)}

    def per_class(predicted: list[str]) -> dict[str, ClassReport]:
        wanted, found = _scored(tagged, predicted)
        if entities:
            return {"": of_entities(wanted, found)}
        ids = [np.array([labels.index(tag) for sentence in tags for tag in sentence]) for tags in (found, wanted)]
        return {"": of_classes(labels, *ids)}

    tags = functools.partial(_tags, labels, row_of_word, positions)
    records = []
    if tagged:
        told = functools.partial(_records, tagged, labels, row_of_word, positions)
        records = [FileRecords(RECORDS, told, tagged.lines, table)]
    weights = weighting_of(settings, labels, trained_rows.tokens["token_labels"]) if trained_rows else PLAIN
    return finetuning.make_task(
        settings,
        # Each tag's logit is of use beside predictions alone, and would fill the memory in training.
        objective(finetuning.model_of(settings, vocabulary), len(labels), weights, with_logits=not train),
        vocabulary,
        trained_rows,
        examples,
        readings,
        layer=OutputLayer(TAGS, tuple(labels), output),
        score=lambda outputs: score(tags(outputs)),
        baseline=baseline,
        best_by="f1" if entities else "word_accuracy",
        write=lambda outputs, folder: _write(tagged, tags(outputs), folder),
        records=records,
        evaluated_on=readings[-1].file,
        is_labelled=tagged is None or tagged.has_tags,
        per_class=lambda outputs: per_class(tags(outputs)),
    )


def _divided(
    data: FinetuningData, whole: Tagged, readings: list[ReadStats], documents: bool
) -> tuple[Tagged, Tagged | None]:
    """The sentences to train on, and those that are cut off for dev: whole documents, where there are any."""
    trained, dev = whole, None
    if data.dev_share:
        ends = units(whole, documents=True)
        held = splits.dev_rows(data, unit_texts(whole, ends), readings)
        trained, dev = subset_of_tagged(whole, ends, ~held), subset_of_tagged(whole, ends, held)
    if data.train_share < 1:
        ends = units(trained, documents)
        chosen = np.zeros(len(ends), bool)
        chosen[share_of(len(ends), data.train_share)] = True
        trained = subset_of_tagged(trained, ends, chosen)
    readings[-1].used = len(trained.sentence_ends)
    if dev is not None:
        readings.append(splits.cut_off(data, readings[-1], len(dev.sentence_ends)))
    return trained, dev


def _scored(tagged: Tagged, predicted: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """The tags there are and those predicted, of the sentences that have any."""
    pairs = zip(tagged.sentences(tagged.tags), tagged.sentences(predicted), strict=True)
    wanted, found = zip(*(pair for pair in pairs if any(pair[0])), strict=True)
    return list(wanted), list(found)


def objective(model: ModelConfig, tags: int, weighting: Weighting = PLAIN, with_logits: bool = False) -> Objective:
    """Cross-entropy and accuracy over the words, each at its first piece; outputs are tags, or the logits of all."""
    return Objective(
        TokenModel(model, tags, head_dropout=True),
        ("cross_entropy", "word_accuracy"),
        ("cross_entropy",),
        objectives.ClassWeights(weighting, "token_labels"),
        _Tags(weighting, with_logits),
        (*SEQUENCE, TOKEN_LABELS, *EXAMPLE),
    )


@dataclasses.dataclass(frozen=True)
class _Tags:
    """Tags of words from a batch; a class, as an objective is compared by value."""

    weighting: Weighting
    with_logits: bool

    def __call__(
        self, model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[MetricSums, Outputs]:
        logits = objectives.apply(model, params, batch, dropout_key)  # [B, L, tags]
        weighting = PLAIN if dropout_key is None else self.weighting
        sums = objectives.class_sums(logits, batch["token_labels"], batch["weights"], weighting)
        cross_entropy, word_accuracy, predicted = sums
        outputs = {"logits": logits} if self.with_logits else {"tags": predicted}
        means = {"cross_entropy": cross_entropy, "word_accuracy": word_accuracy}
        return means, {"example": batch["example"], **outputs}


def _tags(
    labels: list[str], row_of_word: np.ndarray, positions: list[np.ndarray], outputs: list[dict[str, np.ndarray]]
) -> list[str]:
    """The predicted tag of each word, in the order of the file."""
    found = in_input_order(outputs, len(positions))
    if "tags" in found:
        return [labels[tag] for tag in of_words(row_of_word, positions, found["tags"])]
    return [labels[logits.argmax()] for logits in of_words(row_of_word, positions, found["logits"])]


def _records(
    tagged: Tagged,
    labels: list[str],
    row_of_word: np.ndarray,
    positions: list[np.ndarray],
    outputs: list[dict[str, np.ndarray]],
    with_logits: bool,
) -> Iterator[Record]:
    """A sentence each."""
    logits = of_words(row_of_word, positions, in_input_order(outputs, len(positions))["logits"])
    start = 0
    for end in tagged.sentence_ends:
        yield of_sentence(tagged.words[start:end], labels, logits[start:end], with_logits)
        start = end


def _most_frequent(trained: Tagged, tagged: Tagged) -> list[str]:
    """The most frequent tag of each word in training, and of all words for one not seen: CoNLL-2003's own baseline."""
    counts: dict[str, dict[str, int]] = {}
    for word, tag in zip(trained.words, trained.tags, strict=True):
        counts.setdefault(word, {}).setdefault(tag, 0)
        counts[word][tag] += 1
    best = {word: max(tags, key=lambda tag: (tags[tag], tag)) for word, tags in counts.items()}
    usual = Counter(trained.tags).most_common(1)[0][0]
    return [best.get(word, usual) for word in tagged.words]


def _write(tagged: Tagged, predicted: list[str], folder: Path) -> list[Path]:
    """What `conlleval` reads: word, tag where there are any, predicted tag a line; a blank line after a sentence."""
    columns = [tagged.words, *([[tag or "_" for tag in tagged.tags]] if tagged.has_tags else []), predicted]
    sentences = zip(*(tagged.sentences(values) for values in columns), strict=True)
    lines = ["".join(f"{' '.join(row)}\n" for row in zip(*sentence, strict=True)) for sentence in sentences]
    return [write_atomic(folder / "predictions.conll", "\n".join(lines))]
