"""Predictions for texts (labels or masked words), and prediction files for the data of a task."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.config.run import RunConfig
from bertjax.data.corpus.vocabulary import TOKENIZER_JSON
from bertjax.data.finetuning.batches import in_input_order, inference_batches
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText, encode_tagged, gather_words
from bertjax.data.finetuning.windows import make_windows
from bertjax.errors import UsageError, quoted
from bertjax.inference.inputs import PAIR_SEPARATOR, Texts, TruncationCount, tokenize
from bertjax.inference.load import LoadedModel
from bertjax.metrics.entities import follows_scheme
from bertjax.tasks import records
from bertjax.tasks.build import build_task
from bertjax.tasks.embedding.evaluation import ScoredPairs
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.finetuning import spans as squad_spans
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.records import FIELDS, PredictionRecords, Record
from bertjax.training.plots import plot_cosines
from bertjax.utils.io import atomic_file, make_output_folder

# Maximum number of texts in memory.
_CHUNK_TEXTS = 256
_NUM_SHOWN_CLASSES = 5
_MASK = "[MASK]"


@dataclasses.dataclass(frozen=True)
class TextPredictor:
    """Fine-tuned model with prediction options; see `predict_texts`."""

    model: LoadedModel
    context: str
    truncation: TruncationCount  # counts the truncated texts of all predictions

    def logits(self, examples: Examples) -> list[np.ndarray]:
        """Returns each example's logits: float32 [outputs], or [length, outputs] if the model classifies tokens."""
        batches = inference_batches(examples, self.truncation.seq_len)
        outputs = [{"example": batch["example"], "logits": self.model.apply(batch)} for batch in batches]
        rows = in_input_order(outputs, len(examples)).get("logits", [])
        return [row[:length] if row.ndim > 1 else row for row, length in zip(rows, examples.lengths, strict=True)]

    def sequence_logits(self, inputs: Sequence[Texts]) -> list[np.ndarray]:
        """Returns the logits [outputs] of each text or pair."""
        for texts in inputs:
            expected = self.model.defaults.texts or len(texts)
            if len(texts) < expected:
                form = f"FIRST{PAIR_SEPARATOR}SECOND"
                raise UsageError(f"{quoted(texts)} is a single text; use a pair (on the command line, {form})")
            if len(texts) > min(expected, 2):
                raise UsageError(f"{quoted(texts)} is a pair, but the model takes single texts; use one text")
        return self.logits(tokenize(self.model, inputs, self.truncation))


def predict_classes(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts one class for each text or pair. A regression model predicts a number."""
    logits = predictor.sequence_logits(inputs)
    if not predictor.model.labels:
        return [{"prediction": records.round_digits(row[0])} for row in logits]
    return [records.class_record(predictor.model.labels, row) for row in logits]


def predict_labels(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts any number of labels for each text or pair."""
    threshold = predictor.model.defaults.threshold
    logits = predictor.sequence_logits(inputs)
    return [records.multilabel_record(predictor.model.labels, row, threshold) for row in logits]


def predict_choices(predictor: TextPredictor, inputs: Sequence[Texts]) -> list[Record]:
    """Predicts the most plausible ending of each context."""
    if wrong := [texts for texts in inputs if len(texts) < 3]:
        form = PAIR_SEPARATOR.join(("CONTEXT", "ENDING", "ENDING"))
        raise UsageError(f"too few endings: {quoted(wrong[0])}; use at least two (on the command line, {form})")
    scores = iter(predictor.sequence_logits([(context, ending) for context, *endings in inputs for ending in endings]))
    return [records.class_record((), np.array([next(scores)[0] for _ in endings])) for _, *endings in inputs]


def predict_tags(predictor: TextPredictor, inputs: Sequence[str | Texts]) -> list[Record]:
    """Predicts a tag for each word of each text. An input is a text, or a tuple of words to join with spaces."""
    split = predictor.model.tokenizer.word_spans
    texts = [text if isinstance(text, str) else " ".join(text) for text in inputs]
    spans = [split(text) if isinstance(text, str) else _joined_spans(text) for text in inputs]
    sentences = [[text[start:end] for start, end in text_spans] for text, text_spans in zip(texts, spans, strict=True)]
    tagged = TaggedText(sentences, [[""] * len(words) for words in sentences], range(len(sentences)))
    labels, tokenizer = list(predictor.model.labels), predictor.model.tokenizer
    examples, places = encode_tagged(tagged, labels, tokenizer, predictor.truncation.seq_len, False, "the text")
    tokens = {name: examples.tokens[name] for name in ("input_ids", "segment_ids")}
    logits = gather_words(places, predictor.logits(dataclasses.replace(examples, tokens=tokens)))
    tag_records = []
    for text, text_spans, words, rows in zip(texts, spans, sentences, logits, strict=True):
        record = records.tags_record(words, labels, rows)
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
    """Predicts the answer to each question as a span of the context."""
    defaults, seq_len = predictor.model.defaults, predictor.truncation.seq_len
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
    return [squad_spans.answer_record(answer, threshold) for answer in answers.values()]


# Functions that predict one record per input, keyed by kind of output layer.
PREDICTORS: dict[str, Callable[[TextPredictor, Sequence[Any]], list[Record]]] = {
    CLASSES: predict_classes,
    MULTILABEL: predict_labels,
    CHOICES: predict_choices,
    TAGS: predict_tags,
    SPANS: predict_spans,
}


def check_model(model: LoadedModel, context: str) -> None:
    """Raises a UsageError if a model has no output layer for texts, or if `context` is missing or not used."""
    module = model.model_description["kind"]
    if not model.output_kind or module not in ("sequence", "tokens"):
        raise UsageError(
            f"{model.path} has no output layer for texts (its model is {module!r}); fine-tune it with `bertjax train "
            "--init_from`, predict masked words with fill_mask, or predict a task's data with --output"
        )
    if (model.output_kind == SPANS) != bool(context):
        fix = "omit context" if context else "set context to the passage"
        raise UsageError(f"{model.path} predicts {model.output_kind}; {fix}")


def predict_texts(
    model: LoadedModel,
    inputs: Iterable[str | Texts],
    context: str = "",
    seq_len: int | None = None,
    logits: bool = False,
) -> Iterator[Record]:
    """Yields one prediction record per input, in order. At most a few hundred inputs are in memory.

    Logs the number of truncated texts. Tagging and question answering divide longer texts into several rows instead.

    Args:
      model: fine-tuned model.
      inputs: texts of each example: (context, ending, ...) for multiple choice, (question,) for question answering, and
        (text,) or (first, second) for classification. For tagging, a string to split into words, or a tuple of words.
      context: passage that contains the answers (only for question answering; default: empty).
      seq_len: maximum tokens per row (default: None, `InferenceDefaults.seq_len`).
      logits: whether to add logits to the records.
    """
    check_model(model, context)
    row_len = model.row_len(seq_len)
    default = model.defaults.seq_len if seq_len is None else 0
    truncation = TruncationCount(min(default or row_len, row_len))
    predictor = TextPredictor(model, context, truncation)
    logit_fields = squad_spans.LOGIT_FIELDS if model.output_kind == SPANS else records.LOGIT_FIELDS
    remaining = iter(inputs)
    while chunk := list(itertools.islice(remaining, _CHUNK_TEXTS)):
        for record in PREDICTORS[model.output_kind](predictor, chunk):
            yield records.without_fields(record, () if logits else logit_fields)
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
    if "masked_lm" not in model.nested_params and model.config.has_lm_head_params:
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
    if isinstance(task, FinetuningTask) and not config.has_data:
        raise UsageError("no data; set --config.data.path or, for your own file, --config.data.test_file=FILE")
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
    make_output_folder(Path(folder))


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
            for record in _add_columns(file_records, file_records.make(outputs), columns):
                written = records.without_fields(record, () if logits else file_records.logit_fields)
                file.write(records.to_json(written, ensure_ascii=False) + "\n")
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
    """Adds the line number and the line's `columns` to each record, if the data has line numbers."""
    if not file_records.lines:
        yield from records
        return
    # Read the columns again, instead of keeping them in memory during the predictions.
    rows = file_records.read_columns(columns) if columns and file_records.read_columns else iter(())
    for line, record in zip(file_records.lines, records, strict=True):
        fields = next(row.fields for row in rows if row.line == line) if columns else {}
        yield {"line": line, **fields, **record}
