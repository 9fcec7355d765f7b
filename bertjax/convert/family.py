"""Tables of transformers model families, used by imports and exports."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from bertjax.config.fields import from_config_dict
from bertjax.convert.arrays import Parameter
from bertjax.errors import UsageError, listed
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import ENCODER
from bertjax.model.heads import DiscriminatorHead
from bertjax.model.models import EncoderModel, PretrainingModel, SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

# Modules that a checkpoint may contain besides ENCODER. Each is either complete or missing.
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
# Suffixes of bertjax paths, mapped to suffixes of transformers names. "" is the suffix of arrays that `Family.arrays`
# lists by their full names, such as embedding tables.
_LEAVES = {"": "", "/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """Properties of a kind of output layer."""

    task: str  # task that fine-tunes models of this kind
    # Function that builds the Flax module from a config and a number of outputs.
    build_model: Callable[[ModelConfig, int], nn.Module]
    pipeline: str  # pipeline tag of model cards on the Hugging Face Hub
    num_outputs: int = 0  # number of outputs (default: 0, one output per label)


OUTPUT_KINDS = {
    CLASSES: OutputKind("text", SequenceModel, "text-classification"),
    MULTILABEL: OutputKind("text", SequenceModel, "text-classification"),
    CHOICES: OutputKind("swag", SequenceModel, "multiple-choice", num_outputs=1),
    TAGS: OutputKind("ner", functools.partial(TokenModel, head_dropout=True), "token-classification"),
    SPANS: OutputKind("squad", functools.partial(TokenModel, head_dropout=False), "question-answering", num_outputs=2),
}


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """Model class of transformers, such as `BertForMaskedLM`."""

    modules: tuple[str, ...]  # modules besides the encoder
    # Kinds of output layer that the class may have, the most common one first (default: ("",), no output layer).
    output_kinds: tuple[str, ...] = ("",)
    output_layer: str = "classifier"  # transformers name of the output layer
    # Transformers name of the dense layer before the output layer (default: "", as in `Family.arrays`).
    pooler: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """Config fields, model classes and arrays of a transformers model family, with their bertjax counterparts."""

    model_type: str  # `model_type` of a config
    # Maps field names of `ModelConfig` to field names of the transformers config. Activations are translated.
    fields: Mapping[str, str]
    classes: Mapping[str, ModelClass]  # model classes, keyed by name
    prefix: str  # prefix of the encoder's array names. Only arrays of an encoder without heads lack it.
    # (bertjax path, name in the safetensors file) of each dense layer, norm and table. `{layer}` is the layer number. A
    # third element, `index/count`, is the position of the kernel in a fused transformers array of `count` kernels. In
    # `heads index/count`, this array contains the `count` kernels of the first head, then those of the next head.
    arrays: tuple[tuple[str, ...], ...]
    # Tokenizer class for folders without `tokenizer_class` (default: use `tokenizer.json` as it is).
    tokenizer_class: str = "PreTrainedTokenizer"
    # Maps the name of an array to (config field, name of a second array). If the field is true, imports add the first
    # row of the second array to all rows of the array.
    added_rows: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    # `ModelConfig` values for fields that a config omits, and for fields that all models of the family share.
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # config fields with a single supported value
    # Config fields that must be unset or false.
    refused: tuple[str, ...] = ("is_decoder", "is_causal", "add_cross_attention", "quantization_config")
    # Function from a transformers config to the `ModelConfig` fields that cannot be copied by name.
    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    # Function from a `ModelConfig` to these fields of a transformers config.
    write_fields: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}
    # Whether transformers runs custom code from the folder, which the config's `auto_map` names.
    has_own_code: bool = False
    # Names of special tokens, keyed by the config field that contains the token's id.
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
        """Returns the name of the model class with this output layer or, if it is "", with the heads in `modules`."""
        heads = modules - {ENCODER, POOLER}
        for name, each in self.classes.items():
            if output_kind in each.output_kinds and (output_kind or {*each.modules} - {POOLER} == heads):
                return name
        kind = f"output layer for {output_kind}" if output_kind else f"heads {listed(sorted(heads))}"
        raise UsageError(f"for model_type={self.model_type}, transformers has no class with this {kind}")

    def model_config(self, config: Mapping[str, Any], file: Path, **fields: Any) -> ModelConfig:
        """Builds a `ModelConfig` from a transformers config that was read from `file`. `fields` override its fields."""
        required = [self.fields[name] for name in REQUIRED if name in self.fields]
        if missing := [name for name in required if config.get(name) is None]:
            raise UsageError(f"{file} lacks {', '.join(missing)}; add the values that the checkpoint was trained with")
        values = {name: config[field] for name, field in self.fields.items() if config.get(field) is not None}
        activations = {name: value for name, value in values.items() if name.endswith("_act") and name not in fields}
        if unknown := [name for name, value in activations.items() if value not in [*ACTIVATIONS]]:
            shown = f"{self.fields[unknown[0]]}={activations[unknown[0]]!r}"
            raise UsageError(f"{file} has {shown}; use one of {', '.join(ACTIVATIONS)}")
        values |= {name: ACTIVATIONS[value] for name, value in activations.items()}
        try:
            values = {**self.values, **values, **self.read_fields(config), "model_type": self.model_type, **fields}
            return from_config_dict(ModelConfig(dtype="float32"), values, "model")
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error

    def parameters(
        self, config: ModelConfig, output_kind: str = "", num_outputs: int = 0, num_rows: int = 0
    ) -> list[Parameter]:
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
