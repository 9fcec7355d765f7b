"""bertjax's own checkpoints as portable ones, and back: a workdir with one checkpoint, at step 0."""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
from etils import epath

from bertjax.convert import names
from bertjax.convert.portable import Portable
from bertjax.data.corpus.vocabulary import ENTRY, VOCABULARY_FILES, vocabulary_files, workdir_vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import LSTM
from bertjax.model.heads import EncoderModel, PretrainingModel, SequenceModel, TokenModel, model_kind
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.finetuning.output_layer import (
    CHOICES,
    CLASSES,
    MULTILABEL,
    OUTPUT_LAYER,
    SPANS,
    TAGS,
    OutputLayer,
    read_output_layer,
)
from bertjax.training.checkpoint import CHECKPOINTS, find_checkpoint, workdir_of
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.parameters import load_params_on_host, save_params
from bertjax.training.workdir import CONFIG, ORIGIN
from bertjax.utils.io import read_json

# All that a conversion leaves in a folder.
FILES = (ORIGIN, CONFIG, OUTPUT_LAYER, ENTRY, CHECKPOINTS, *VOCABULARY_FILES.values())
# A task that can take each of them up.
_TASKS = {"": "pretraining", CLASSES: "text", MULTILABEL: "text", CHOICES: "swag", TAGS: "ner", SPANS: "squad"}


def read(path: Path | epath.Path) -> Portable:
    """A workdir's best, else newest checkpoint, or the one at a step.

    Raises:
      UsageError: there is none, or its config does not tell what it is.
      BertjaxError: it is damaged.
    """
    checkpoint = find_checkpoint(path)
    workdir = workdir_of(checkpoint)
    vocabulary = workdir_vocabulary(workdir)
    model = checkpoint_model(checkpoint)
    layer = read_output_layer(workdir)
    params = load_params_on_host(checkpoint)
    what = ""
    if model.encoder == LSTM or any(name.startswith(("left_lm/", "right_lm/")) for name in params):
        what = f"a language model with encoder={model.encoder} and attention_direction={model.attention_direction}"
    elif layer and layer.feature_head.is_used:
        what = f"feature_head.features={layer.feature_head.features or '(none)'} and feature_head.lstm_layers={layer.feature_head.lstm_layers}"
    if what:
        raise UsageError(f"{checkpoint} has {what}, which is not converted; bertjax takes the workdir as it is")
    outputs = params.get(f"{names.CLASSIFIER}/bias")
    # Whose the layer is elsewhere does not matter for its shape.
    classifier = None if outputs is None else (len(outputs), {names.HUGGINGFACE: ""})
    names.check_params(names.parameters(model, classifier), model.num_hidden_layers, params, str(checkpoint))
    return Portable(model, params, vocabulary, layer.kind if layer else "", layer.labels if layer else ())


def write(portable: Portable, folder: Path) -> list[str]:
    """Writes a workdir that `--init_from`, `fill` and `features` take, and returns what there is to say about it.

    Raises:
      UsageError: there is no vocabulary, without which nothing can be done with it.
    """
    if portable.vocabulary is None:
        raise UsageError("the source has no vocab.txt; put the one it was trained with beside it")
    config = finetuning_config(_TASKS[portable.output]) if portable.output else pretraining_config()
    for name, value in vars(portable.model).items():
        config.model[name] = value
    (folder / CONFIG).write_text(json.dumps(config.to_dict(), indent=1) + "\n")
    files = vocabulary_files(portable.vocabulary)
    if portable.output:
        files[OUTPUT_LAYER] = OutputLayer(portable.output, portable.labels).as_json()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    save_params(epath.Path(folder), portable.params, model_kind(_module(portable)), portable.model.architecture)
    return []


def _module(portable: Portable) -> nn.Module:
    """Returns the module of converted parameters; a pre-trained one may lack a head."""
    if portable.output in (TAGS, SPANS):
        return TokenModel(portable.model, portable.outputs, head_dropout=portable.output == TAGS)
    if portable.output:
        return SequenceModel(portable.model, portable.outputs)
    has_head = {names.MASKED_LM, names.NEXT_SENTENCE} & portable.parts
    return PretrainingModel(portable.model) if has_head else EncoderModel(portable.model)


def write_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Notes in a converted workdir what it was converted from."""
    (folder / ORIGIN).write_text(json.dumps(origin) + "\n")


def read_origin(folder: Path) -> dict[str, Any]:
    """What a workdir was converted from; {} where it was not, or is not there."""
    try:
        return read_json(folder / ORIGIN)
    except (OSError, ValueError):
        return {}
