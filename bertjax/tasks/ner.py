"""Named entities of CoNLL-2003 (section 5.3 of the paper): a tag for the first piece of each word, no CRF."""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.tokenizer import Tokenizer
from bertjax.data.examples import Examples, in_input_order
from bertjax.data.files import write_whole
from bertjax.data.tables import Reading
from bertjax.data.tagged import OUTSIDE, Tagged, make_rows, read_tagged
from bertjax.errors import UsageError
from bertjax.metrics.entities import entity_scores
from bertjax.model.config import ModelConfig
from bertjax.model.heads import TokenModel
from bertjax.tasks import finetuning
from bertjax.tasks.task import Batch, Objective, Outputs, Sums, Task

_CONTEXTS = ("document", "sentence")


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    finetuning.check(config)
    if config.data.context not in _CONTEXTS:
        raise UsageError(f"config.data.context is {config.data.context!r}; known: {', '.join(_CONTEXTS)}")


def build(config: ConfigDict, train: bool = True) -> Task:
    """The task of a config, on the files it names; without any, a task that has synthetic batches only.

    The tags are those of the training file.

    Raises:
      UsageError: no files, or files that are not of CoNLL's form.
    """
    data = config.data
    if not data.path:
        if train:
            raise UsageError("give CoNLL's files: --config.data.path=DIR, which holds eng.train and eng.testa")
        return finetuning.synthetic_task(config, functools.partial(objective, tags=9))
    vocabulary = finetuning.vocabulary_of(config)
    model = finetuning.model_of(config, vocabulary)
    tokenizer = Tokenizer(vocabulary)
    readings: list[Reading] = []

    def read(name: str) -> Tagged:
        path = Path(data.path).expanduser() / name
        readings.append(Reading(str(path)))
        return read_tagged(path, readings[-1])

    labels = finetuning.saved_labels(config)
    trained = read(data.train_file) if train or labels is None else None
    if labels is None:
        labels = sorted({*trained.tags, OUTSIDE}, key=lambda tag: (tag != OUTSIDE, tag))
    tagged = read(data.dev_file if data.eval_split == "dev" else data.test_file)

    def rows(tagged: Tagged, reading: Reading) -> tuple[Examples, np.ndarray, list[np.ndarray]]:
        return make_rows(tagged, labels, tokenizer, data.seq_len, data.context == "document", reading.file)

    examples, row_of_word, positions = rows(tagged, readings[-1])

    def score(predicted: list[str]) -> dict[str, float]:
        return entity_scores(tagged.sentences(tagged.tags), tagged.sentences(predicted))

    tags = functools.partial(_tags, labels, row_of_word, positions)
    return finetuning.make_task(
        config,
        objective(model, len(labels)),
        vocabulary,
        rows(trained, readings[0])[0] if train else None,
        examples,
        readings,
        score=lambda outputs: score(tags(outputs)),
        baseline=lambda: score(_most_frequent(trained, tagged)) if trained else {},
        best_by="f1",
        write=lambda outputs, folder: _write(tagged, tags(outputs), folder),
        files=finetuning.labels_file(labels),
    )


def objective(model: ModelConfig, tags: int) -> Objective:
    """Cross-entropy and accuracy over the words, each at its first piece."""
    return Objective(
        TokenModel(model, tags, head_dropout=True),
        ("cross_entropy", "word_accuracy"),
        ("cross_entropy",),
        _denominators,
        _compute,
        finetuning.abstract_row,
    )


def _known(batch: Batch) -> jax.Array:
    return (batch["token_labels"] >= 0) * batch["weights"][:, None]


def _denominators(batch: Batch) -> dict[str, jax.Array]:
    return {"cross_entropy": jnp.maximum(jnp.sum(_known(batch)), 1.0)}


def _compute(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    logits, weights = finetuning.apply(model, params, batch, dropout_key), _known(batch)  # [B, L, tags], [B, L]
    labels = jnp.maximum(batch["token_labels"], 0)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    predicted = jnp.argmax(logits, axis=-1)
    weight = jnp.sum(weights)
    sums = {
        "cross_entropy": jnp.stack([jnp.sum(losses * weights), weight]),
        "word_accuracy": jnp.stack([jnp.sum((predicted == labels) * weights), weight]),
    }
    return sums, {"example": batch["example"], "tags": predicted}


def _tags(
    labels: list[str], row_of_word: np.ndarray, positions: list[np.ndarray], outputs: list[dict[str, np.ndarray]]
) -> list[str]:
    """The predicted tag of each word, in the order of the file."""
    predicted = in_input_order(outputs, len(positions))["tags"]
    told = [[labels[tag] for tag in row[places]] for row, places in zip(predicted, positions, strict=True)]
    # Words of a row come in order, but rows that overlap tell words in turns.
    streams = [iter(row) for row in told]
    return [next(streams[row]) for row in row_of_word]


def _most_frequent(trained: Tagged, tagged: Tagged) -> list[str]:
    """The most frequent tag of each word in training, O for a word not seen: CoNLL-2003's own baseline in small."""
    counts: dict[str, dict[str, int]] = {}
    for word, tag in zip(trained.words, trained.tags, strict=True):
        counts.setdefault(word, {}).setdefault(tag, 0)
        counts[word][tag] += 1
    best = {word: max(tags, key=lambda tag: (tags[tag], tag)) for word, tags in counts.items()}
    return [best.get(word, OUTSIDE) for word in tagged.words]


def _write(tagged: Tagged, predicted: list[str], folder: Path) -> list[Path]:
    """What `conlleval` reads: word, tag and predicted tag a line, a blank line between sentences."""
    sentences = zip(*(tagged.sentences(values) for values in (tagged.words, tagged.tags, predicted)), strict=True)
    lines = ["".join(f"{' '.join(row)}\n" for row in zip(*sentence, strict=True)) for sentence in sentences]
    return [write_whole(folder / "predictions.conll", "\n".join(lines))]
