"""Task of text embedders: training on examples of several texts, and evaluation of the vectors."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import open_vocabulary, vocabulary_files
from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching, in_input_order
from bertjax.data.finetuning.examples import Examples, make_examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.text_batches import MixedOrder, TextExamples, text_batches, train_batch
from bertjax.data.finetuning.text_columns import TextEncoder, read_examples
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError, listed
from bertjax.metrics.metric import Metric
from bertjax.model.config import ModelConfig
from bertjax.model.flops import attention_flops_per_token, flops_per_token
from bertjax.model.heads import EmbeddingModel
from bertjax.tasks.embedding.config import EmbedConfig
from bertjax.tasks.embedding.evaluation import EvalSet, EvalTexts, read_eval_sets
from bertjax.tasks.objectives.embedding import Embedding
from bertjax.tasks.objectives.embedding_losses import LossOptions
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.records import PredictionRecords
from bertjax.tasks.task import NumpyBatch, Task

# Rows are packed with several texts up to this length, or up to the length of a text if that is longer.
_ROW_LEN = 512
# Number of first batches from which the cost of a step is estimated.
_COST_BATCHES = 4
# Maximum number of row lengths in evaluations.
_EVAL_LENGTHS = 4
# Share of rows without a place in a batch that is worth a note.
_NOTED_SHARE = 0.01
_MIN_NORM = 1e-12


class EmbedTask(Task):
    """Training and evaluation of a text embedder.

    Attributes:
      files: training files (empty: the task is built for evaluation only).
      order: order of the training batches (only with training files).
      eval_sets: sets of texts to evaluate.
      eval_texts: distinct texts of all evaluation sets.
    """

    config: EmbedConfig
    objective: Embedding

    def __init__(self, config: EmbedConfig, train: bool = True) -> None:
        """Reads the data. Raises a UsageError if `train` is True and the config sets no training file."""
        super().__init__(config)
        data = config.data
        self.files: list[TextExamples] = []
        self.eval_sets: list[EvalSet] = []
        self.eval_texts = EvalTexts()
        self.read_stats: list[ReadStats] = []
        self.total_steps, self.warmup_steps, self.eval_every = max(1, config.steps), 0, 0
        self.checkpoint_every = 1
        if train and not data.training_files:
            raise UsageError("no training data; set --config.data.train_file=FILE with the columns anchor and positive")
        if not config.has_model:
            raise UsageError("no model; use --init_from CKPT, or set a size, such as --config embed:size=base")
        if not data.has_files:
            self.objective = self._make_objective(config.model_config(config.vocab_size), ())
            self.has_schedule = False
            self.batch_sizes = (data.batch_size,)
            return
        if not data.vocabulary:
            raise UsageError("no vocabulary; use --init_from CKPT, or set --config.data.vocabulary=vocab.txt")
        self.vocabulary = open_vocabulary(data.vocabulary)
        config.check_rows(max(data.lengths), is_packed=True)
        prompts = data.prompts
        self._encoder = TextEncoder(Tokenizer(self.vocabulary), prompts["query"], prompts["document"], *data.lengths)
        classes = self._read_training_files() if train else []
        self.eval_sets, self.eval_texts, notes = read_eval_sets(data, self.read_stats)
        self.objective = self._make_objective(config.model_config(self.vocabulary.size), classes)
        self._set_schedule()
        self.eval_first = bool(self.eval_sets)
        self.reinit_params = ("classifier",)
        self.accepts_any_encoder = not (config.embed.dense or classes)
        self.workdir_files = vocabulary_files(self.vocabulary)
        self.data_hash = self._hash()
        self.results = {
            "evaluated_on": listed(each.name for each in self.eval_sets),
            "files": [vars(stats) for stats in self.read_stats],
        }
        self.notes = (*(stats.summary() for stats in self.read_stats), *notes, *self._notes())

    def _read_training_files(self) -> list[str]:
        """Reads the training files. Returns the names of the classes."""
        data, loss = self.config.data, self.config.loss
        classes: list[list[str]] = []
        for file in data.training_files:
            texts = file.columns or (data.scored_columns[:2] if loss.label in ("score", "class") else data.columns)
            if loss.max_documents and len(texts) > 1 + loss.max_documents:
                raise UsageError(f"loss={self.config.embed.loss} needs two texts per row, not {', '.join(texts)}")
            label = data.scored_columns[2] if loss.label else ""
            rows, stats = data.read_rows(file.file, [*texts, *([label] if label else [])])
            self.read_stats.append(stats)
            examples, names = read_examples(rows, texts, label, loss.label, self._encoder, stats)
            classes.append(names)
            strings = examples.strings if loss.needs_guide else ()
            self.files.append(dataclasses.replace(examples, weight=file.weight or len(examples), strings=strings))
        if any(names != classes[0] for names in classes):
            raise UsageError("the training files have different classes; use the same classes in each")
        if loss.in_batch_negatives and any(file.num_columns < 2 for file in self.files):
            raise UsageError(f"loss={self.config.embed.loss} needs an anchor and a positive; set config.data.columns")
        return classes[0]

    def _make_objective(self, model: ModelConfig, classes: Sequence[str]) -> Embedding:
        embed = self.config.embed
        pooling = embed.pooling.replace("auto", "mean")
        module = EmbeddingModel(model, pooling, embed.dense, embed.dense_activation, embed.normalize != "false")
        width = embed.dense or model.hidden_size
        if wrong := [dim for dim in embed.dims if dim > width]:
            raise UsageError(f"config.embed.dims contains {wrong[0]}; use 1 to {width}, the width of the vectors")
        options = LossOptions(embed.temperature, embed.both_directions, embed.hardness)
        return Embedding(module, embed.loss, options, embed.dims, embed.chunk, len(classes))

    def _set_schedule(self) -> None:
        config, data = self.config, self.config.data
        self.batch_sizes = (data.eval_batch_size,)
        self.num_eval_batches = -(-len(self.eval_texts) // data.eval_batch_size)
        metrics = [name for each in self.eval_sets for name in each.metrics]
        self.best_metric = Metric(config.select_by or metrics[0]) if metrics else None
        if config.select_by and config.select_by not in metrics:
            raise UsageError(f"unknown metric: config.select_by={config.select_by!r}; use one of {listed(metrics)}")
        if config.patience and not metrics:
            raise UsageError(f"config.patience={config.patience} needs evaluation data; set config.data.dev_file")
        if not self.files:
            return
        unique = config.loss.in_batch_negatives
        self.order = MixedOrder(self.files, data.batch_size, config.seed, unique)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.total_steps = config.steps or config.epochs * self.steps_per_epoch
        self.warmup_steps = config.optimizer.warmup(self.total_steps)
        self.eval_every = (config.eval_every or self.steps_per_epoch) if self.eval_sets else 0
        self.checkpoint_every = config.checkpoint_every or self.steps_per_epoch
        rows = {
            (config.embed.chunk or data.batch_size * file.num_columns) // data.examples_per_row for file in self.files
        }
        self.batch_sizes = (data.batch_size, *rows, *self.batch_sizes)

    @functools.cached_property
    def _batching(self) -> Batching:
        data = self.config.data
        longest = max(data.lengths)
        row_len = max(longest, min(_ROW_LEN, longest * data.examples_per_row))
        return Batching(data.batch_size, data.bucket, row_len, data.examples_per_row)

    @property
    def _eval_batching(self) -> Batching:
        # Texts of a batch have similar lengths, so do not pack them. Compile the encoder for few row lengths.
        data, bucket = self.config.data, max(1, self.config.data.bucket)
        longest = max(data.lengths)
        bucket *= math.ceil(longest / bucket / _EVAL_LENGTHS)
        return Batching(data.eval_batch_size, bucket if data.bucket else 0, longest)

    @functools.cached_property
    def _tokenized_eval_texts(self) -> Examples:
        return make_examples([self._encoder.encode(text, is_query) for text, is_query in self.eval_texts.texts], {})

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.texts.fingerprint().encode())
            for name, values in sorted(file.rows.items()):
                digest.update(f"{name} {values.shape}".encode() + values.tobytes())
        digest.update(json.dumps([self.eval_texts.texts, [each.answers for each in self.eval_sets]]).encode())
        return digest.hexdigest()

    def _notes(self) -> Iterator[str]:
        for file, left_out in zip(self.files, self.order.left_out if self.files else [], strict=True):
            if left_out > _NOTED_SHARE:
                yield (
                    f"{file.name}: about {left_out:.1%} of the rows are left out of each epoch, because their texts "
                    "occur in too many other rows; use a smaller batch, or fewer rows with the same text"
                )

    @property
    def vector_width(self) -> int:
        """Number of components of a vector."""
        return self.objective.model.dense or self.objective.model.config.hidden_size

    def add_guide(self, vectors: Sequence[np.ndarray]) -> None:
        """Adds the vectors of a guide model to the training batches: for each file, float32 [N, C, E]."""
        self.files = [
            dataclasses.replace(file, rows={**file.rows, "guide": array}, strings=())
            for file, array in zip(self.files, vectors, strict=True)
        ]
        self.data_hash = self._hash()

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        if not self.files:
            yield from super().train_batches(start_step, shard)
        if self.config.loss.needs_guide and "guide" not in self.files[0].rows:
            raise UsageError(f"loss={self.config.embed.loss} needs vectors of the guide; use `bertjax train`")
        for step in range(start_step, self.total_steps):
            file, indices = self.order.batch(step)
            yield train_batch(self.files[file], indices, self._batching, shard)

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        if not self.eval_sets:
            return iter(()) if self.config.has_data else super().eval_batches(shard)
        return text_batches(self._tokenized_eval_texts, self._eval_batching, shard)

    def evaluate(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        vectors = self.eval_vectors(outputs)
        return {name: value for each in self.eval_sets for name, value in each.score(vectors).items()}

    def eval_vectors(self, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Returns the vector of each evaluation text, scaled to length 1, float32 [N, D]."""
        vectors = np.array(in_input_order(outputs, len(self.eval_texts))["vectors"])
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _MIN_NORM)

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Returns no paths: `prediction_records` contains all predictions."""
        return []

    def prediction_records(self) -> list[PredictionRecords]:
        """Returns the files of cosines and nearest documents."""
        return [self._set_records(each) for each in self.eval_sets]

    def _set_records(self, eval_set: EvalSet) -> PredictionRecords:
        def make(outputs: list[dict[str, np.ndarray]], include_logits: bool) -> Iterator[dict[str, Any]]:
            return eval_set.records(self.eval_vectors(outputs), self.eval_texts)

        return PredictionRecords(eval_set.records_file, make)

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of BM25, which ranks documents by the words that they share with the query."""
        return {name: value for each in self.eval_sets for name, value in each.baseline(self.eval_texts).items()}

    def cost_before(self, step: int) -> StepCost:
        total = StepCost()
        if not self.files:
            sizes = self.axis_sizes()
            return self._cost(step * sizes["rows"], sizes["length"])
        for file, count in enumerate(np.bincount(self.order.files(step), minlength=len(self.files))):
            for rows, length in self._first_shapes[file]:
                total += self._cost(int(count) * rows // len(self._first_shapes[file]), length)
        return total

    @functools.cached_property
    def _first_shapes(self) -> list[list[tuple[int, int]]]:
        """For each file, rows and row lengths of its first batches."""
        shapes: list[list[tuple[int, int]]] = []
        for file in self.files:
            order = MixedOrder([file], self.config.data.batch_size, self.config.seed, unique=False)
            batches = (
                train_batch(file, order.batch(step)[1], self._batching, SINGLE_SHARD)["input_ids"]
                for step in range(min(_COST_BATCHES, order.steps_per_epoch))
            )
            shapes.append([batch.shape for batch in batches])
        return shapes

    def _cost(self, rows: int, length: int) -> StepCost:
        model, positions = self.objective.model.config, rows * length
        # With chunks, the backward pass encodes again, which is not counted as useful work.
        flops, attention = flops_per_token(model, length), attention_flops_per_token(model, length)
        return StepCost(rows, positions, positions * flops, positions * attention)

    def axis_sizes(self, phase: int = 0) -> dict[str, int]:
        data, model = self.config.data, self.objective.model
        columns = max(2, len(data.columns)) if not self.config.loss.label else 2
        return {
            "rows": data.batch_size,
            "length": data.lengths[0] + (columns - 1) * data.lengths[1],
            "texts": columns,
            "documents": columns - 1,
            "example_texts": columns,
            "guide_width": self.vector_width,
            "labels": columns - 1,
            "pieces": model.config.vocab_size,
            "classes": 2,
        }

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        ids, sequences = batch["input_ids"][row], batch["sequence_ids"][row]
        tokenizer = self._encoder.tokenizer
        return "\n".join(
            f"text {text}: {' '.join(tokenizer.pieces(ids[sequences == place + 1].tolist()))}"
            for place, text in enumerate(batch["texts"][row])
            if text != NO_EXAMPLE
        )
