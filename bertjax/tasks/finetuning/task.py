"""Base class of fine-tuning tasks, with labeled examples in memory (sections 3.2 and A.3 of the paper)."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import open_vocabulary, vocabulary_files
from bertjax.data.finetuning.batches import Batching, EpochOrder, eval_batches, in_input_order, make_batch
from bertjax.data.finetuning.examples import Examples, known_labels
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.inspection import format_row
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError, listed
from bertjax.metrics.metric import TOTAL_LOSS, Metric
from bertjax.model.config import ModelConfig
from bertjax.model.flops import attention_flops_per_position, flops_per_position
from bertjax.tasks.finetuning import splits
from bertjax.tasks.finetuning.config import SPLITS, FinetuningConfig
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.objectives.classification import UNWEIGHTED, ClassWeighting, make_class_weighting
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.records import PredictionRecords
from bertjax.tasks.task import NumpyBatch, Objective, Task

# Top-level parameter name of the output layer.
CLASSIFIER = "classifier"
_MAX_LOGGED_CLASSES = 20
_NOT_EVALUATED = "no data; the last checkpoint is kept"
# Suggest scaling labels with a larger absolute value, because outputs start near 0 and change little at the paper's
# learning rates.
_MAX_NUMBER = 20.0


class FinetuningTask(Task):
    """Base class of tasks on labeled examples. Without data, a task has only synthetic batches.

    Subclasses define `missing_data`, `default_metric`, `make_objective`, `read_examples` (or `read_source` and
    `encode`) and `score`, and usually `baseline`, `output_layer`, `write_predictions` and `prediction_records`.

    Attributes:
      missing_data: error message for training without data.
      default_metric: evaluation metric that selects the best checkpoint unless `config.select_by` is set.
      sequences_per_example: number of encoded sequences per example, such as the choices of SWAG (default: 1).
      by_document: whether `train_share` selects documents instead of rows of the training file (default: False).
      vocabulary, tokenizer: vocabulary of the config or the checkpoint, and its tokenizer.
      split: split to evaluate: "dev", "test", `splits.HELD_OUT` or `NO_SPLIT`.
      read_stats: row counts of each input file.
      hashed_answers: gold answers that are not in the examples, as a JSON value to hash (default: None).
      train_examples: training examples (None: the task is built for evaluation only).
      eval_examples: evaluation examples (None: no evaluation).
      order: order of the training batches (only with training examples).
    """

    missing_data: str
    default_metric: str
    sequences_per_example = 1
    by_document = False
    train_examples: Examples | None = None
    eval_examples: Examples | None = None
    hashed_answers: Any = None
    config: FinetuningConfig

    def __init__(self, config: FinetuningConfig, train: bool = True) -> None:
        """Reads the data. Raises a UsageError if `train` is True and the config sets no data."""
        super().__init__(config)
        self.uses_frozen_features = bool(config.feature_head.features)
        self.read_stats: list[ReadStats] = []
        self.data_notes: list[str] = []
        if not config.has_data:
            self._init_without_data(train)
            return
        if not config.data.vocabulary or not config.has_model:
            raise UsageError(
                "no initial checkpoint; use --init_from CKPT, or set a model size and a vocabulary, such as --config "
                "NAME:size=mini --config.data.vocabulary=vocab.txt"
            )
        self.vocabulary = open_vocabulary(config.data.vocabulary)
        self.tokenizer = Tokenizer(self.vocabulary)
        self.split = splits.evaluated_split(config.data, train)
        self.load(train)
        if not train:
            self.train_examples = None
        self.objective = self._objective_with_feature_head(self.vocabulary.size)
        self._set_schedule()
        self.best_metric = self._select_metric()
        self.output_params = (CLASSIFIER, *config.feature_head.modules)
        self.workdir_files = vocabulary_files(self.vocabulary)
        if layer := self.output_layer():
            layer = dataclasses.replace(layer, feature_head=config.feature_head)
            self.workdir_files[OUTPUT_LAYER] = layer.as_json()
        self.data_hash = self.hash_data()
        evaluated_on = self.eval_data_name() if self.eval_examples is not None else _NOT_EVALUATED
        self.results = {"evaluated_on": evaluated_on, "files": [vars(stats) for stats in self.read_stats]}
        not_evaluated = f"evaluated on {_NOT_EVALUATED}" if self.eval_examples is None else ""
        unknown = (
            self.vocabulary.unknown_problem(self.train_examples.tokens["input_ids"]) if self.train_examples else ""
        )
        notes = (self._describe_labels(), self._describe_class_weights(), not_evaluated, unknown)
        self.notes = (*(stats.summary() for stats in self.read_stats), *filter(None, notes), *self.data_notes)

    def _init_without_data(self, train: bool) -> None:
        config = self.config
        if train:
            raise UsageError(self.missing_data)
        self.objective = self._objective_with_feature_head(config.vocab_size)
        self.batch_sizes = (config.data.batch_size,)
        self._set_schedule()
        self.has_schedule = False
        length = f"{config.steps:,} steps" if config.steps else f"{config.epochs} epoch{'s' * (config.epochs > 1)}"
        unknown = "warm-up and FLOPs" if config.steps else "steps, warm-up and FLOPs"
        self.notes = (f"schedule: {length}, batches of {config.data.batch_size}; {unknown} are unknown without data",)

    def _objective_with_feature_head(self, vocab_size: int) -> Objective:
        objective, head = self.make_objective(self.config.model_config(vocab_size)), self.config.feature_head
        if head.is_used and not hasattr(objective.model, "feature_head"):
            raise UsageError(f"the task {self.config.task} has no feature head; leave config.feature_head unset")
        model = objective.model.clone(feature_head=head) if head.is_used else objective.model
        return dataclasses.replace(objective, model=model)

    def _set_schedule(self) -> None:
        """Sets the batch sizes, the number of steps, and the intervals between evaluations and checkpoints."""
        config, data = self.config, self.config.data
        self.eval_batch_size = data.eval_batch_size
        self.total_steps, self.warmup_steps = max(1, config.steps), 0
        self.eval_every = self.checkpoint_every = 1
        if self.eval_examples is not None:
            self.num_eval_batches = -(-len(self.eval_examples) // data.eval_batch_size)
            if not self.is_labeled():
                self.evaluation_problem = (
                    f"{self.eval_data_name()} contains no labels, so there are no metrics; use `bertjax predict`"
                    + ", or evaluate the dev set with --config.data.eval_split=dev" * (data.eval_split == "test")
                )
        if self.train_examples is not None:
            batching = Batching(data.batch_size, data.bucket, data.seq_len, data.examples_per_row)
            self.order = EpochOrder(self.train_examples, batching, config.seed)
            # Minimum rows of a training batch. With packing, the number of rows varies, but is a multiple of this
            # minimum.
            self._set_training_schedule(self.order.steps_per_epoch, data.batch_size // data.examples_per_row)

    def _set_training_schedule(self, steps_per_epoch: int, *batch_sizes: int) -> None:
        config = self.config
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = config.steps or config.epochs * steps_per_epoch
        self.warmup_steps = config.optimizer.warmup(self.total_steps)
        self.eval_every = (config.eval_every or steps_per_epoch) if self.eval_examples is not None else 0
        self.checkpoint_every = config.checkpoint_every or steps_per_epoch
        self.batch_sizes = batch_sizes

    # Methods for subclasses to override.

    def make_objective(self, model: ModelConfig) -> Objective:
        """Builds the objective. Called after `labels` and `train_examples` are set."""
        raise NotImplementedError

    def read_examples(self, split: str) -> Examples:
        """Reads and encodes the examples of "train", "dev" or "test"."""
        raise NotImplementedError

    def read_source(self, split: str) -> Any:
        """Reads the rows of "train", "dev" or "test" for `splits.divide` and `encode` (default: `read_examples`)."""
        return self.read_examples(split)

    def encode(self, source: Any, stats: ReadStats, training: bool) -> Examples:
        """Encodes rows of `read_source` (default: no change). `training` is False for evaluation rows."""
        return source

    def load(self, train: bool) -> None:
        """Sets `train_examples` and `eval_examples`."""
        evaluated = None
        if train or self.split == splits.HELD_OUT:
            source = self.read_source("train")
            source, evaluated = splits.divide(self.config.data, source, self.read_stats, self.by_document)
            if train:
                self.train_examples = self.encode(source, self.read_stats[0], training=True)
        if self.split in SPLITS:
            evaluated = self.read_source(self.split)
        if evaluated is not None:
            self.eval_examples = self.encode(evaluated, self.read_stats[-1], training=False)

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Computes metrics from the outputs of all evaluation batches. Returns {} if no example has a label."""
        return {}

    def class_weighting(self) -> ClassWeighting:
        """Returns the class weights and label smoothing, which apply only to the training loss."""
        examples = self.train_examples
        if not self.labels or examples is None:
            return UNWEIGHTED
        labels = examples.tokens["token_labels"] if "token_labels" in examples.tokens else examples.rows["labels"]
        data = self.config.data
        return make_class_weighting(data.class_weight_map, self.config.label_smoothing, self.labels, labels)

    def is_labeled(self) -> bool:
        """Returns True if any evaluation example has a label. Examples without a `labels` array count as labeled."""
        labels = self.evaluated_examples.rows.get("labels")
        return labels is None or bool(known_labels(labels).any())

    def extra_metrics(self) -> list[Metric]:
        """Returns additional metrics for `select_by`: those that `baseline` lacks, or for which lower is better."""
        return []

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the format of the task's benchmark and returns the files (default: none)."""
        return []

    def prediction_records(self) -> Sequence[PredictionRecords]:
        """Returns specifications of the JSON Lines files that `predict` writes (default: none, no predictions)."""
        return ()

    def hash_data(self) -> str:
        """Returns the SHA-256 of the examples and of `hashed_answers`."""
        parts = [part.fingerprint() for part in (self.train_examples, self.eval_examples) if part is not None]
        return hashlib.sha256(json.dumps([parts, self.hashed_answers]).encode()).hexdigest()

    # Interface of `Task`.

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        if (examples := self.train_examples) is None:
            return super().train_batches(start_step, shard)
        return (make_batch(examples, *self.order.batch(step), shard) for step in range(start_step, self.total_steps))

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        if self.eval_examples is None:
            return iter(()) if self.config.has_data else super().eval_batches(shard)
        data = self.config.data
        return eval_batches(self.eval_examples, Batching(data.eval_batch_size, data.bucket, data.seq_len), shard)

    def unfrozen_cost_before(self, step: int) -> StepCost:
        data = self.config.data
        if not data.has_files:
            return self._cost(step * data.batch_size, data.seq_len)
        shapes = {} if self.train_examples is None else self.order.shape_counts(step)
        return sum((self._cost(steps * rows, length) for (rows, length), steps in shapes.items()), StepCost())

    def synthetic_sizes(self, phase: int = 0) -> dict[str, int]:
        config = self.objective.model.config
        return {
            "rows": self.config.data.batch_size,
            "length": self.config.data.seq_len,
            "sequences_per_example": self.sequences_per_example,
            "labels": len(self.labels),
            "pieces": config.vocab_size,
            "segments": min(2, max(1, config.type_vocab_size)),
            "classes": 2,
            "two": 2,
        }

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        return format_row(batch, row, self.vocabulary, self.labels)

    def final_metrics(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return {**means, **self.score(outputs)}

    @property
    def evaluated_examples(self) -> Examples:
        """Evaluation examples. Raises a UsageError if there are none."""
        if self.eval_examples is None:
            raise UsageError("no evaluation data; set config.data.eval_split to dev or test")
        return self.eval_examples

    def ordered_logits(self, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Returns the logits of the evaluation examples in input order, float32 [N, ...]."""
        return np.array(in_input_order(outputs, len(self.evaluated_examples))["logits"])

    def eval_data_name(self) -> str:
        """Returns the name of the file or dataset with the evaluation examples, for messages and results."""
        return self.read_stats[-1].file

    def _select_metric(self) -> Metric | None:
        """Returns the metric that selects the best checkpoint."""
        config = self.config
        if self.train_examples is None:
            return Metric(self.default_metric)
        if self.eval_examples is None:
            for name in ("select_by", "patience"):
                if value := getattr(config, name):
                    raise UsageError(
                        f"config.{name}={value!r} needs a dev set; set a dev file, or hold out a part of the training "
                        "data with --config.data.dev_share=0.1"
                    )
            return None
        name = config.select_by or self.default_metric
        known = {metric.name: metric for metric in (*self.objective.metrics, TOTAL_LOSS, *self.extra_metrics())}
        if name not in known and self.is_labeled():
            known |= {other: Metric(other) for other in self.baseline().keys() - known.keys()}
            if name not in known:
                raise UsageError(f"unknown metric: config.select_by={name!r}; use one of {', '.join(sorted(known))}")
        return known.get(name, Metric(name))

    def _describe_labels(self) -> str:
        """Returns a log line: rows per class, or mean and standard deviation of numeric labels, or ""."""
        examples = self.train_examples
        if examples is None or "labels" not in examples.rows or examples.sequences_per_example > 1:
            return ""
        labels = examples.rows["labels"]
        if labels.dtype.kind == "f":
            line = f"labels: mean {labels.mean():.4g}, standard deviation {labels.std():.4g}"
            if np.abs(labels).max() > _MAX_NUMBER:
                line += "; scale them to -5 to 5, because outputs start near 0"
            return line
        counts = labels.sum(axis=0) if labels.ndim > 1 else np.bincount(labels, minlength=len(self.labels))
        lines = [f"{name!r} ({count:,})" for name, count in zip(self.labels, counts, strict=True)]
        return f"{len(lines)} classes: {listed(lines, _MAX_LOGGED_CLASSES)}" if lines else ""

    def _describe_class_weights(self) -> str:
        weights = getattr(self.objective, "weighting", UNWEIGHTED).weights
        pairs = [f"{name!r}={weight:.4g}" for name, weight in zip(self.labels, weights, strict=False)]
        return f"class weights: {listed(pairs, _MAX_LOGGED_CLASSES)}" if pairs and self.train_examples else ""

    def _cost(self, rows: int, length: int) -> StepCost:
        model, head = self.objective.model.config, self.config.feature_head
        positions = rows * self.sequences_per_example * length
        flops = positions * flops_per_position(model, length, feature_head=head)
        return StepCost(rows, positions, flops, positions * attention_flops_per_position(model, length, head))
