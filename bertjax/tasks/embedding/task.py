"""Task that trains text embedders on tuples of texts, and evaluates the vectors."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching, eval_batches, in_input_order
from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.text_batches import BatchOrder, MixedOrder, TextExamples, train_batch
from bertjax.data.finetuning.text_columns import TextEncoder, read_examples
from bertjax.data.shard import SINGLE_SHARD, DataShard
from bertjax.errors import UsageError, listed
from bertjax.metrics.metric import Metric
from bertjax.metrics.nearest import unit_rows
from bertjax.model.config import ModelConfig
from bertjax.tasks.embedding.config import EmbedConfig
from bertjax.tasks.embedding.evaluation import EvalSet, ScoredPairs, read_eval_sets
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.embedding import Embedding
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.records import PredictionRecords
from bertjax.tasks.task import NumpyBatch

# Maximum length of a packed row, unless a single text may be longer.
_ROW_LEN = 512
# Number of batches that are built to estimate the cost of a step.
_COST_BATCHES = 4
# Maximum number of different row lengths in an evaluation.
_EVAL_LENGTHS = 4
# Log a note if a larger fraction of the rows is left out of each epoch.
_MAX_UNNOTED_FRACTION = 0.01


class EmbedTask(FinetuningTask):
    """Training and evaluation of a text embedder."""

    missing_data = "no training data; set --config.data.train_file=FILE with the columns anchor and positive"
    _guide = ""  # description of the guide model, for the data hash (default: "", no guide)
    accepts_any_encoder = True
    files: Sequence[TextExamples] = ()  # training files (empty: the task is built for evaluation only)
    eval_sets: Sequence[EvalSet] = ()  # sets of texts to evaluate
    eval_texts: Sequence[str] = ()  # distinct texts of all evaluation sets, in the order of `eval_examples`
    config: EmbedConfig
    objective: Embedding
    _classes: Sequence[str] = ()

    def load(self, train: bool) -> None:
        data = self.config.data
        if train and not data.training_files:
            raise UsageError(self.missing_data)
        self.config.check_rows(max(data.lengths), is_packed=True)
        prompts = {f"{name}_prompt": prompt for name, prompt in data.prompts.items()}
        query_len, document_len = data.lengths
        self._encoder = TextEncoder(self.tokenizer, query_len=query_len, document_len=document_len, **prompts)
        if train:
            self._read_training_files()
        self.eval_sets, texts = read_eval_sets(data, self.read_stats, self.data_notes)
        self.eval_first = bool(self.eval_sets)
        self._eval_keys, self.eval_texts = [*texts], [text for text, _ in texts]
        if not (train or texts):
            raise UsageError(f"no file for the {data.eval_split} set; set --config.data.{data.eval_split}_file=FILE")
        if texts:
            self.eval_examples = make_examples([self._encoder.encode(*text) for text in texts], {})
        for each in self.eval_sets:
            if isinstance(each, ScoredPairs) and len({*each.labels}) < 2:
                self.evaluation_problem = f"all scores of {each.name} are equal; use other data, or `bertjax predict`"
            if isinstance(each, ScoredPairs) and train and {f"{score:g}" for score in each.labels} <= {*self._classes}:
                raise UsageError(
                    f"{each.name} has the classes of the training files, which are not scores; evaluate on pairs with "
                    "a similarity, such as STS-B, or on text pairs (an anchor and its positive)"
                )

    def _read_training_files(self) -> None:
        data, loss = self.config.data, self.config.loss
        files: list[TextExamples] = []
        classes: list[list[str]] = []
        for file in data.training_files:
            columns = file.columns or (data.scored_columns[:2] if loss.label in ("score", "class") else data.columns)
            if loss.max_documents and len(columns) > 1 + loss.max_documents:
                raise UsageError(f"loss={self.config.embed.loss} needs two texts per row, not {', '.join(columns)}")
            label = data.scored_columns[2] if loss.label else ""
            rows, stats = data.read_rows(file.file, [*columns, *([label] if label else [])])
            self.read_stats.append(stats)
            examples, names = read_examples(rows, columns, label, loss.label, self._encoder, stats)
            if self.config.embed.loss == "cosine" and (score := np.abs(examples.rows["labels"]).max()) > 1:
                raise UsageError(
                    f"{file.file} has the score {score:g}, but loss=cosine needs scores from -1 to 1; scale them, or "
                    "use loss=cosent, which needs only their order"
                )
            classes.append(names)
            strings = examples.strings if loss.needs_guide else ()
            files.append(dataclasses.replace(examples, weight=file.weight or len(examples), strings=strings))
        if any(names != classes[0] for names in classes):
            raise UsageError("the training files have different classes; use the same classes in each")
        if any(file.num_columns < 1 + loss.min_documents for file in files):
            needed = ("an anchor", "a positive", "a negative")[: 1 + loss.min_documents]
            raise UsageError(f"loss={self.config.embed.loss} needs {' and '.join(needed)}; set config.data.columns")
        if classes[0]:
            self.data_notes.append(f"{len(classes[0]):,} classes: {listed(classes[0])}")
        self.files, self._classes = files, classes[0]

    def make_objective(self, model: ModelConfig) -> Embedding:
        embed = self.config.embed
        module = embed.make_model(model)
        if wrong := [dim for dim in embed.dims if dim > module.width]:
            raise UsageError(
                f"config.embed.dims contains {wrong[0]}; use 1 to {module.width}, the width of the vectors"
            )
        return Embedding(module, embed.loss, embed, embed.dims, embed.chunk, len(self._classes))

    def _set_schedule(self) -> None:
        super()._set_schedule()
        if not self.files:
            return
        config, data = self.config, self.config.data
        self._mixed_order = MixedOrder(self.files, data.batch_size, config.seed, config.loss.in_batch_negatives)
        text_counts = {config.embed.chunk or data.batch_size * file.num_columns for file in self.files}
        rows = [count // data.examples_per_row for count in text_counts]
        self._set_training_schedule(self._mixed_order.steps_per_epoch, data.batch_size, *rows)
        for file, order in zip(self.files, self._mixed_order.orders, strict=True):
            if (fraction := order.left_out_fraction) > _MAX_UNNOTED_FRACTION:
                self.data_notes.append(
                    f"{file.name}: about {fraction:.1%} of the rows are left out of each epoch, because their texts "
                    "occur in too many other rows; use a smaller batch, or fewer rows with the same text"
                )

    def _select_metric(self) -> Metric | None:
        config, metrics = self.config, [name for each in self.eval_sets for name in each.metrics]
        if config.select_by and config.select_by not in metrics:
            raise UsageError(f"unknown metric: config.select_by={config.select_by!r}; use one of {listed(metrics)}")
        if config.patience and not metrics:
            raise UsageError(f"config.patience={config.patience} needs evaluation data; set config.data.dev_file")
        return Metric(config.select_by or metrics[0]) if metrics else None

    def eval_data_name(self) -> str:
        return listed(each.name for each in self.eval_sets)

    @functools.cached_property
    def _batching(self) -> Batching:
        data = self.config.data
        longest = max(data.lengths)
        row_len = max(longest, min(_ROW_LEN, longest * data.examples_per_row))
        return Batching(data.batch_size, data.bucket, row_len, data.examples_per_row)

    def hash_data(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.texts.fingerprint().encode())
            for name, values in sorted(file.rows.items()):
                if name != "guide":  # The vectors of a guide differ by rounding between processors.
                    digest.update(f"{name} {values.shape}".encode() + values.tobytes())
        digest.update(self._guide.encode())
        digest.update(json.dumps([self._eval_keys, [each.hash_content for each in self.eval_sets]]).encode())
        return digest.hexdigest()

    def add_guide(self, vectors: Sequence[np.ndarray], description: str) -> None:
        """Adds a guide model's vectors, float32 [examples, columns, vector width] per file, to the training batches.

        `description` identifies the guide model.
        """
        self.files = [
            dataclasses.replace(file, rows={**file.rows, "guide": array}, strings=())
            for file, array in zip(self.files, vectors, strict=True)
        ]
        self._guide = description
        self.data_hash = self.hash_data()

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        if not self.files:
            yield from super().train_batches(start_step, shard)
        if self.config.loss.needs_guide and "guide" not in self.files[0].rows:
            raise UsageError(f"loss={self.config.embed.loss} needs vectors of the guide; use `bertjax train`")
        for step in range(start_step, self.total_steps):
            file, indices = self._mixed_order.batch(step)
            yield train_batch(self.files[file], indices, self._batching, shard, self.config.loss.in_batch_negatives)

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        if self.eval_examples is None:
            return super().eval_batches(shard)
        # Pad rows to few different lengths, because the encoder is compiled for each length.
        data, bucket, longest = self.config.data, max(1, self.config.data.bucket), max(self.config.data.lengths)
        bucket *= math.ceil(longest / bucket / _EVAL_LENGTHS)
        batching = Batching(data.eval_batch_size, bucket if data.bucket else 0, longest)
        return eval_batches(self.eval_examples, batching, shard)

    def final_metrics(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        vectors = self.eval_vectors(outputs)
        return {name: value for each in self.eval_sets for name, value in each.score(vectors).items()}

    def eval_vectors(self, outputs: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Returns the vector of each evaluation text, scaled to length 1, float32 [N, D]."""
        return unit_rows(np.array(in_input_order(outputs, len(self.eval_texts))["vectors"]))

    def prediction_records(self) -> list[PredictionRecords]:
        return [PredictionRecords(each.records_file, functools.partial(self._records, each)) for each in self.eval_sets]

    def _records(self, eval_set: EvalSet, outputs: list[dict[str, np.ndarray]]) -> Iterator[dict[str, Any]]:
        return eval_set.records(self.eval_vectors(outputs), self.eval_texts)

    def baseline(self) -> dict[str, float]:
        """Returns baseline metrics: BM25 for rankings, and the fraction of shared words for scored pairs."""
        return {name: value for each in self.eval_sets for name, value in each.baseline(self.eval_texts).items()}

    def unfrozen_cost_before(self, step: int) -> StepCost:
        total = StepCost()
        if not self.files:
            sizes = self.synthetic_sizes()
            return self._cost(step * sizes["rows"], sizes["length"])
        for file, count in enumerate(np.bincount(self._mixed_order.files(step), minlength=len(self.files))):
            for rows, length in self._first_shapes[file]:
                total += self._cost(int(count) * rows // len(self._first_shapes[file]), length)
        return total

    @functools.cached_property
    def _first_shapes(self) -> list[list[tuple[int, int]]]:
        """Shapes [rows, length] of the first batches of each file."""
        shapes: list[list[tuple[int, int]]] = []
        for file in self.files:
            # Allow repeated texts, because exchanging examples to avoid them hardly changes the row lengths.
            order = BatchOrder(file.keys, self.config.data.batch_size, self.config.seed, unique=False)
            steps = range(min(_COST_BATCHES, order.steps_per_epoch))
            batches = (train_batch(file, order.batch(step), self._batching, SINGLE_SHARD) for step in steps)
            shapes.append([batch["input_ids"].shape for batch in batches])
        return shapes

    def synthetic_sizes(self, phase: int = 0) -> dict[str, int]:
        data, model = self.config.data, self.objective.model
        columns = 2 if self.config.loss.max_documents else max(2, len(data.columns))
        return {
            "rows": data.batch_size,
            "length": data.lengths[0] + (columns - 1) * data.lengths[1],
            "texts": columns,
            "documents": columns - 1,
            "example_texts": columns,
            "guide_width": model.width,
            "labels": columns - 1,
            "pieces": model.config.vocab_size,
            "classes": 2,
        }

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        """Formats each text of a row as a line: index of its example, column, labels if there are any, and pieces."""
        ids, sequences = batch["input_ids"][row], batch["sequence_ids"][row]
        columns = 1 + batch["document_weights"].shape[1]
        lines = []
        for place, text in enumerate(batch["texts"][row]):
            if text != NO_EXAMPLE:
                example, column = divmod(int(text), columns)
                labels = f", labels {batch['labels'][example].tolist()}" if "labels" in batch else ""
                pieces = " ".join(self.tokenizer.pieces(ids[sequences == place + 1].tolist()))
                lines.append(f"example {example}, column {column}{labels}: {pieces}")
        return "\n".join(lines)
