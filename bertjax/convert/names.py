"""Which parameter is which in bertjax, in Hugging Face's and in google-research/bert's checkpoints.

A checkpoint is a dictionary of arrays by name. Ours has the layers stacked and the attention heads on an axis of their
own; the other two have a matrix a layer, [in, out] in TensorFlow and [out, in] in PyTorch.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig

HUGGINGFACE = "huggingface"
TENSORFLOW = "tensorflow"
_FLOATS = ("float32", "bfloat16", "float16", "float64")
# Parts of a model, which a checkpoint has whole or not at all; the encoder is always there.
ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER = "encoder", "pooler", "masked_lm", "next_sentence", "classifier"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of ours and what it is elsewhere.

    Attributes:
      ours: its path.
      shape: of one layer's.
      theirs: format to name; `{layer}` where it is one of each layer.
      inputs: how many leading axes of a matrix are its input; 0 is no matrix.
      transposed: formats that have the matrix [out, in].
      rows: of a table that ours pads; 0 is none.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: Mapping[str, str]
    inputs: int = 0
    transposed: tuple[str, ...] = ()
    rows: int = 0

    @property
    def part(self) -> str:
        return self.ours.partition("/")[0]

    @property
    def is_layered(self) -> bool:
        return self.ours.startswith("encoder/layers/")

    def foreign_shape(self, form: str) -> tuple[int, ...]:
        """What it has elsewhere."""
        if self.inputs:
            sides = (int(np.prod(self.shape[: self.inputs])), int(np.prod(self.shape[self.inputs :])))
            return sides[::-1] if form in self.transposed else sides
        if self.rows:
            return (self.rows, *self.shape[1:])
        return (int(np.prod(self.shape)),) if self.is_layered else self.shape

    def to_theirs(self, array: np.ndarray, form: str) -> np.ndarray:
        """One layer's array, as it is elsewhere."""
        if self.inputs:
            matrix = array.reshape(int(np.prod(self.shape[: self.inputs])), -1)
            return np.ascontiguousarray(matrix.T if form in self.transposed else matrix)
        return np.ascontiguousarray(array[: self.rows] if self.rows else array.reshape(self.foreign_shape(form)))

    def to_ours(self, array: np.ndarray, form: str) -> np.ndarray:
        """One layer's array, from what it is elsewhere; padding rows are 0."""
        if self.inputs:
            return (array.T if form in self.transposed else array).reshape(self.shape)
        if self.rows:
            return np.pad(array, [(0, self.shape[0] - self.rows)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(self.shape)


def parameters(config: ModelConfig, classifier: tuple[int, dict[str, str]] | None = None) -> list[Parameter]:
    """All parameters a checkpoint of these sizes may have.

    Args:
      config: of the model.
      classifier: outputs of the layer of a fine-tuned model, and format to the name of its kernel; its bias has the
        name with `weight` or `weights` replaced.
    """
    width, heads, head, mlp = config.hidden_size, config.num_attention_heads, config.head_size, config.intermediate_size
    vocabulary = {"rows": config.vocab_size}
    found = [
        _table("token", "word_embeddings", (config.padded_vocab_size, width), **vocabulary),
        _table("position", "position_embeddings", (config.max_position_embeddings, width)),
        _table("segment", "token_type_embeddings", (config.type_vocab_size, width)),
        *_norm("encoder/embeddings/norm", "embeddings.LayerNorm", width),
    ]
    layer = "encoder.layer.{layer}"
    for name in ("query", "key", "value"):
        found += _dense(f"attention/{name}", f"{layer}.attention.self.{name}", (width, heads, head), 1)
    found += _dense("attention/output", f"{layer}.attention.output.dense", (heads, head, width), 2)
    found += _norm("encoder/layers/attention_norm", f"{layer}.attention.output.LayerNorm", width)
    found += _dense("mlp_in", f"{layer}.intermediate.dense", (width, mlp), 1)
    found += _dense("mlp_out", f"{layer}.output.dense", (mlp, width), 1)
    found += _norm("encoder/layers/mlp_norm", f"{layer}.output.LayerNorm", width)
    found += _dense("pooler/dense", "pooler.dense", (width, width), 1, root="")
    transform = "predictions.transform"
    found += _dense("masked_lm/transform", f"{transform}.dense", (width, width), 1, root="", scope="cls")
    found += _norm("masked_lm/norm", f"{transform}.LayerNorm", width, scope="cls")
    found.append(
        Parameter(
            "masked_lm/bias",
            (config.padded_vocab_size,),
            {HUGGINGFACE: "cls.predictions.bias", TENSORFLOW: "cls/predictions/output_bias"},
            **vocabulary,
        )
    )
    found += _output_layer(
        "next_sentence/dense",
        (width, 2),
        {HUGGINGFACE: "cls.seq_relationship.weight", TENSORFLOW: "cls/seq_relationship/output_weights"},
    )
    if classifier:
        found += _output_layer(CLASSIFIER, (width, classifier[0]), classifier[1])
    return found


def _table(ours: str, theirs: str, shape: tuple[int, int], rows: int = 0) -> Parameter:
    names = {HUGGINGFACE: f"bert.embeddings.{theirs}.weight", TENSORFLOW: f"bert/embeddings/{theirs}"}
    return Parameter(f"encoder/embeddings/{ours}", shape, names, rows=rows)


def _norm(ours: str, theirs: str, width: int, scope: str = "bert") -> list[Parameter]:
    return [
        Parameter(
            f"{ours}/{name}",
            (width,),
            {HUGGINGFACE: f"{scope}.{theirs}.{torch}", TENSORFLOW: f"{scope}/{_tensorflow(theirs)}/{tensorflow}"},
        )
        for name, torch, tensorflow in (("scale", "weight", "gamma"), ("bias", "bias", "beta"))
    ]


def _dense(
    ours: str, theirs: str, shape: tuple[int, ...], inputs: int, root: str = "encoder/layers/", scope: str = "bert"
) -> list[Parameter]:
    path = f"{scope}/{_tensorflow(theirs)}"
    return [
        Parameter(
            f"{root}{ours}/kernel",
            shape,
            {HUGGINGFACE: f"{scope}.{theirs}.weight", TENSORFLOW: f"{path}/kernel"},
            inputs,
            (HUGGINGFACE,),
        ),
        Parameter(
            f"{root}{ours}/bias",
            shape[inputs:],
            {HUGGINGFACE: f"{scope}.{theirs}.bias", TENSORFLOW: f"{path}/bias"},
        ),
    ]


def _output_layer(ours: str, shape: tuple[int, int], kernels: Mapping[str, str]) -> list[Parameter]:
    """Output layers, which google-research/bert makes by hand, [out, in]."""
    biases = {form: re.sub("weights?$", "bias", name) for form, name in kernels.items()}
    return [
        Parameter(f"{ours}/kernel", shape, kernels, 1, (HUGGINGFACE, TENSORFLOW)),
        Parameter(f"{ours}/bias", shape[1:], biases),
    ]


def _tensorflow(name: str) -> str:
    return name.replace(".layer.{layer}", "/layer_{layer}").replace(".", "/")


def import_params(
    table: list[Parameter],
    layers: int,
    form: str,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], np.ndarray],
    source: str,
) -> dict[str, np.ndarray]:
    """Our parameters from the arrays of another format, one after the other, so that little is held twice.

    Args:
      table: of `parameters`.
      layers: of the model.
      form: HUGGINGFACE or TENSORFLOW.
      shapes: of all arrays of the source that belong to the model.
      read: name to array.
      source: for messages.

    Raises:
      UsageError: arrays are missing, have other shapes, or belong to nothing; all of them are listed.
    """
    if layers > len(shapes):
        raise UsageError(f"{source} has {len(shapes)} arrays, its config tells {layers:,} layers")
    names = {parameter.ours: _names(parameter, layers, form) for parameter in table}
    # An output layer is in the table where there must be one.
    parts = {ENCODER} | {parameter.part for parameter in table if parameter.part == CLASSIFIER}
    parts |= {parameter.part for parameter in table if any(name in shapes for name in names[parameter.ours])}
    taken = [parameter for parameter in table if parameter.part in parts]
    wanted = {name: parameter.foreign_shape(form) for parameter in taken for name in names[parameter.ours]}
    others = {name: tuple(shapes[name]) for name in wanted if name in shapes and tuple(shapes[name]) != wanted[name]}
    problems = [
        *_listed("lacks", [name for name in wanted if name not in shapes]),
        *_listed("has what no BERT has:", [name for name in shapes if name not in wanted]),
        *_listed("has other shapes than its config tells:", [f"{n} {s} for {wanted[n]}" for n, s in others.items()]),
    ]
    if problems:
        raise UsageError(f"{source} {'; it '.join(problems)}")
    params = {}
    for parameter in taken:
        arrays = (parameter.to_ours(_float32(read(name), name, source), form) for name in names[parameter.ours])
        if parameter.is_layered:
            stacked = np.empty((layers, *parameter.shape), np.float32)
            for layer, array in enumerate(arrays):
                stacked[layer] = array
            params[parameter.ours] = stacked
        else:
            params[parameter.ours] = np.ascontiguousarray(next(arrays))
    return params


def check_params(table: list[Parameter], layers: int, params: Mapping[str, np.ndarray], source: str) -> None:
    """Refuses parameters of ours whose shapes are not those of the table.

    Raises:
      UsageError: lists them.
    """
    wanted = {entry.ours: (layers, *entry.shape) if entry.is_layered else entry.shape for entry in table}
    parts = {ENCODER} | {name.partition("/")[0] for name in params}
    needed = [name for name in wanted if name.partition("/")[0] in parts]
    others = [name for name in params if name in wanted and params[name].shape != wanted[name]]
    problems = [
        *_listed("lacks", [name for name in needed if name not in params]),
        *_listed("has what no BERT has:", [name for name in params if name not in wanted]),
        *_listed("has other shapes than its config tells:", [f"{n} {params[n].shape} for {wanted[n]}" for n in others]),
    ]
    if problems:
        raise UsageError(f"{source} {'; it '.join(problems)}")


def _float32(array: np.ndarray, name: str, source: str) -> np.ndarray:
    if array.dtype.name not in _FLOATS:
        raise UsageError(f"{source}: {name} is of {array.dtype.name}, weights are of {', '.join(_FLOATS)}")
    with np.errstate(over="ignore"):
        found = array.astype(np.float32)
    if not np.isfinite(found).all():
        raise UsageError(f"{source}: {name} has numbers that are not finite in float32")
    return found


def export_params(
    table: list[Parameter], layers: int, form: str, params: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array in another format, of each of our parameters, which leave `params` as they are taken."""
    for parameter in table:
        if parameter.ours in params:
            array = params.pop(parameter.ours)
            for layer, name in enumerate(_names(parameter, layers, form)):
                yield name, parameter.to_theirs(array[layer] if parameter.is_layered else array, form)


def _names(parameter: Parameter, layers: int, form: str) -> list[str]:
    name = parameter.theirs[form]
    return [name.format(layer=layer) for layer in range(layers)] if parameter.is_layered else [name]


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"{what} {listed(names)}"] if names else []
