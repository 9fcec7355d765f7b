"""Model families of transformers, described as data that is read in both directions.

bertjax stacks the layers and has a separate axis for attention heads. The other formats store one array per layer, and
kernels as matrices: [in, out] in TensorFlow, whose names end in `/kernel`, else [out, in].
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Modules of a model. A checkpoint contains the complete encoder. Each other module is either complete or missing.
ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER = "encoder", "pooler", "masked_lm", "next_sentence", "classifier"


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """Model class of transformers.

    Attributes:
      modules: modules besides the encoder.
      output_kinds: kinds of the output layer, the most common first (default: "", no output layer).
      output_layer: name of the output layer.
    """

    modules: tuple[str, ...]
    output_kinds: tuple[str, ...] = ("",)
    output_layer: str = "classifier"


@dataclasses.dataclass(frozen=True)
class Family:
    """Config fields, model classes and arrays of a model family in transformers, and what they are in bertjax.

    Attributes:
      model_type: `model_type` of a config.
      fields: names of config fields by their names in `ModelConfig`.
      required: fields of `ModelConfig` that a config must set.
      activations: values of `hidden_act` and of `ModelConfig.hidden_act`. Exports use the first name of a value.
      fixed: config fields with a single supported value.
      refused: config fields that must be unset or false.
      classes: model classes by name.
      base_class: class of an encoder without heads. Only its arrays lack `prefix`.
      prefix: prefix of the names of the encoder's and the pooler's arrays.
      arrays: path in bertjax, name in transformers, and axes: V padded vocabulary, P positions, S segments, D hidden
        size, H heads, K head size, M size of the MLP, O outputs. `inputs -> outputs` is a dense layer with weight and
        bias, and a name that ends in `LayerNorm` is a norm with weight and bias.
      tied: copies of arrays that old checkpoints store, and the original arrays.
      ignored: other arrays of old checkpoints that are not parameters.
      old_names: ends of array names in old checkpoints, and the current ends.
    """

    model_type: str
    fields: Mapping[str, str]
    required: tuple[str, ...]
    activations: Mapping[str, str]
    fixed: Mapping[str, Any]
    refused: tuple[str, ...]
    classes: Mapping[str, ModelClass]
    base_class: str
    prefix: str
    arrays: tuple[tuple[str, str, str], ...]
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    old_names: Mapping[str, str]

    def class_name(self, output_kind: str, modules: set[str]) -> str:
        """Returns the model class for an output layer ("": none) or, without one, for the heads among `modules`."""
        classes = {name: each for name, each in self.classes.items() if output_kind in each.output_kinds}
        heads = modules - {ENCODER, POOLER}
        return next(name for name, each in classes.items() if output_kind or {*each.modules} - {POOLER} == heads)

    def parameters(
        self, config: ModelConfig, output_kind: str = "", num_outputs: int = 0, num_rows: int = 0
    ) -> list["Parameter"]:
        """Lists all parameters of a model.

        `output_kind` is the kind of the output layer (default: "", no output layer), and `num_outputs` its width.
        `num_rows` is the number of token embeddings in other formats (default: 0, `config.vocab_size`).
        """
        sizes = {
            "V": config.padded_vocab_size,
            "P": config.max_position_embeddings,
            "S": config.type_vocab_size,
            "D": config.hidden_size,
            "H": config.num_attention_heads,
            "K": config.head_size,
            "M": config.intermediate_size,
            "O": num_outputs,
            "2": 2,
        }
        arrays = [*self.arrays]
        if output_kind:
            arrays.append((CLASSIFIER, self.classes[self.class_name(output_kind, set())].output_layer, "D -> O"))
        table = []
        for path, name, axes in arrays:
            inputs, outputs = (tuple(sizes[axis] for axis in part.split()) for part in axes.rpartition("->")[::2])
            layers = config.num_hidden_layers if "{layer}" in name else 0
            if inputs or name.endswith("LayerNorm"):
                leaf = "kernel" if inputs else "scale"
                table.append(Parameter(f"{path}/{leaf}", f"{name}.weight", inputs + outputs, layers, len(inputs)))
                table.append(Parameter(f"{path}/bias", f"{name}.bias", outputs, layers))
            else:
                rows = (num_rows or config.vocab_size) if axes.startswith("V") else 0
                table.append(Parameter(path, name, outputs, layers, unpadded_rows=rows))
        return table


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Parameter of bertjax and its counterpart in transformers.

    Attributes:
      path: path in bertjax.
      name: name in transformers; contains `{layer}` if each layer has an array.
      shape: shape in bertjax, without the layer axis.
      num_layers: number of layers (default: 0, no layer axis).
      num_input_axes: number of leading axes of a kernel that are input axes (default: 0, not a kernel).
      unpadded_rows: number of rows in other formats, for parameters whose first axis is the padded vocabulary (default:
        0, not padded).
    """

    path: str
    name: str
    shape: tuple[int, ...]
    num_layers: int = 0
    num_input_axes: int = 0
    unpadded_rows: int = 0

    @property
    def module(self) -> str:
        return self.path.partition("/")[0]

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape in bertjax, with the layer axis."""
        return (self.num_layers, *self.shape) if self.num_layers else self.shape

    @property
    def names(self) -> list[str]:
        """Names in transformers, one per layer for parameters of layers."""
        return [self.name.format(layer=layer) for layer in range(self.num_layers)] or [self.name]

    def stored(self, array: np.ndarray, name: str) -> np.ndarray:
        """Returns a view of one layer's array of bertjax with the shape of the array `name` in another format."""
        if self.num_input_axes:
            matrix = array.reshape(math.prod(self.shape[: self.num_input_axes]), -1)
            return matrix if name.endswith("/kernel") else matrix.T
        if self.unpadded_rows:
            return array[: self.unpadded_rows]
        return array.reshape(-1) if self.num_layers else array

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the array `name` in another format, without allocating memory."""
        return self.stored(np.broadcast_to(np.int8(0), self.shape), name).shape


def import_params(
    table: Sequence[Parameter],
    shapes: Mapping[str, Sequence[int]],
    read_array: Callable[[str], np.ndarray],
    source: str,
    format_name: Callable[[str], str] = str,
) -> dict[str, np.ndarray]:
    """Converts the arrays of a checkpoint from another format, one at a time to save memory.

    `shapes` contains the shape of each array of the checkpoint, and `read_array` reads an array by name. `source` is
    the path of the checkpoint, for error messages. `format_name` converts a name in transformers to the format's name
    (default: unchanged).

    Returns:
      float32 arrays by bertjax's parameter path. The padding of the vocabulary is 0.
    """
    names = {parameter.path: [format_name(name) for name in parameter.names] for parameter in table}
    # The encoder is required, and so is the output layer of a fine-tuned checkpoint.
    modules = {ENCODER} | {parameter.module for parameter in table if parameter.module == CLASSIFIER}
    modules |= {parameter.module for parameter in table if any(name in shapes for name in names[parameter.path])}
    parameters = [parameter for parameter in table if parameter.module in modules]
    expected = {name: parameter.stored_shape(name) for parameter in parameters for name in names[parameter.path]}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "not part of BERT": [name for name in shapes if name not in expected],
        "with a shape that differs from the config": [
            f"{name} {tuple(shapes[name])} instead of {shape}"
            for name, shape in expected.items()
            if tuple(shapes.get(name, shape)) != shape
        ],
    }
    if any(problems.values()):
        text = "; ".join(f"{problem}: {listed(arrays)}" for problem, arrays in problems.items() if arrays)
        fix = "use the matching config"
        if problems["not part of BERT"]:
            fix = "bertjax reads only BERT's own arrays, as the config defines them; rename or remove the others"
        raise UsageError(f"the arrays of {source} are not those of BERT with its config: {text}; {fix}")
    params = {}
    for parameter in parameters:
        params[parameter.path] = np.zeros(parameter.stacked_shape, np.float32)
        rows = params[parameter.path].reshape(-1, *parameter.shape)
        for row, name in zip(rows, names[parameter.path], strict=True):
            parameter.stored(row, name)[...] = _to_float32(read_array(name), name, source)
    return params


def _to_float32(array: np.ndarray, name: str, source: str) -> np.ndarray:
    if array.dtype.name not in FLOAT_DTYPES:
        raise UsageError(f"{source}: {name} has dtype {array.dtype.name}; weights must be {', '.join(FLOAT_DTYPES)}")
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    if not np.isfinite(converted).all():
        raise UsageError(f"{source}: {name} contains values that are not finite in float32; use a different checkpoint")
    return converted


def export_params(table: Sequence[Parameter], params: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays as in transformers. Removes each parameter from `params` to save memory."""
    if unknown := sorted(params.keys() - {parameter.path for parameter in table}):
        raise UsageError(
            f"Hugging Face's format cannot store the parameters {listed(unknown)}; use the bertjax checkpoint itself"
        )
    for parameter in table:
        if parameter.path in params:
            rows = params.pop(parameter.path).reshape(-1, *parameter.shape)
            for row, name in zip(rows, parameter.names, strict=True):
                yield name, np.ascontiguousarray(parameter.stored(row, name))
