"""Predictions of fine-tuned models for texts from the command line, a file or Python."""

import itertools
from collections.abc import Iterable, Iterator

from bertjax.errors import UsageError
from bertjax.inference.loaded_model import LoadedModel
from bertjax.inference.output_kinds import OUTPUT_KINDS
from bertjax.inference.text_predictions import TextPredictor
from bertjax.tasks.finetuning.output_layer import SPANS
from bertjax.tasks.finetuning.records import Record

# Texts in memory at a time.
_CHUNK_TEXTS = 256
_NUM_SHOWN_CLASSES = 5


def check_model(model: LoadedModel, context: str | None) -> None:
    """Raises a UsageError if the model has no output layer, or if the context is missing or unused."""
    if model.output_layer is None:
        raise UsageError(
            f"{model.path} is pre-trained only and has no output layer; fine-tune it with `bertjax train --init_from`, "
            "or predict masked words with fill_mask"
        )
    kind = model.output_layer.kind
    if kind == SPANS and not context:
        raise UsageError(f"{model.path} answers questions about a passage; give the passage as context")
    if kind != SPANS and context:
        raise UsageError(f"context is only for models that answer questions, but {model.path} predicts {kind}")


def predict_texts(
    model: LoadedModel, lines: Iterable[str], *, context: str = "", seq_len: int | None = None, logits: bool = False
) -> Iterator[Record]:
    """Yields one record per line, in order, holding a few hundred lines in memory.

    Args:
      model: a fine-tuned model.
      lines: depending on the output layer, a text or `FIRST ||| SECOND` (classes, labels, numbers),
        `BEGINNING ||| ENDING ||| ENDING` (choices), words separated by spaces (tags), or a question (spans).
      context: passage that contains the answers, for spans.
      seq_len: maximum tokens per row (default: as in training, else as many as the model takes).
      logits: add logits to the records.

    Raises:
      UsageError: the model cannot predict, or a line does not fit it.
    """
    check_model(model, context)
    max_len = model.config.max_position_embeddings
    if seq_len is None:
        seq_len = min(model.defaults.seq_len or max_len, max_len)
    if not 8 <= seq_len <= max_len:
        raise UsageError(f"seq_len={seq_len} is out of range; use 8 to {max_len}")
    predictor = TextPredictor(model, seq_len, context, logits)
    predict = OUTPUT_KINDS[model.output_layer.kind].predict
    remaining = iter(lines)
    while chunk := list(itertools.islice(remaining, _CHUNK_TEXTS)):
        yield from predict(predictor, chunk)


def format_record(line: str, record: Record) -> str:
    """Formats a line and its prediction for a terminal."""
    return "\n".join([line, *(f"  {text}" for text in _format_prediction(record))])


def _format_prediction(record: Record) -> list[str]:
    prediction, probabilities = record["prediction"], record.get("probabilities")
    if "words" in record:
        width = max(map(len, record["words"]), default=0)
        rows = zip(record["words"], prediction, probabilities, strict=True)
        return [f"{word:<{width}} {tag} {_percent(word_probs[tag])}" for word, tag, word_probs in rows]
    if "probability" in record:
        return [f"{prediction or '(no answer)'} {_percent(record['probability'])}"]
    if probabilities is None:
        return [f"{prediction:g}"]
    pairs = probabilities.items() if isinstance(probabilities, dict) else enumerate(probabilities)
    best = sorted(pairs, key=lambda pair: -pair[1])[:_NUM_SHOWN_CLASSES]
    return ["   ".join(f"{name} {_percent(probability)}" for name, probability in best)]


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"
