"""A tag for each word, at its first piece, without a CRF (section 5.3 of the paper); what NER and own tags share."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.data.examples import Examples, in_input_order
from bertjax.data.tables import Reading, Row
from bertjax.data.tagged import OUTSIDE, Tagged, make_rows, of_words
from bertjax.files import write_whole
from bertjax.metrics.entities import entity_scores, has_entities
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks import finetuning, objectives
from bertjax.tasks.records import RECORDS, FileRecords, Record, of_sentence
from bertjax.tasks.task import Batch, Objective, Outputs, Sums, Task


def tags_of(tagged: Tagged) -> list[str]:
    """The tags there are, in the order of their ids: O first, which is always there where tags mark entities."""
    tags = {*tagged.tags, *([OUTSIDE] if has_entities(tagged.tags) else [])}
    return sorted(tags, key=lambda tag: (tag != OUTSIDE, tag))


def tagging_task(
    config: ConfigDict,
    vocabulary: Vocabulary,
    labels: list[str],
    trained: Tagged | None,
    tagged: Tagged,
    readings: list[Reading],
    *,
    output: str,
    documents: bool,
    table: Callable[[Sequence[str]], Iterator[Row]] | None = None,
) -> Task:
    """The task of tagging words.

    Args:
      labels: of all tags, the index is the id.
      trained: None for evaluation alone.
      tagged: evaluated; with tags or without.
      readings: of the files, the first that of `trained`, the last that of `tagged`.
      output: see `finetuning.make_task`.
      documents: a row is as much of a document as fits, not a sentence.
      table: columns to the rows of the evaluated file, where it has columns.

    Raises:
      UsageError: a tag is none of `labels`.
    """

    def rows(tagged: Tagged, reading: Reading) -> tuple[Examples, np.ndarray, list[np.ndarray]]:
        return make_rows(tagged, labels, Tokenizer(vocabulary), config.data.seq_len, documents, reading.file)

    examples, row_of_word, positions = rows(tagged, readings[-1])
    entities = has_entities(labels)

    def score(predicted: list[str]) -> dict[str, float]:
        if not (entities and tagged.has_tags):
            return {}
        return entity_scores(tagged.sentences(tagged.tags), tagged.sentences(predicted))

    def baseline() -> dict[str, float]:
        if trained is None or not tagged.has_tags:
            return {}
        guesses = _most_frequent(trained, tagged)
        right = np.mean([guess == tag for guess, tag in zip(guesses, tagged.tags, strict=True)])
        return {"word_accuracy": float(right), **score(guesses)}

    tags = functools.partial(_tags, labels, row_of_word, positions)
    return finetuning.make_task(
        config,
        # Each tag's logit is of use beside predictions alone, and would fill the memory in training.
        objective(finetuning.model_of(config, vocabulary), len(labels), with_logits=trained is None),
        vocabulary,
        rows(trained, readings[0])[0] if trained else None,
        examples,
        readings,
        output=output,
        labels=labels,
        score=lambda outputs: score(tags(outputs)),
        baseline=baseline,
        best_by="f1" if entities else "word_accuracy",
        write=lambda outputs, folder: _write(tagged, tags(outputs), folder),
        records=[
            FileRecords(
                RECORDS, functools.partial(_records, tagged, labels, row_of_word, positions), tagged.lines, table
            )
        ],
    )


def objective(model: ModelConfig, tags: int, with_logits: bool = False) -> Objective:
    """Cross-entropy and accuracy over the words, each at its first piece; outputs are tags, perhaps with logits."""
    return Objective(
        TokenModel(model, tags, head_dropout=True),
        ("cross_entropy", "word_accuracy"),
        ("cross_entropy",),
        _denominators,
        _compute_with_logits if with_logits else _compute,
        objectives.abstract_row,
    )


def _known(batch: Batch) -> jax.Array:
    return (batch["token_labels"] >= 0) * batch["weights"][:, None]


def _denominators(batch: Batch) -> dict[str, jax.Array]:
    return {"cross_entropy": jnp.maximum(jnp.sum(_known(batch)), 1.0)}


def _compute(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    sums, outputs = _compute_with_logits(model, params, batch, dropout_key)
    return sums, {name: outputs[name] for name in ("example", "tags")}


def _compute_with_logits(
    model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None
) -> tuple[Sums, Outputs]:
    logits, weights = objectives.apply(model, params, batch, dropout_key), _known(batch)  # [B, L, tags], [B, L]
    labels = jnp.maximum(batch["token_labels"], 0)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    predicted = jnp.argmax(logits, axis=-1)
    weight = jnp.sum(weights)
    sums = {
        "cross_entropy": jnp.stack([jnp.sum(losses * weights), weight]),
        "word_accuracy": jnp.stack([jnp.sum((predicted == labels) * weights), weight]),
    }
    return sums, {"example": batch["example"], "tags": predicted, "logits": logits}


def _tags(
    labels: list[str], row_of_word: np.ndarray, positions: list[np.ndarray], outputs: list[dict[str, np.ndarray]]
) -> list[str]:
    """The predicted tag of each word, in the order of the file."""
    predicted = in_input_order(outputs, len(positions))["tags"]
    return [labels[tag] for tag in of_words(row_of_word, positions, predicted)]


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
    """What `conlleval` reads: word, tag where there is one, and predicted tag a line; a blank line after a sentence."""
    columns = [tagged.words, *([tagged.tags] if tagged.has_tags else []), predicted]
    sentences = zip(*(tagged.sentences(values) for values in columns), strict=True)
    lines = ["".join(f"{' '.join(row)}\n" for row in zip(*sentence, strict=True)) for sentence in sentences]
    return [write_whole(folder / "predictions.conll", "\n".join(lines))]
