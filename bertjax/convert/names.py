"""Names and shapes of BERT's parameters in bertjax and in other checkpoint formats, and conversions of their arrays.

A checkpoint is a dictionary of arrays by name. bertjax stacks the layers and has a separate axis for attention heads.
The other formats store one matrix per layer: [in, out] in TensorFlow, whose names end in `/kernel`, else [out, in].
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bertjax.convert.output_kinds import OUTPUT_KINDS
from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Modules of a model. A checkpoint contains the complete encoder. Each other module is either complete or missing.
ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER = "encoder", "pooler", "masked_lm", "next_sentence", "classifier"

_LAYER = "bert.encoder.layer.{layer}"
# Path in bertjax, name in transformers, and axes: V padded vocabulary, P positions, S segments, D hidden size, H heads,
# K head size, M size of the MLP, O outputs. `inputs -> outputs` is a dense layer with weight and bias.
BERT = (
    ("encoder/embeddings/token", "bert.embeddings.word_embeddings.weight", "V D"),
    ("encoder/embeddings/position", "bert.embeddings.position_embeddings.weight", "P D"),
    ("encoder/embeddings/segment", "bert.embeddings.token_type_embeddings.weight", "S D"),
    ("encoder/embeddings/norm", "bert.embeddings.LayerNorm", "D"),
    ("encoder/layers/attention/query", f"{_LAYER}.attention.self.query", "D -> H K"),
    ("encoder/layers/attention/key", f"{_LAYER}.attention.self.key", "D -> H K"),
    ("encoder/layers/attention/value", f"{_LAYER}.attention.self.value", "D -> H K"),
    ("encoder/layers/attention/output", f"{_LAYER}.attention.output.dense", "H K -> D"),
    ("encoder/layers/attention_norm", f"{_LAYER}.attention.output.LayerNorm", "D"),
    ("encoder/layers/mlp_in", f"{_LAYER}.intermediate.dense", "D -> M"),
    ("encoder/layers/mlp_out", f"{_LAYER}.output.dense", "M -> D"),
    ("encoder/layers/mlp_norm", f"{_LAYER}.output.LayerNorm", "D"),
    ("pooler/dense", "bert.pooler.dense", "D -> D"),
    ("masked_lm/transform", "cls.predictions.transform.dense", "D -> D"),
    ("masked_lm/norm", "cls.predictions.transform.LayerNorm", "D"),
    ("masked_lm/bias", "cls.predictions.bias", "V"),
    ("next_sentence/dense", "cls.seq_relationship", "D -> 2"),
)


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

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the array `name` in another format, which stores a separate array for each layer."""
        if self.num_input_axes:
            matrix = (math.prod(self.shape[: self.num_input_axes]), math.prod(self.shape[self.num_input_axes :]))
            return matrix if name.endswith("/kernel") else matrix[::-1]
        if self.unpadded_rows:
            return (self.unpadded_rows, *self.shape[1:])
        return (math.prod(self.shape),) if self.num_layers else self.shape

    def import_array(self, array: np.ndarray, name: str) -> np.ndarray:
        """Converts the array `name` of another format. Fills vocabulary padding with 0."""
        if self.num_input_axes and not name.endswith("/kernel"):
            array = array.T
        if self.unpadded_rows:
            array = np.pad(array, [(0, self.shape[0] - self.unpadded_rows)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(self.shape)

    def export_array(self, array: np.ndarray) -> np.ndarray:
        """Converts one layer's array to the form of transformers."""
        if self.num_input_axes:
            array = array.reshape(math.prod(self.shape[: self.num_input_axes]), -1).T
        elif self.unpadded_rows:
            array = array[: self.unpadded_rows]
        return np.ascontiguousarray(array.reshape(self.stored_shape(self.name)))


def parameter_table(
    config: ModelConfig, output_kind: str = "", num_outputs: int = 0, num_rows: int = 0
) -> list[Parameter]:
    """Lists all parameters of a BERT model.

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
    output_layer = [(CLASSIFIER, OUTPUT_KINDS[output_kind].huggingface_layer, "D -> O")] if output_kind else []
    table = []
    for path, name, axes in (*BERT, *output_layer):
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
      float32 arrays by bertjax's parameter path.
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
        params[parameter.path] = np.empty(parameter.stacked_shape, np.float32)
        rows = params[parameter.path].reshape(-1, *parameter.shape)
        for row, name in zip(rows, names[parameter.path], strict=True):
            row[...] = parameter.import_array(_to_float32(read_array(name), name, source), name)
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
            array = params.pop(parameter.path).reshape(-1, *parameter.shape)
            for layer, name in enumerate(parameter.names):
                yield name, parameter.export_array(array[layer])
