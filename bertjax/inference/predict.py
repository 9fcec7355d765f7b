"""Predictions for texts (labels or masked words), and prediction files for the data of a task."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.config.run import RunConfig
from bertjax.data.corpus.vocabulary import TOKENIZER_JSON
from bertjax.data.finetuning.batches import inference_batches
from bertjax.data.finetuning.examples import make_examples
from bertjax.errors import UsageError
from bertjax.inference.inputs import Texts, TruncationCount
from bertjax.inference.loaded_model import LoadedModel
from bertjax.inference.predictors import PREDICTORS, TextPredictor
from bertjax.model.models import SequenceModel, TokenModel
from bertjax.tasks.build import build_task
from bertjax.tasks.embedding.evaluation import ScoredPairs
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.finetuning.output_layer import SPANS, OutputLayer
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.records import FIELDS, PredictionRecords, Record
from bertjax.training.plots import plot_cosines
from bertjax.utils.io import atomic_file, remove_temporaries

# Maximum number of texts in memory.
_CHUNK_TEXTS = 256
_NUM_SHOWN_CLASSES = 5
_MASK = "[MASK]"


def check_model(model: LoadedModel, context: str) -> OutputLayer:
    """Returns a model's output layer. Raises a UsageError if it has none, or if `context` is missing or not used."""
    layer, module = model.output_layer, model.model_description["kind"]
    if layer is None or module not in (SequenceModel.KIND, TokenModel.KIND):
        raise UsageError(
            f"{model.path} has no output layer for texts (its model is {module!r}); fine-tune it with `bertjax train "
            "--init_from`, predict masked words with fill_mask, or predict a task's data with --output"
        )
    if (layer.kind == SPANS) != bool(context):
        fix = "set context to the passage" if layer.kind == SPANS else "omit context"
        raise UsageError(f"{model.path} predicts {layer.kind}; {fix}")
    return layer


def predict_texts(
    model: LoadedModel,
    inputs: Iterable[str | Texts],
    *,
    context: str = "",
    seq_len: int | None = None,
    logits: bool = False,
) -> Iterator[Record]:
    """Yields one prediction record per input, in order. At most a few hundred inputs are in memory.

    Logs the number of truncated texts. Models for tags and spans divide longer texts into several rows instead.

    Args:
      model: fine-tuned model.
      inputs: tuple of texts for each example: a context and its endings for choices, a question for spans, one text or
        a pair for classes and labels. For tags, a string, which is split into words, or a tuple of words.
      context: passage that contains the answers, for spans.
      seq_len: maximum tokens per row (default: None, `InferenceDefaults.seq_len`).
      logits: whether to add logits to the records.
    """
    layer = check_model(model, context)
    row_len = model.row_len(seq_len)
    if seq_len is None:
        row_len = min(model.defaults.seq_len or row_len, row_len)
    truncation = TruncationCount(row_len)
    predictor = TextPredictor(model, layer.labels, row_len, context, logits, truncation)
    remaining = iter(inputs)
    while chunk := list(itertools.islice(remaining, _CHUNK_TEXTS)):
        yield from PREDICTORS[layer.kind](predictor, chunk)
    truncation.log()


def format_record(line: str, record: Record) -> str:
    """Formats a line and its prediction for a terminal."""
    prediction, probabilities = record["prediction"], record.get("probabilities")
    if "words" in record:
        width = max(map(len, record["words"]), default=0)
        rows = zip(record["words"], prediction, record["probabilities"], strict=True)
        shown = [f"{word:<{width}} {format_probabilities([(tag, probs[tag])])}" for word, tag, probs in rows]
    elif "probability" in record:
        shown = [format_probabilities([(prediction or "(no answer)", record["probability"])])]
    elif probabilities is None:
        shown = [f"{prediction:g}"]
    else:
        pairs = probabilities.items() if isinstance(probabilities, dict) else enumerate(probabilities)
        shown = [format_probabilities(sorted(pairs, key=lambda pair: -pair[1])[:_NUM_SHOWN_CLASSES])]
    return "\n  ".join([line, *shown])


def format_probabilities(pairs: Iterable[tuple[object, float]]) -> str:
    """Formats pairs of name and probability as one line."""
    return "   ".join(f"{name} {100 * probability:.1f} %" for name, probability in pairs)


def fill_mask(model: LoadedModel, text: str, top: int) -> list[list[tuple[str, float]]]:
    """Predicts the most probable tokens at each mask token of a text. [MASK] stands for the model's mask token.

    Returns:
      For each mask token, from left to right, `top` pairs of token and probability, best first. The token is a piece of
        the vocabulary or, with a tokenizer.json, its text, such as " the".
    """
    if "masked_lm" not in model.params and model.config.has_lm_head_params:
        raise UsageError(f"{model.path} lacks the parameters masked_lm; use a checkpoint with a masked-LM head")
    vocabulary, max_len = model.vocabulary, model.config.max_row_tokens
    if not 1 <= top <= vocabulary.size:
        raise UsageError(f"top={top} is out of range; use 1 to {vocabulary.size}")
    mask = vocabulary.pieces[vocabulary.mask_id]
    text_ids = model.tokenizer.encode_with_special(text.replace(_MASK, mask))
    if vocabulary.mask_id not in text_ids:
        raise UsageError(f"no {mask} in {text[:60]!r}; write {mask} in place of the word to predict")
    ids = [vocabulary.cls_id, *text_ids, *[vocabulary.sep_id] * vocabulary.end_separators]
    if len(ids) > max_len:
        raise UsageError(f"the text has {len(ids)} tokens, but the model takes at most {max_len}; shorten the text")
    positions = np.flatnonzero(np.array(ids) == vocabulary.mask_id).astype(np.int32)
    row = {"input_ids": ids, "segment_ids": [0] * len(ids)}
    (batch,) = inference_batches(make_examples([row], {"masked_lm_positions": positions[None]}), max_len)
    (probs,) = model.masked_lm_probs(batch)
    # Omit the padding of the vocabulary, because its probability of 0 may tie with a token's.
    probs = probs[:, : vocabulary.size]
    decode = model.tokenizer.decode if vocabulary.kind == TOKENIZER_JSON else lambda ids: vocabulary.pieces[ids[0]]
    return [[(decode([index]), float(row[index])) for index in np.argsort(-row)[:top]] for row in probs]


def build_prediction_task(config: RunConfig) -> FinetuningTask:
    """Builds the task of a config. Raises a UsageError if the task makes no predictions."""
    task = build_task(config)
    if not isinstance(task, FinetuningTask) or not task.prediction_records():
        raise UsageError(f"the task {config.task} writes no prediction files; use `bertjax evaluate`")
    return task


def create_output(task: FinetuningTask, folder: str, columns: Sequence[str] = ()) -> None:
    """Creates the output folder. Raises a UsageError if `columns` are invalid."""
    for file_records in task.prediction_records() if columns else ():
        if file_records.read_columns is None:
            raise UsageError("--columns needs data with named columns, which this task does not have; omit --columns")
        if reserved := [column for column in columns if column in FIELDS]:
            raise UsageError(f"--columns={reserved[0]!r} is already a field of the .jsonl files; leave this column out")
        filled = {column for row in file_records.read_columns(columns) for column in columns if row.fields[column]}
        if empty := sorted({*columns} - filled):
            raise UsageError(f"column {empty[0]!r} of --columns is empty in every row; leave this column out")
    Path(folder).mkdir(parents=True, exist_ok=True)
    remove_temporaries(Path(folder))  # of a killed command


def write_outputs(
    task: FinetuningTask,
    outputs: list[dict[str, np.ndarray]],
    folder: str,
    logits: bool = False,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Writes a task's prediction files from the outputs of its evaluation batches. Returns the paths of the files.

    `logits` adds logits to the records. `columns` are columns of the data file to copy into the records.
    """
    paths = task.write_predictions(outputs, Path(folder))
    for file_records in task.prediction_records():
        path = Path(folder) / file_records.file_name
        # `backslashreplace` writes lone surrogates as JSON escapes.
        with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            for record in _add_columns(file_records, file_records.make(outputs, logits), columns):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        paths.append(path)
    if isinstance(task, EmbedTask):
        for pairs in task.eval_sets:
            if isinstance(pairs, ScoredPairs):
                paths.append(Path(folder) / "cosines.png")
                plot_cosines(pairs.labels, pairs.cosines(task.eval_vectors(outputs)), paths[-1])
    return paths


def _add_columns(
    file_records: PredictionRecords, records: Iterable[Record], columns: Sequence[str]
) -> Iterator[Record]:
    """Yields records with line number and the line's `columns`, if the data has line numbers."""
    if not file_records.lines:
        yield from records
        return
    # Read the columns again, instead of keeping them in memory during the predictions.
    rows = file_records.read_columns(columns) if columns and file_records.read_columns else iter(())
    for line, record in zip(file_records.lines, records, strict=True):
        fields = next(row.fields for row in rows if row.line == line) if columns else {}
        yield {"line": line, **fields, **record}
