"""SQuAD 1.1 and 2.0: prediction of the span of a passage that answers a question (paper, sections 4.2 and 4.3)."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.finetuning.questions import Questions, read_questions, read_triviaqa
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.windows import make_windows
from bertjax.data.schema import EXAMPLE, SEQUENCE, ArraySpec
from bertjax.errors import UsageError
from bertjax.metrics import squad as squad_metrics
from bertjax.metrics.metric import loss_metric
from bertjax.model.config import ModelConfig
from bertjax.model.models import TokenModel
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.finetuning.output_layer import SPANS, OutputLayer
from bertjax.tasks.finetuning.spans import LOGIT_FIELDS, Answer, answer_record, best_answers, nbest_with_probabilities
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.losses import cross_entropy
from bertjax.tasks.records import RECORDS_FILE, PredictionRecords, Record
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs
from bertjax.utils.io import write_atomic
from bertjax.utils.sections import bounded

_V1, _V2, _TRIVIAQA = _VERSIONS = ("1.1", "2.0", "triviaqa")
_POSITIONS = ("start_positions", "end_positions")


@dataclasses.dataclass(frozen=True)
class SquadData(FinetuningData):
    """Data and batches of question answering.

    Attributes:
      version: `1.1`, `2.0` (questions may be unanswerable) or `triviaqa` (TriviaQA's Wikipedia documents with an answer
        in their first 400 words). The paper trains on TriviaQA before SQuAD 1.1.
      train_file: training file (default: depending on `version`, `train-v1.1.json`, `train-v2.0.json` or
        `qa/wikipedia-train.json` in `path`).
      eval_file: evaluation file (default: the file of the evaluated split in `path`, such as `dev-v1.1.json`).
      doc_stride: tokens between the starts of consecutive windows of a passage.
      max_query_len: maximum tokens of a question.
      n_best: maximum number of answers per question in the n-best file.
      max_answer_len: maximum tokens of an answer.
      choose_null_threshold: whether to choose the null threshold with the best F1 on the evaluated questions (SQuAD 2.0
        only).
      null_threshold: null threshold if `choose_null_threshold` is false (SQuAD 2.0 only). A question is predicted as
        unanswerable if its null odds (null score minus score of the best span) exceed the threshold.
    """

    version: str = bounded("1.1", choices=_VERSIONS)
    train_file: str = ""
    eval_file: str = ""
    seq_len: int = 384
    doc_stride: int = bounded(128, at_least=1)
    max_query_len: int = bounded(64, at_least=1)
    n_best: int = bounded(20, at_least=1)
    max_answer_len: int = bounded(30, at_least=1)
    choose_null_threshold: bool = True
    null_threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_query_len + 4 > self.seq_len:
            raise UsageError(f"config.data.max_query_len={self.max_query_len} leaves no room for a passage; reduce it")
        if self.null_threshold and (self.choose_null_threshold or self.version != _V2):
            fix = "set config.data.version=2.0 and config.data.choose_null_threshold=false"
            raise UsageError(f"config.data.null_threshold={self.null_threshold} has no effect; {fix}")


@dataclasses.dataclass(frozen=True)
class SquadConfig(FinetuningConfig):
    """Config for question answering."""

    task: str = "squad"
    data: SquadData = SquadData()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reject("squad predicts positions, not classes", "label_smoothing", "data.class_weights")
        self.reject("rows of squad are already full", "data.examples_per_row")


@dataclasses.dataclass(frozen=True)
class SpanObjective(Objective):
    """Objective that predicts answer spans. The loss is the mean of the start and end cross-entropies."""

    metrics = (loss_metric("start_loss"), loss_metric("end_loss"))
    schema = (*SEQUENCE, *(ArraySpec(name, (), num_values="length") for name in _POSITIONS), *EXAMPLE)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        # Divide by twice the number of rows, so that the training loss is the mean of the start and end losses.
        rows = 2.0 * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return dict.fromkeys(self.loss_weights, rows)

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        logits = self.apply(params, batch, dropout_key)  # [B, L, 2]
        # Exclude padding, so that the padded length does not change the loss.
        logits = jnp.where(batch["input_mask"][..., None] > 0, logits, jnp.finfo(jnp.float32).min)
        weights = batch["weights"]
        sums = {}
        for index, (loss, positions) in enumerate(zip(self.loss_weights, _POSITIONS, strict=True)):
            losses = cross_entropy(logits[..., index], batch[positions])
            sums[loss] = jnp.stack([jnp.sum(losses * weights), 2.0 * jnp.sum(weights)])
        return sums, {"example": batch["example"], "start": logits[..., 0], "end": logits[..., 1]}


class SquadTask(FinetuningTask):
    """SQuAD or TriviaQA, read from the original files."""

    missing_data = "no data; set --config.data.path to the folder of SQuAD's train-v1.1.json and dev-v1.1.json"
    default_metric = "f1"
    config: SquadConfig
    hashed_answers = ()  # None would change the data hash of existing runs without evaluation.
    # Evaluation questions (default: none).
    _questions = Questions()

    def make_objective(self, model: ModelConfig) -> SpanObjective:
        return SpanObjective(TokenModel(model, 2, head_dropout=False))

    def output_layer(self) -> OutputLayer:
        return OutputLayer(SPANS, output="squad")

    def read_source(self, split: str) -> Questions:
        """Reads the split's configured file, or its default file in `data.path`."""
        data = self.config.data
        folder, is_triviaqa = Path(data.path).expanduser(), data.version == _TRIVIAQA
        field = "train_file" if split == "train" else "eval_file"
        default = f"qa/wikipedia-{split}" if is_triviaqa else f"{split}-v{data.version}"
        path = folder / (getattr(data, field) or default)
        files = (path.with_name(f"{path.name}{ending}") for ending in ("", ".json", ".jsonl", ".json.xz"))
        file = next(filter(Path.is_file, files), None)
        if file is None:
            raise UsageError(
                f"no file {path} or {path}.json; set --config.data.{field} to the file, or evaluate another split"
            )
        stats = ReadStats(str(file))
        self.read_stats.append(stats)
        if is_triviaqa:
            return read_triviaqa(file, folder, stats)
        return read_questions(file, stats, training=split == "train", all_answerable=data.version == _V1)

    def encode(self, source: Questions, stats: ReadStats, training: bool) -> Examples:
        sizes = {name: getattr(self.config.data, name) for name in ("seq_len", "doc_stride", "max_query_len")}
        examples, windows = make_windows(source, self.tokenizer, stats, **sizes)
        if not training:
            self._questions, self._windows = source, windows
            self.hashed_answers = [(question.id, question.answers) for question in source]
        return examples

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        answers = self._answers(outputs)
        threshold = self._null_threshold(answers)
        if threshold is not None:
            return {**squad_metrics.score_v2(self._gold, _texts(answers, threshold)), "null_threshold": threshold}
        return squad_metrics.score_v1(self._gold, _texts(answers)) if self.is_labeled() else {}

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of predicting "" (SQuAD 2.0), or each passage's first sentence (other versions)."""
        if self._is_v2:
            return squad_metrics.score_v2(self._gold, dict.fromkeys(self._gold, ""))
        sentences = {question.id: question.context.partition(". ")[0] for question in self._questions}
        return squad_metrics.score_v1(self._gold, sentences)

    def is_labeled(self) -> bool:
        # In SQuAD 2.0, a question without answers counts as labeled: it is unanswerable.
        return self._is_v2 or any(question.answers for question in self._questions)

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes the official prediction file, the n-best answers and, for SQuAD 2.0, the null odds."""
        answers = self._answers(outputs)
        files: dict[str, Any] = {"predictions.json": _texts(answers, self._null_threshold(answers))}
        if self._is_v2:
            files["null_odds.json"] = {id_: answer.null_odds for id_, answer in answers.items()}
        nbest = {id_: nbest_with_probabilities(answer, self._is_v2).items() for id_, answer in answers.items()}
        files["nbest_predictions.json"] = {
            id_: [{"text": span.text, "probability": value, "score": span.score} for span, value in spans]
            for id_, spans in nbest.items()
        }
        return [
            write_atomic(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            for name, content in files.items()
        ]

    def prediction_records(self) -> list[PredictionRecords]:
        def make(outputs: list[dict[str, np.ndarray]]) -> list[Record]:
            answers = self._answers(outputs)
            threshold = self._null_threshold(answers)
            return [{"id": id_, **answer_record(answer, threshold)} for id_, answer in answers.items()]

        return [PredictionRecords(RECORDS_FILE, make, logit_fields=LOGIT_FIELDS)]

    @property
    def _is_v2(self) -> bool:
        return self.config.data.version == _V2

    @property
    def _gold(self) -> dict[str, tuple[str, ...]]:
        return {question.id: question.answers for question in self._questions}

    def _answers(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, Answer]:
        data = self.config.data
        return best_answers(self._questions, self._windows, outputs, data.n_best, data.max_answer_len)

    def _null_threshold(self, answers: dict[str, Answer]) -> float | None:
        """Returns the configured null threshold, or the one with the best F1 (None: the data is not SQuAD 2.0)."""
        data, gold = self.config.data, self._gold
        if not (self._is_v2 and data.choose_null_threshold):
            return data.null_threshold if self._is_v2 else None
        if not any(gold.values()):
            raise UsageError(
                "the evaluation file has no gold answers to choose a null threshold; set config.data.null_threshold to "
                "the value in the workdir's results.json, and config.data.choose_null_threshold=false"
            )
        predictions, null_odds = _texts(answers), {id_: answer.null_odds for id_, answer in answers.items()}
        f1_scores = squad_metrics.question_scores_v2(gold, predictions)[1]
        return _round_up(squad_metrics.best_threshold(gold, f1_scores, predictions, null_odds))


def _texts(answers: dict[str, Answer], threshold: float | None = None) -> dict[str, str]:
    """Returns the predicted text of each question, keyed by question id."""
    return {id_: answer.best(threshold).text for id_, answer in answers.items()}


def _round_up(threshold: float) -> float:
    """Rounds up to the seven digits of `results.json`, so that null odds equal to the threshold stay answerable."""
    if not threshold:
        return threshold
    unit = 10.0 ** (math.floor(math.log10(abs(threshold))) - 6)
    return float(f"{math.ceil(threshold / unit) * unit:.7g}")
