"""Conversion of parameters from and to the arrays of other formats.

bertjax stacks the layers and has a separate axis for attention heads. The other formats store one array per layer, and
store kernels as matrices: [in, out] in TensorFlow, where names end in `/kernel`, otherwise [out, in].
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bertjax.errors import UsageError, listed

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """bertjax parameter and its transformers counterpart."""

    path: str  # path in bertjax
    name: str  # transformers name; contains `{layer}` if each layer has an array
    shape: tuple[int, ...]  # shape in bertjax, without the layer axis
    num_layers: int = 0  # number of layers (default: 0, no layer axis)
    # Lowest layer that has the parameter in transformers. In bertjax, lower layers have an unused array.
    first_layer: int = 0
    num_input_axes: int = 0  # number of leading axes of a kernel that are input axes (default: 0, not a kernel)
    # Number of rows in other formats, for parameters whose first axis is the padded vocabulary (default: 0, not
    # padded).
    unpadded_rows: int = 0
    # (index, count, heads), the position of the kernel in a fused array of `count` kernels, interleaved over `heads`
    # (default: (0, 1, 1), not fused).
    part: tuple[int, int, int] = (0, 1, 1)
    is_required: bool = False  # whether the model cannot be used without the parameter's module

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
        """Returns a view of one layer's array, with the layout of the array `name` in another format.

        The shape is [H, rows, ...], where H is the number of heads if the other format interleaves them, and else 1.
        """
        if self.num_input_axes:
            matrix = array.reshape(math.prod(self.shape[: self.num_input_axes]), -1)
            array = matrix if name.endswith("/kernel") else matrix.T
        elif self.unpadded_rows:
            array = array[: self.unpadded_rows]
        elif self.num_layers:
            array = array.reshape(-1)
        return array.reshape(self.part[2], -1, *array.shape[1:])

    def part_of(self, array: np.ndarray) -> np.ndarray:
        """Returns this parameter's slice of a transformers array (fused or not), as a view [heads or 1, rows, ...]."""
        index, count, heads = self.part
        return array.reshape(heads, count, -1, *array.shape[1:])[:, index]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the array `name` in another format, without allocating memory."""
        heads, rows, *rest = self.stored(np.broadcast_to(np.int8(0), self.shape), name).shape
        return (heads * rows * self.part[1], *rest)


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
        if unknown := shapes.keys() - expected.keys():
            fix = "set `architectures` in the config to the class of the saved model, or remove the unknown arrays"
            # Training code saves the parameters of wrapped models with a prefix, such as `module.`.
            prefix, missing = f"{min(unknown).partition('.')[0]}.", expected.keys() - shapes.keys()
            if missing and missing <= {name.removeprefix(prefix) for name in unknown}:
                fix = f"remove the prefix {prefix!r} from the names"
        raise UsageError(f"the arrays of {source} do not match its config: {problem}; {fix}")
    params = {}
    for parameter in parameters:
        params[parameter.path] = np.zeros(parameter.stacked_shape, np.float32)
        params[parameter.path][: parameter.first_layer] = 1.0  # scale of an unused norm
        for row, name in zip(parameter.rows(params[parameter.path]), names[parameter.path], strict=True):
            parameter.stored(row, name)[...] = _to_float32(parameter.part_of(read_array(name)), name, source)
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
    """Converts `params` to arrays keyed by transformers name. Removes each parameter from `params` to save memory."""
    if unknown := sorted(params.keys() - {parameter.path for parameter in table}):
        raise UsageError(
            f"Hugging Face's format cannot store the parameters {listed(unknown)}; use the bertjax checkpoint itself"
        )
    arrays: dict[str, np.ndarray] = {}
    for parameter in [parameter for parameter in table if parameter.path in params]:
        for row, name in zip(parameter.rows(params.pop(parameter.path)), parameter.names, strict=True):
            array = arrays.setdefault(name, np.zeros(parameter.stored_shape(name), np.float32))
            parameter.part_of(array)[...] = parameter.stored(row, name)
    return arrays
