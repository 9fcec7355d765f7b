"""Tables of transformers model families, used by imports and exports.

bertjax stacks the layers and has a separate axis for attention heads. The other formats store one array per layer, and
store kernels as matrices: [in, out] in TensorFlow, where names end in `/kernel`, otherwise [out, in].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import ENCODER
from bertjax.model.heads import DiscriminatorHead
from bertjax.model.models import EncoderModel, PretrainingModel, SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Optional modules of a checkpoint, each either complete or missing. ENCODER is in every checkpoint.
POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER = "pooler", "masked_lm", "next_sentence", "classifier"
DISCRIMINATOR = "discriminator"
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Activations of `ModelConfig`, keyed by transformers name. `gelu` is the exact erf form, unlike in
# google-research/bert. Exports use the first name that maps to an activation.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_erf"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **{name: name for name in ("relu", "silu", "tanh")},
    "swish": "silu",
}
# Value of `Family.token_ids` for families whose configs contain the ids of several special tokens.
TOKEN_IDS = {
    **{"pad_token_id": "pad", "bos_token_id": "cls", "cls_token_id": "cls", "eos_token_id": "sep"},
    **{"sep_token_id": "sep", "mask_token_id": "mask"},
}
# Suffixes of bertjax paths, mapped to suffixes of transformers names. Tables are listed by full name, without suffix.
_LEAVES = {"": "", "/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """Kind of output layer.

    Attributes:
      task: task that fine-tunes models of this kind.
      build_model: function that builds the Flax module from a config and a number of outputs.
      pipeline: pipeline tag of model cards on the Hugging Face Hub.
      num_outputs: number of outputs (default: 0, one output per label).
    """

    task: str
    build_model: Callable[[ModelConfig, int], nn.Module]
    pipeline: str
    num_outputs: int = 0


OUTPUT_KINDS = {
    CLASSES: OutputKind("text", SequenceModel, "text-classification"),
    MULTILABEL: OutputKind("text", SequenceModel, "text-classification"),
    CHOICES: OutputKind("swag", SequenceModel, "multiple-choice", num_outputs=1),
    TAGS: OutputKind("ner", functools.partial(TokenModel, head_dropout=True), "token-classification"),
    SPANS: OutputKind("squad", functools.partial(TokenModel, head_dropout=False), "question-answering", num_outputs=2),
}


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """Model class of transformers.

    Attributes:
      modules: modules besides the encoder.
      output_kinds: kinds of output layer that the class may have, the most common one first (default: ("",), no output
        layer).
      output_layer: transformers name of the output layer.
      pooler: transformers name of the dense layer before the output layer (default: "", as in `Family.arrays`).
    """

    modules: tuple[str, ...]
    output_kinds: tuple[str, ...] = ("",)
    output_layer: str = "classifier"
    pooler: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """Config fields, model classes and arrays of a transformers model family, with their bertjax counterparts.

    Attributes:
      model_type: `model_type` of a config.
      fields: maps field names of `ModelConfig` to field names of the transformers config. Activations are translated.
      classes: model classes, keyed by name.
      prefix: prefix of the encoder's array names. Only arrays of an encoder without heads lack it.
      arrays: (bertjax path, name in the safetensors file) of each dense layer, norm and table. `{layer}` is the layer
        number. A third element, `index/count`, is the position of the kernel in a fused transformers array of `count`
        kernels. In `heads index/count`, this array contains the `count` kernels of the first head, then those of the
        next head.
      tokenizer_class: tokenizer class for folders without `tokenizer_class` (default: use `tokenizer.json` as it is).
      values: `ModelConfig` values for fields that a config omits, and for fields that all models of the family share.
      fixed: config fields with a single supported value.
      refused: config fields that must be unset or false.
      read_fields: function from a config to other fields of `ModelConfig`.
      write_fields: function from a `ModelConfig` to other config fields.
      has_own_code: whether transformers runs custom code from the folder, which the config's `auto_map` names.
      token_ids: names of special tokens, keyed by the config field that contains the token's id.
    """

    model_type: str
    fields: Mapping[str, str]
    classes: Mapping[str, ModelClass]
    prefix: str
    arrays: tuple[tuple[str, ...], ...]
    tokenizer_class: str = "PreTrainedTokenizer"
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ("is_decoder", "is_causal", "add_cross_attention", "quantization_config")
    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    write_fields: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}
    has_own_code: bool = False
    token_ids: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"pad_token_id": "pad"})

    @property
    def base_class(self) -> str:
        """Model class of an encoder without heads."""
        return self.class_name("", set())

    @property
    def tied(self) -> dict[str, str]:
        """Maps each tied copy that a checkpoint may contain (decoder weight and bias) to its original array."""
        names = {path: name for path, name, *_ in self.arrays}
        decoder, bias = names["masked_lm/decoder"], names["masked_lm/bias"]
        copies = {decoder: names["encoder/embeddings/token"], f"{decoder.removesuffix('weight')}bias": bias}
        return {copy: original for copy, original in copies.items() if copy != original}

    def class_name(self, output_kind: str, modules: set[str]) -> str:
        """Returns the model class with an output layer or, if `output_kind` is "", with the heads in `modules`."""
        heads = modules - {ENCODER, POOLER}
        for name, each in self.classes.items():
            if output_kind in each.output_kinds and (output_kind or {*each.modules} - {POOLER} == heads):
                return name
        kind = f"output layer for {output_kind}" if output_kind else f"heads {listed(sorted(heads))}"
        raise UsageError(f"{self.model_type} models of transformers have no class with this {kind}")

    def parameters(
        self, config: ModelConfig, output_kind: str = "", num_outputs: int = 0, num_rows: int = 0
    ) -> list["Parameter"]:
        """Lists all parameters of a model.

        `output_kind` is the kind of the output layer (default: "", no output layer), and `num_outputs` its width.
        `num_rows` is the number of token embeddings in other formats (default: 0, `config.vocab_size`).
        """
        arrays, shapes = [*self.arrays], parameter_shapes(config, output_kind, num_outputs)
        required = {ENCODER}
        if output_kind:
            model_class = self.classes[self.class_name(output_kind, set())]
            required |= {*model_class.modules}
            pooler = [(path, name) for path, name, *_ in arrays if path.startswith(POOLER)]
            if model_class.pooler:
                pooler = [("pooler/dense", model_class.pooler)]
            arrays = [*pooler, (CLASSIFIER, model_class.output_layer), *arrays]
        table: list[Parameter] = []
        paths, names = set(), set()
        for path, name, *parts in arrays:
            # Keep only the first entry for a path or an unfused array. Later entries belong to heads of other classes.
            if path in paths or (name in names and not parts):
                continue
            paths.add(path)
            names.add(name)
            *heads, part = (parts or ["0/1"])[0].split()
            index, count = map(int, part.split("/"))
            is_stacked = "{layer}" in name
            is_vocabulary = path in ("encoder/embeddings/token", "masked_lm/bias", "masked_lm/decoder")
            for leaf in [leaf for leaf in _LEAVES if path + leaf in shapes]:
                parameter = Parameter(
                    path + leaf,
                    name + _LEAVES[leaf],
                    shapes[path + leaf][is_stacked:],
                    num_layers=config.num_hidden_layers if is_stacked else 0,
                    first_layer=int("attention_norm" in path and not config.first_attention_norm),
                    num_input_axes=(1 + path.endswith("attention/output")) if leaf == "/kernel" else 0,
                    unpadded_rows=(num_rows or config.vocab_size) if is_vocabulary else 0,
                    part=(index, count, config.num_attention_heads if heads else 1),
                    is_required=path.partition("/")[0] in required,
                )
                table.append(parameter)
        return table


@functools.cache
def parameter_shapes(config: ModelConfig, output_kind: str, num_outputs: int) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of all parameters that a model with this output layer may have, keyed by path."""
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions")
    batch = dict.fromkeys(names, jnp.zeros((1, 8), jnp.int32))
    # Scan the layers, so that a single layer is traced.
    config = dataclasses.replace(config, attention="xla", scan_layers="true")
    models: list[tuple[str, nn.Module, Any]] = [
        ("", PretrainingModel(config), batch),
        ("", EncoderModel(config), batch),
        (f"{DISCRIMINATOR}/", DiscriminatorHead(config), jnp.zeros((1, config.hidden_size))),
    ]
    if output_kind:
        models.append(("", OUTPUT_KINDS[output_kind].build_model(config, num_outputs), batch))
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, model, inputs in models:
        params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), inputs))["params"]
        leaves: dict[str, Any] = flatten_dict(params, sep="/")
        shapes |= {prefix + path: leaf.shape for path, leaf in leaves.items()}
    return shapes


@dataclasses.dataclass(frozen=True)
class Parameter:
    """bertjax parameter and its transformers counterpart.

    Attributes:
      path: path in bertjax.
      name: transformers name; contains `{layer}` if each layer has an array.
      shape: shape in bertjax, without the layer axis.
      num_layers: number of layers (default: 0, no layer axis).
      first_layer: lowest layer that has the parameter in transformers. In bertjax, lower layers have an unused array.
      num_input_axes: number of leading axes of a kernel that are input axes (default: 0, not a kernel).
      unpadded_rows: number of rows in other formats, for parameters whose first axis is the padded vocabulary (default:
        0, not padded).
      part: (index, count, heads), the position of the kernel in a fused array of `count` kernels, interleaved over
        `heads` (default: (0, 1, 1), not fused).
      is_required: whether the model cannot be used without the parameter's module (default: False).
    """

    path: str
    name: str
    shape: tuple[int, ...]
    num_layers: int = 0
    first_layer: int = 0
    num_input_axes: int = 0
    unpadded_rows: int = 0
    part: tuple[int, int, int] = (0, 1, 1)
    is_required: bool = False

    @property
    def module(self) -> str:
        return self.path.partition("/")[0]

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape in bertjax, with the layer axis."""
        return (self.num_layers, *self.shape) if self.num_layers else self.shape

    @property
    def names(self) -> list[str]:
        """Names in transformers, one per layer for layer parameters."""
        layers = range(self.first_layer, self.num_layers)
        return [self.name.format(layer=layer) for layer in layers] if self.num_layers else [self.name]

    def rows(self, array: np.ndarray) -> np.ndarray:
        """Returns a view of a bertjax array, with one row per name in `names`."""
        return array[self.first_layer :] if self.num_layers else array[None]

    def stored(self, array: np.ndarray, name: str) -> np.ndarray:
        """Returns a view of one layer's bertjax array in the layout that array `name` has in the other format."""
        if self.num_input_axes:
            matrix = array.reshape(math.prod(self.shape[: self.num_input_axes]), -1)
            return matrix if name.endswith("/kernel") else matrix.T
        if self.unpadded_rows:
            return array[: self.unpadded_rows]
        return array.reshape(-1) if self.num_layers else array

    def part_of(self, array: np.ndarray) -> np.ndarray:
        """Returns this parameter's slice of a transformers array (fused or not), as a view [heads or 1, rows, ...]."""
        index, count, heads = self.part
        return array.reshape(heads, count, -1, *array.shape[1:])[:, index]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the array `name` in another format, without allocating memory."""
        rows, *rest = self.stored(np.broadcast_to(np.int8(0), self.shape), name).shape
        return (rows * self.part[1], *rest)


def import_params(
    table: Sequence[Parameter],
    shapes: Mapping[str, Sequence[int]],
    read_array: Callable[[str], np.ndarray],
    source: str,
    format_name: Callable[[str], str] = str,
) -> dict[str, np.ndarray]:
    """Converts the arrays of a checkpoint from another format, one at a time to save memory.

    `shapes` contains the shape of each array of the checkpoint, and `read_array` reads an array by name. `source` is
    the path of the checkpoint, for error messages. `format_name` converts a transformers name to the other format's
    name (default: unchanged).

    Returns:
      float32 arrays, keyed by bertjax path. Padding rows of the vocabulary are 0.
    """
    names = {parameter.path: [format_name(name) for name in parameter.names] for parameter in table}
    modules = {each.module for each in table if each.is_required or any(name in shapes for name in names[each.path])}
    parameters = [parameter for parameter in table if parameter.module in modules]
    expected = {name: parameter.stored_shape(name) for parameter in parameters for name in names[parameter.path]}
    if problem := shape_differences(shapes, expected):
        fix = "use the matching config"
        if shapes.keys() - expected.keys():
            fix = "correct `architectures` in the config, which names the class of the model, or remove other arrays"
        raise UsageError(f"the arrays of {source} do not match its config: {problem}; {fix}")
    params = {}
    for parameter in parameters:
        params[parameter.path] = np.zeros(parameter.stacked_shape, np.float32)
        if parameter.first_layer:
            params[parameter.path][: parameter.first_layer] = 1.0  # scale of an unused norm
        for row, name in zip(parameter.rows(params[parameter.path]), names[parameter.path], strict=True):
            target = parameter.stored(row, name)
            target[...] = _to_float32(parameter.part_of(read_array(name)), name, source).reshape(target.shape)
    return params


def shape_differences(shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str:
    """Describes how the shapes of arrays, keyed by name, differ from `expected`. Returns "" if they are equal."""
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "not part of the model": [name for name in shapes if name not in expected],
        "with a different shape": [
            f"{name} {tuple(shapes[name])} instead of {tuple(shape)}"
            for name, shape in expected.items()
            if tuple(shapes.get(name, shape)) != tuple(shape)
        ],
    }
    return "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)


def _to_float32(array: np.ndarray, name: str, source: str) -> np.ndarray:
    if array.dtype.name not in FLOAT_DTYPES:
        raise UsageError(f"{source}: {name} has dtype {array.dtype.name}; weights must be {', '.join(FLOAT_DTYPES)}")
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    if not np.isfinite(converted).all():
        raise UsageError(f"{source}: {name} contains values that are not finite in float32; use a different checkpoint")
    return converted


def export_params(table: Sequence[Parameter], params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays, keyed by transformers name. Removes each parameter from `params` to save memory."""
    if unknown := sorted(params.keys() - {parameter.path for parameter in table}):
        raise UsageError(
            f"Hugging Face's format cannot store the parameters {listed(unknown)}; use the bertjax checkpoint itself"
        )
    arrays: dict[str, np.ndarray] = {}
    for parameter in [parameter for parameter in table if parameter.path in params]:
        for row, name in zip(parameter.rows(params.pop(parameter.path)), parameter.names, strict=True):
            array = arrays.setdefault(name, np.zeros(parameter.stored_shape(name), np.float32))
            part = parameter.part_of(array)
            part[...] = parameter.stored(row, name).reshape(part.shape)
    return arrays
