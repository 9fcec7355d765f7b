"""Config for text embedders."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.config.fields import from_config_dict
from bertjax.config.optimizer import OptimizerConfig
from bertjax.data.finetuning.dataset_rows import HUB_PREFIX, hub_columns, read_hub
from bertjax.data.finetuning.tables import ReadStats, Row, column_names, read_table
from bertjax.errors import UsageError, listed
from bertjax.model.config import AUTO, LSTM, ModelConfig
from bertjax.model.models import EmbeddingModel
from bertjax.tasks.embedding import sentence_transformers
from bertjax.tasks.embedding.sentence_embedder import Layer, Pooling, SentenceEmbedder, activation_name
from bertjax.tasks.finetuning.config import FinetuningConfig, FinetuningData
from bertjax.tasks.objectives.embedding_losses import LOSSES, EmbeddingLoss, LossOptions
from bertjax.utils.io import AnyPath
from bertjax.utils.json_files import read_object
from bertjax.utils.sections import Section, bounded

logger = logging.getLogger(__name__)

# bertjax poolings and activations, keyed by sentence-transformers name.
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh"}
# Fields that take the initial checkpoint's value if they are unset.
_EMBED_FIELDS = ("pooling", "normalize", "dense", "dense_activation")
_DATA_FIELDS = ("seq_len", "query_len", "query_prompt", "document_prompt", "scored_prompt")
# Default of `data.seq_len` for models that are not embedders.
_SEQ_LEN = 128


@dataclasses.dataclass(frozen=True)
class EmbedSource(Section, prefix="config.data.sources[]."):
    """One of several training files, an item of `config.data.sources`.

    Attributes:
      file: training file, see `EmbedData`.
      weight: number of steps, relative to the other files (default: 0, proportional to the rows of the file).
      columns: columns of the texts (default: (), `data.columns`).
    """

    file: str = ""
    weight: float = bounded(0.0, at_least=0)
    columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EmbedData(FinetuningData):
    """Data and batches of an embedder.

    Attributes:
      train_file, dev_file, test_file: .tsv (without quoting), .csv or .jsonl files, relative to `path` if it is set, or
        datasets on the Hugging Face Hub, `hf:ORG/NAME[/CONFIG]:SPLIT`.
      sources: several training files instead of `train_file`, such as `({'file': 'a.tsv'}, {'file': 'b.tsv'})`. All
        rows of a batch are from one file. See `EmbedSource`.
      columns: columns of the anchor, its positive and, optionally, hard negatives. With three or more columns, cells of
        the second may be lists of positives, and cells of the last may be lists of negatives. For `margin_mse`, two
        columns suffice: cells of the second may be lists of all documents.
      scored_columns: columns of two texts and their score, or their class for the loss `softmax`. `cosent`, `cosine`
        and `softmax` train on these columns. Dev and test files with these columns are evaluated by correlation, other
        files by the rank of each anchor's positive.
      retrieval: folder in BEIR's format to evaluate: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`.
      retrieval_split: name of the file in `qrels` (default: `eval_split` if there is such a file, else `test`).
      guide: checkpoint of the model whose vectors guide the losses `gist` and `distill_vectors`.
      seq_len: maximum tokens of a text, including special tokens (default: 0, the limit of the initial checkpoint if it
        is an embedder, else 128).
      query_len: maximum tokens of an anchor or query (default: 0, `seq_len`).
      query_prompt: prefix of anchors and queries (default: the query prompt of the initial checkpoint, or none).
      document_prompt: prefix of documents: all texts except anchors, queries, and scored pairs in evaluations (default:
        the document prompt of the initial checkpoint, or none).
      scored_prompt: prefix of both texts of scored pairs in evaluations (default: the default prompt of the initial
        checkpoint, or none), as in sentence-transformers' `EmbeddingSimilarityEvaluator`.
      batch_size: examples per global batch. `info_nce` and `gist` use the other examples of the batch as negatives.
      eval_batch_size: texts per evaluation batch.
      examples_per_row: maximum texts packed into a row. It must divide `batch_size`.
    """

    train_file: str = ""
    dev_file: str = ""
    test_file: str = ""
    sources: tuple[dict[str, Any], ...] = ()
    columns: tuple[str, ...] = ("anchor", "positive")
    scored_columns: tuple[str, ...] = ("sentence1", "sentence2", "score")
    retrieval: str = ""
    retrieval_split: str = ""
    guide: str = ""
    seq_len: int = bounded(0, at_least=0)
    query_len: int = bounded(0, at_least=0)
    query_prompt: str = AUTO
    document_prompt: str = AUTO
    scored_prompt: str = AUTO
    batch_size: int = bounded(128, at_least=1, at_most=1 << 20)
    eval_batch_size: int = bounded(128, at_least=1, at_most=1 << 20)
    examples_per_row: int = bounded(4, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scored_columns) != 3:
            raise UsageError(f"config.data.scored_columns={self.scored_columns} must name three columns")
        if not self.columns or len({*self.columns}) < len(self.columns):
            raise UsageError(f"config.data.columns={self.columns}; name at least one column, and each only once")
        if self.train_file and self.sources:
            raise UsageError("config.data.train_file and config.data.sources both set training files; use only one")
        _ = self.training_files  # Checks `sources`.

    @property
    def training_files(self) -> list[EmbedSource]:
        if self.train_file:
            return [EmbedSource(self.train_file)]
        files = [
            from_config_dict(EmbedSource(), item, f"config.data.sources[{i}]") for i, item in enumerate(self.sources)
        ]
        if any(not file.file for file in files):
            raise UsageError("an item of config.data.sources has no file; write {'file': 'pairs.tsv'}")
        if len({file.weight > 0 for file in files}) > 1:
            raise UsageError(
                "only some of config.data.sources have a weight; set a weight above 0 for all, or remove all weights"
            )
        return files

    @property
    def lengths(self) -> tuple[int, int]:
        """Maximum lengths in tokens: (anchors and queries, all other texts)."""
        length = self.seq_len or _SEQ_LEN
        return self.query_len or length, length

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts of queries, documents and texts of scored pairs, keyed by name."""
        prompts = {"query": self.query_prompt, "document": self.document_prompt, "scored": self.scored_prompt}
        return {name: "" if prompt == AUTO else prompt for name, prompt in prompts.items()}

    @property
    def has_files(self) -> bool:
        return bool(self.train_file or self.sources or self.dev_file or self.test_file or self.retrieval)

    def read_rows(self, file: str, columns: Sequence[str]) -> tuple[Iterator[Row], ReadStats]:
        """Reads columns of a file. The statistics are updated as rows are read.

        Rows may lack values after the first two columns, such as some of the negatives.
        """
        path = file if file.startswith(HUB_PREFIX) else str(Path(self.path).expanduser() / file)
        stats = ReadStats(path)
        if file.startswith(HUB_PREFIX):
            return read_hub(file, columns, stats, nullable=columns[2:]), stats
        return read_table(Path(path), columns, stats, nullable=columns[2:]), stats

    def has_columns(self, file: str, columns: Sequence[str]) -> bool:
        """Returns whether a file has all of `columns`."""
        names = hub_columns(file) if file.startswith(HUB_PREFIX) else column_names(Path(self.path).expanduser() / file)
        return {*columns} <= {*names}


@dataclasses.dataclass(frozen=True)
class EmbedOptions(LossOptions):
    """Vectors and loss of an embedder.

    Attributes:
      loss: `info_nce` (in-batch negatives), `gist` (in-batch negatives, except those that a guide model scores above
        the positive), `cosent` or `cosine` (scored pairs), `softmax` (pairs with a class, such as NLI), `margin_mse`
        (scores of a teacher in the column `data.scored_columns[2]`) or `distill_vectors` (vectors of a guide model).
      dims: sizes of truncated vectors whose losses are added, such as `(384, 128, 64)` (Matryoshka; default: (), only
        full vectors).
      chunk: texts to encode at once (default: 0, the whole batch). It limits the memory of large batches, and must
        divide `data.batch_size`.
      pooling: `mean`, `cls` or `last` token (default: the initial checkpoint's pooling, or mean).
      normalize: whether vectors have length 1, `true` or `false` (default: as in the initial checkpoint, or true).
      dense: width of a new dense layer after the pooling (default: 0, the initial checkpoint's dense layer, or none).
      dense_activation: `identity` or `tanh` (default: as in the initial checkpoint, or identity).
    """

    loss: str = bounded("info_nce", choices=tuple(LOSSES))
    dims: tuple[int, ...] = ()
    chunk: int = bounded(0, at_least=0)
    pooling: str = bounded(AUTO, choices=(AUTO, *POOLINGS.values()))
    normalize: str = bounded(AUTO, choices=(AUTO, "true", "false"))
    dense: int = bounded(0, at_least=0)
    dense_activation: str = bounded(AUTO, choices=(AUTO, *DENSE_ACTIVATIONS.values()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(dim, int) and dim > 0 for dim in self.dims):
            raise UsageError(f"config.embed.dims={self.dims} must be positive integers, such as (384, 128, 64)")
        if self.dims and self.loss == "softmax":
            raise UsageError("config.embed.dims is not supported by loss=softmax, whose classifier has a fixed width")
        for option in dataclasses.fields(LossOptions):
            name, value = option.name, getattr(self, option.name)
            if value != option.default and name not in LOSSES[self.loss].options:
                losses = ", ".join(loss for loss, spec in LOSSES.items() if name in spec.options)
                raise UsageError(f"config.embed.{name}={value} has no effect with loss={self.loss}; it is for {losses}")

    def make_model(self, config: ModelConfig) -> EmbeddingModel:
        """Builds the Flax module. Options set to `auto` get the module's defaults."""
        options: dict[str, Any] = {"pooling": self.pooling, "dense_activation": self.dense_activation}
        options = {name: value for name, value in options.items() if value != AUTO}
        return EmbeddingModel(config, dense=self.dense, normalize=self.normalize != "false", **options)


@dataclasses.dataclass(frozen=True)
class EmbedConfig(FinetuningConfig):
    """Config for a text embedder.

    Attributes:
      embed: vectors and loss, see `EmbedOptions`.
    """

    task: str = "embed"
    epochs: int = 1
    # Use AdamW, because its bias correction matters in short runs.
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=2e-5, warmup_steps=-1)
    embed: EmbedOptions = EmbedOptions()
    data: EmbedData = EmbedData()

    def __post_init__(self) -> None:
        super().__post_init__()
        data, embed = self.data, self.embed
        self.reject("embedders have no classes", "data.class_weights", "data.labels", "label_smoothing", "feature_head")
        self.reject("embedders use whole files", "data.train_share", "data.dev_share", "data.dev_seed")
        if self.grad_accum_steps > 1:
            raise UsageError(
                f"config.grad_accum_steps={self.grad_accum_steps} would remove in-batch negatives; use "
                "config.embed.chunk, which saves memory and does not change the loss"
            )
        if embed.chunk and (data.batch_size % embed.chunk or embed.chunk % data.examples_per_row):
            raise UsageError(
                f"config.embed.chunk={embed.chunk} must divide config.data.batch_size={data.batch_size} and be a "
                f"multiple of config.data.examples_per_row={data.examples_per_row}"
            )
        if self.loss.needs_guide and data.has_files and data.training_files and not data.guide:
            raise UsageError(f"loss={embed.loss} needs vectors of another model; set --config.data.guide=CKPT")
        if data.guide and not self.loss.needs_guide:
            fix = "use loss=gist or loss=distill_vectors"
            raise UsageError(f"config.data.guide has no effect with loss={embed.loss}; {fix}")
        if self.has_model and self.model.encoder == LSTM:
            raise UsageError("an LSTM encoder cannot be trained as an embedder; use a Transformer")

    @property
    def loss(self) -> EmbeddingLoss:
        return LOSSES[self.embed.loss]

    def with_checkpoint(self, workdir: AnyPath) -> "EmbedConfig":
        """Fills in unset pooling, normalization, dense layer, lengths and prompts from a checkpoint."""
        saved = read_object(workdir / "config.json", optional=True)
        if saved.get("task") == self.task:
            values = {**saved["data"], **saved["embed"]}
        else:
            embedder = sentence_transformers.read(workdir, self.model, is_workdir=True) or SentenceEmbedder()
            values = _fields(embedder, workdir, self.embed)
        if self.embed.dense and values.get("dense", 0) not in (0, self.embed.dense):
            raise UsageError(
                f"config.embed.dense={self.embed.dense}, but {workdir} has a dense layer of width {values['dense']}; "
                "leave config.embed.dense unset, or start from another checkpoint"
            )
        sections: dict[str, Any] = {}
        for name, fields in (("embed", _EMBED_FIELDS), ("data", _DATA_FIELDS)):
            section = getattr(self, name)
            unset = {field for field in fields if getattr(section, field) == getattr(type(section), field)}
            changes = {field: values[field] for field in unset & values.keys()}
            sections[name] = dataclasses.replace(section, **changes)
        return dataclasses.replace(self, **sections)

    def embedder(self, width: int, dense: dict[str, Any]) -> SentenceEmbedder:
        """Returns the modules after the encoder, for inference and export.

        `width` is the hidden size. `dense` contains `kernel` and `bias` of the dense layer, or is empty without one.
        """
        data, model = self.data, self.embed.make_model(self.model)
        mode = next(name for name, pooling in POOLINGS.items() if pooling == model.pooling)
        field = sentence_transformers.POOLING_FIELDS[mode]
        modules: list[Pooling | Layer] = [Pooling({"word_embedding_dimension": width, field: True}, (mode,))]
        if model.dense:
            activation = next(name for name, value in DENSE_ACTIVATIONS.items() if value == model.dense_activation)
            sizes = {"in_features": width, "out_features": model.dense, "bias": True}
            arrays = {"linear.weight": dense["kernel"].T, "linear.bias": dense["bias"]}
            modules.append(Layer("Dense", {**sizes, "activation_function": f"torch.nn.{activation}"}, arrays))
        if model.normalize:
            modules.append(Layer("Normalize", {}, {}))
        prompts, default_name = data.prompts, ""
        if default := prompts.pop("scored"):
            default_name = next((name for name, prompt in prompts.items() if prompt == default), "default")
            prompts[default_name] = default
        return SentenceEmbedder(
            tuple(modules),
            model.dense or width,
            max(data.lengths),
            prompts=prompts,
            default_prompt=default_name,
            similarity="cosine",
        )


def _fields(embedder: SentenceEmbedder, folder: AnyPath, embed: EmbedOptions) -> dict[str, Any]:
    """Converts the modules of a published checkpoint to values of `EmbedOptions` and `EmbedData`."""
    pooling, *layers = embedder.modules or (Pooling({}, ("mean",)), Layer("Normalize", {}, {}))
    modes = pooling.modes if isinstance(pooling, Pooling) and pooling.config.get("include_prompt", True) else ()
    dense = _dense_layer(embedder)
    others = [layer.name for layer in layers if layer is not dense]
    is_supported = len(modes) == 1 and modes[0] in POOLINGS and others in ([], ["Normalize"])
    values: dict[str, Any] = {"seq_len": embedder.max_seq_len}
    values |= {"query_prompt": embedder.prompt(True) or "", "document_prompt": embedder.prompt(False) or ""}
    values["scored_prompt"] = embedder.prompts.get(embedder.default_prompt, "")
    if unused := [name for name, prompt in embedder.prompts.items() if prompt and prompt not in values.values()]:
        logger.info(f"ignored prompts of {folder}: {', '.join(unused)}")
    if is_supported and not (embedder.refusal or embedder.lower_case or embedder.truncate_dim):
        if dense:
            values["dense"] = len(dense.arrays["linear.weight"])
            values["dense_activation"] = DENSE_ACTIVATIONS[activation_name(dense.config)]
        return {**values, "pooling": POOLINGS[modes[0]], "normalize": "true" if others else "false"}
    if AUTO in (embed.pooling, embed.normalize):
        raise UsageError(
            f"{folder} has {embedder.refusal or listed(map(str, embedder.modules))}; training and evaluation support "
            "one Pooling (mean, cls or lasttoken), one Dense (Identity or Tanh) and Normalize; use `bertjax encode`, "
            "or set config.embed.pooling and config.embed.normalize to replace the modules"
        )
    return values


def dense_params(embedder: SentenceEmbedder) -> dict[str, np.ndarray]:
    """Returns the dense layer after the pooling as parameters of `EmbeddingModel`, or {} without such a layer."""
    layer = _dense_layer(embedder)
    if layer is None:
        return {}
    weight = layer.arrays["linear.weight"]
    return {"dense/kernel": weight.T, "dense/bias": layer.arrays.get("linear.bias", np.zeros(len(weight), np.float32))}


def _dense_layer(embedder: SentenceEmbedder) -> Layer | None:
    match embedder.modules:
        case (Pooling(), Layer(name="Dense", feature="sentence_embedding") as layer, *_):
            is_supported = activation_name(layer.config) in DENSE_ACTIVATIONS and not layer.config.get("use_residual")
            return layer if is_supported else None
    return None
