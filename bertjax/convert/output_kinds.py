"""Kinds of output layers, with their tasks and Flax modules. `Family.classes` lists their classes in transformers."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn

from bertjax.model.config import ModelConfig
from bertjax.model.models import SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS


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
