"""Table of output layers: what each kind is in bertjax and in transformers. Prediction is in `bertjax.inference`."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn

from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """Kind of output layer.

    Attributes:
      task: task that fine-tunes models of this kind.
      build_model: function that builds the Flax module from a config and a number of outputs.
      huggingface_class: model class of Hugging Face transformers.
      pipeline: pipeline tag of model cards on the Hugging Face Hub.
      num_outputs: number of outputs (default: None, one output per label).
      pools: whether the output layer applies to the pooled [CLS] state rather than to the state of every token.
      huggingface_layer: name of the output layer in Hugging Face checkpoints.
    """

    task: str
    build_model: Callable[[ModelConfig, int], nn.Module]
    huggingface_class: str
    pipeline: str
    num_outputs: int | None = None
    pools: bool = True
    huggingface_layer: str = "classifier"

    @property
    def has_labels(self) -> bool:
        """True if each output has a label."""
        return self.num_outputs is None


OUTPUT_KINDS = {
    CLASSES: OutputKind("text", SequenceModel, "BertForSequenceClassification", "text-classification"),
    MULTILABEL: OutputKind("text", SequenceModel, "BertForSequenceClassification", "text-classification"),
    CHOICES: OutputKind("swag", SequenceModel, "BertForMultipleChoice", "multiple-choice", num_outputs=1),
    TAGS: OutputKind(
        "ner",
        functools.partial(TokenModel, head_dropout=True),
        "BertForTokenClassification",
        "token-classification",
        pools=False,
    ),
    SPANS: OutputKind(
        "squad",
        functools.partial(TokenModel, head_dropout=False),
        "BertForQuestionAnswering",
        "question-answering",
        num_outputs=2,
        pools=False,
        huggingface_layer="qa_outputs",
    ),
}
