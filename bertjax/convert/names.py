"""Names and shapes of BERT's parameters in bertjax, Hugging Face and google-research/bert checkpoints.

A checkpoint is a dictionary of arrays by name. bertjax stacks the layers and has a separate axis for attention heads.
The other formats store one matrix per layer: [in, out] in TensorFlow, [out, in] in PyTorch.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig

HUGGINGFACE = "huggingface"
TENSORFLOW = "tensorflow"
FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Modules of a model. A checkpoint contains the complete encoder. Each other module is either complete or missing.
ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER = "encoder", "pooler", "masked_lm", "next_sentence", "classifier"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Parameter of bertjax and its counterpart in the other formats.

    Attributes:
      path: path in bertjax.
      shape: shape in bertjax, without the layer axis.
      names_by_format: name in each of the other formats; names of layer parameters contain `{layer}`.
      num_input_axes: number of leading axes of a kernel that are input axes (default: 0, not a kernel).
      transposed_in: formats that store the kernel as [out, in].
      unpadded_rows: number of rows in other formats, for parameters whose first axis is the padded vocabulary (default:
        0, not padded).
    """

    path: str
    shape: tuple[int, ...]
    names_by_format: Mapping[str, str]
    num_input_axes: int = 0
    transposed_in: tuple[str, ...] = ()
    unpadded_rows: int = 0

    @property
    def module(self) -> str:
        return self.path.partition("/")[0]

    @property
    def is_layered(self) -> bool:
        return self.path.startswith("encoder/layers/")

    def names(self, num_layers: int, fmt: str) -> list[str]:
        """Returns the array names in the format `fmt`: one per layer for parameters of layers, else a single name."""
        name = self.names_by_format[fmt]
        return [name.format(layer=layer) for layer in range(num_layers)] if self.is_layered else [name]

    def exported_shape(self, fmt: str) -> tuple[int, ...]:
        """Returns the shape in the format `fmt`, which stores a separate array for each layer."""
        if self.num_input_axes:
            matrix = (int(np.prod(self.shape[: self.num_input_axes])), int(np.prod(self.shape[self.num_input_axes :])))
            return matrix[::-1] if fmt in self.transposed_in else matrix
        if self.unpadded_rows:
            return (self.unpadded_rows, *self.shape[1:])
        return (int(np.prod(self.shape)),) if self.is_layered else self.shape

    def export_array(self, array: np.ndarray, fmt: str) -> np.ndarray:
        """Converts one layer's array to another format."""
        if self.num_input_axes:
            matrix = array.reshape(int(np.prod(self.shape[: self.num_input_axes])), -1)
            return np.ascontiguousarray(matrix.T if fmt in self.transposed_in else matrix)
        return np.ascontiguousarray(
            array[: self.unpadded_rows] if self.unpadded_rows else array.reshape(self.exported_shape(fmt))
        )

    def import_array(self, array: np.ndarray, fmt: str) -> np.ndarray:
        """Converts one layer's array from another format. Fills vocabulary padding with 0."""
        if self.num_input_axes:
            return (array.T if fmt in self.transposed_in else array).reshape(self.shape)
        if self.unpadded_rows:
            return np.pad(array, [(0, self.shape[0] - self.unpadded_rows)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(self.shape)


def bert_parameters(
    config: ModelConfig,
    num_outputs: int = 0,
    output_kernels: Mapping[str, str] | None = None,
    num_rows: int = 0,
) -> list[Parameter]:
    """Lists all parameters of a BERT model.

    `output_kernels` contains the name of the output layer's kernel in each format (default: None, no output layer). The
    name of the bias has `bias` instead of `weight` or `weights`. `num_outputs` is the width of the output layer.
    `num_rows` is the number of token embeddings in other formats (default: 0, `config.vocab_size`).
    """
    width, heads, head_size = config.hidden_size, config.num_attention_heads, config.head_size
    mlp_width, unpadded, padded = config.intermediate_size, num_rows or config.vocab_size, config.padded_vocab_size
    embeddings, layers, layer = "encoder/embeddings", "encoder/layers", "bert.encoder.layer.{layer}"
    positions, segments = config.max_position_embeddings, config.type_vocab_size

    def array(path: str, name: str, shape: tuple[int, ...], unpadded_rows: int = 0) -> list[Parameter]:
        return [Parameter(path, shape, _names(name), unpadded_rows=unpadded_rows)]

    def norm(path: str, name: str) -> list[Parameter]:
        return array(f"{path}/scale", f"{name}.weight", (width,)) + array(f"{path}/bias", f"{name}.bias", (width,))

    def dense(path: str, name: str, shape: tuple[int, ...], num_input_axes: int = 1) -> list[Parameter]:
        kernel = Parameter(f"{path}/kernel", shape, _names(f"{name}.weight"), num_input_axes, (HUGGINGFACE,))
        return [kernel, *array(f"{path}/bias", f"{name}.bias", shape[num_input_axes:])]

    return [
        *array(f"{embeddings}/token", "bert.embeddings.word_embeddings.weight", (padded, width), unpadded),
        *array(f"{embeddings}/position", "bert.embeddings.position_embeddings.weight", (positions, width)),
        *array(f"{embeddings}/segment", "bert.embeddings.token_type_embeddings.weight", (segments, width)),
        *norm(f"{embeddings}/norm", "bert.embeddings.LayerNorm"),
        *dense(f"{layers}/attention/query", f"{layer}.attention.self.query", (width, heads, head_size)),
        *dense(f"{layers}/attention/key", f"{layer}.attention.self.key", (width, heads, head_size)),
        *dense(f"{layers}/attention/value", f"{layer}.attention.self.value", (width, heads, head_size)),
        *dense(f"{layers}/attention/output", f"{layer}.attention.output.dense", (heads, head_size, width), 2),
        *norm(f"{layers}/attention_norm", f"{layer}.attention.output.LayerNorm"),
        *dense(f"{layers}/mlp_in", f"{layer}.intermediate.dense", (width, mlp_width)),
        *dense(f"{layers}/mlp_out", f"{layer}.output.dense", (mlp_width, width)),
        *norm(f"{layers}/mlp_norm", f"{layer}.output.LayerNorm"),
        *dense("pooler/dense", "bert.pooler.dense", (width, width)),
        *dense("masked_lm/transform", "cls.predictions.transform.dense", (width, width)),
        *norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        *array("masked_lm/bias", "cls.predictions.bias", (padded,), unpadded),
        *_output_layer("next_sentence/dense", (width, 2), _names("cls.seq_relationship.weight")),
        *(_output_layer(CLASSIFIER, (width, num_outputs), output_kernels) if output_kernels else ()),
    ]


def _output_layer(path: str, shape: tuple[int, int], kernels: Mapping[str, str]) -> list[Parameter]:
    """Lists kernel and bias of an output layer. Hugging Face and google-research/bert store the kernel as [out, in]."""
    biases = {fmt: re.sub("weights?$", "bias", name) for fmt, name in kernels.items()}
    return [
        Parameter(f"{path}/kernel", shape, kernels, 1, (HUGGINGFACE, TENSORFLOW)),
        Parameter(f"{path}/bias", shape[1:], biases),
    ]


def _names(name: str) -> dict[str, str]:
    """Returns a parameter's name in each format, derived from its name in Hugging Face.

    Does not support output layers of fine-tuned models, whose names follow no rule.
    """
    scope, _, leaf = name.rpartition(".")
    if scope.endswith("LayerNorm"):
        leaf = {"weight": "/gamma", "bias": "/beta"}[leaf]
    elif scope.endswith("_embeddings"):
        leaf = ""
    elif scope in ("cls.predictions", "cls.seq_relationship"):
        leaf = {"weight": "/output_weights", "bias": "/output_bias"}[leaf]
    else:
        leaf = {"weight": "/kernel", "bias": "/bias"}[leaf]
    return {HUGGINGFACE: name, TENSORFLOW: scope.replace("layer.{", "layer_{").replace(".", "/") + leaf}


def import_params(
    table: list[Parameter],
    num_layers: int,
    fmt: str,
    shapes: Mapping[str, Sequence[int]],
    read_array: Callable[[str], np.ndarray],
    source: str,
) -> dict[str, np.ndarray]:
    """Converts the arrays of a checkpoint from another format, one at a time to save memory.

    `shapes` contains the shape of each array of the checkpoint, and `read_array` reads an array by name. `source` is
    the path of the checkpoint, for error messages.

    Returns:
      float32 arrays by bertjax's parameter path.
    """
    if num_layers > len(shapes):
        raise UsageError(
            f"{source} has {len(shapes)} arrays, too few for the {num_layers:,} layers of its config; use the matching "
            "config"
        )
    names = {parameter.path: parameter.names(num_layers, fmt) for parameter in table}
    # The encoder is required, and so is the output layer of a fine-tuned checkpoint.
    modules = {ENCODER} | {parameter.module for parameter in table if parameter.module == CLASSIFIER}
    modules |= {parameter.module for parameter in table if any(name in shapes for name in names[parameter.path])}
    parameters = [parameter for parameter in table if parameter.module in modules]
    expected = {name: parameter.exported_shape(fmt) for parameter in parameters for name in names[parameter.path]}
    mismatches = [
        f"{name} {tuple(shapes[name])} instead of {shape}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "not part of BERT": [name for name in shapes if name not in expected],
        "with a shape that differs from the config": mismatches,
    }
    if any(problems.values()):
        text = "; ".join(f"{problem}: {listed(arrays)}" for problem, arrays in problems.items() if arrays)
        fix = "use the matching config"
        if problems["not part of BERT"]:
            fix = "bertjax reads only BERT's own arrays, as the config defines them; rename or remove the others"
        raise UsageError(f"the arrays of {source} are not those of BERT with its config: {text}; {fix}")
    params = {}
    for parameter in parameters:
        stacked = np.empty((len(names[parameter.path]), *parameter.shape), np.float32)
        for layer, name in enumerate(names[parameter.path]):
            stacked[layer] = parameter.import_array(_to_float32(read_array(name), name, source), fmt)
        params[parameter.path] = stacked if parameter.is_layered else stacked[0]
    return params


def _to_float32(array: np.ndarray, name: str, source: str) -> np.ndarray:
    if array.dtype.name not in FLOAT_DTYPES:
        raise UsageError(f"{source}: {name} has dtype {array.dtype.name}; weights must be {', '.join(FLOAT_DTYPES)}")
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    if not np.isfinite(converted).all():
        raise UsageError(f"{source}: {name} contains values that are not finite in float32; use a different checkpoint")
    return converted


def export_params(
    table: list[Parameter], num_layers: int, fmt: str, params: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays in another format. Removes each parameter from `params` to save memory."""
    if unknown := sorted(params.keys() - {parameter.path for parameter in table}):
        raise UsageError(
            f"the format {fmt} cannot store the parameters {listed(unknown)}; use the bertjax checkpoint itself"
        )
    for parameter in table:
        if parameter.path in params:
            array = params.pop(parameter.path)
            for layer, name in enumerate(parameter.names(num_layers, fmt)):
                yield name, parameter.export_array(array[layer] if parameter.is_layered else array, fmt)
