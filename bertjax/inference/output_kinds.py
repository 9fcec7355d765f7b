"""Kinds of output layers: Flax modules, prediction functions, and names in other checkpoint formats."""

import dataclasses
from collections.abc import Callable, Sequence

import flax.linen as nn

from bertjax.inference import text_predictions
from bertjax.inference.inputs import Texts
from bertjax.inference.text_predictions import TextPredictor
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.tasks.finetuning.records import Record


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """Kind of output layer.

    Attributes:
      task: task that fine-tunes models of this kind.
      build_model: function that builds the Flax module from a config and a number of outputs.
      predict: function that returns one record per input.
      num_outputs: number of outputs (default: None, the number of labels).
      has_labels: whether outputs have names.
      pools: whether the input of the output layer is the pooled [CLS] vector rather than every token.
      huggingface_class: model class of Hugging Face transformers (default: None, cannot be converted).
      huggingface_kernel: name of the output layer's kernel in Hugging Face checkpoints.
      tensorflow_kernel: name of the kernel in google-research/bert checkpoints (default: None, cannot be converted).
    """

    task: str
    build_model: Callable[[ModelConfig, int], nn.Module]
    predict: Callable[[TextPredictor, Sequence[Texts]], list[Record]]
    num_outputs: int | None = None
    has_labels: bool = False
    pools: bool = True
    huggingface_class: str | None = None
    huggingface_kernel: str = "classifier.weight"
    tensorflow_kernel: str | None = None


def _token_model(config: ModelConfig, num_outputs: int) -> TokenModel:
    return TokenModel(config, num_outputs, head_dropout=False)


OUTPUT_KINDS = {
    CLASSES: OutputKind(
        task="text",
        build_model=SequenceModel,
        predict=text_predictions.predict_classes,
        has_labels=True,
        huggingface_class="BertForSequenceClassification",
        tensorflow_kernel="output_weights",
    ),
    MULTILABEL: OutputKind(
        task="text",
        build_model=SequenceModel,
        predict=text_predictions.predict_labels,
        has_labels=True,
        huggingface_class="BertForSequenceClassification",
    ),
    CHOICES: OutputKind(
        task="swag",
        build_model=SequenceModel,
        predict=text_predictions.predict_choices,
        num_outputs=1,
        huggingface_class="BertForMultipleChoice",
    ),
    TAGS: OutputKind(
        task="ner",
        build_model=_token_model,
        predict=text_predictions.predict_tags,
        has_labels=True,
        pools=False,
        huggingface_class="BertForTokenClassification",
    ),
    SPANS: OutputKind(
        task="squad",
        build_model=_token_model,
        predict=text_predictions.predict_spans,
        num_outputs=2,
        pools=False,
        huggingface_class="BertForQuestionAnswering",
        huggingface_kernel="qa_outputs.weight",
        tensorflow_kernel="cls/squad/output_weights",
    ),
}
