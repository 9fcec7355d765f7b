"""The table of output kinds: the Flax module of each, its predictions, and its names in other formats."""

import dataclasses
from collections.abc import Callable, Sequence

import flax.linen as nn

from bertjax.inference import text_predictions
from bertjax.inference.text_predictions import TextPredictor
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.tasks.finetuning.records import Record


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """One kind of output layer.

    Attributes:
      task: task that fine-tunes models of this kind.
      build_model: Flax module for a config and a number of outputs.
      predict: function from texts to one record per text.
      num_outputs: width of the output layer (default: None, the number of labels).
      has_labels: the outputs have names.
      pools: the output layer reads the pooled [CLS] vector instead of every token.
      huggingface_class: class in Hugging Face transformers (default: None, cannot be converted).
      huggingface_kernel: name of the output layer's matrix there.
      tensorflow_kernel: variable name in google-research/bert (default: None, cannot be converted).
    """

    task: str
    build_model: Callable[[ModelConfig, int], nn.Module]
    predict: Callable[[TextPredictor, Sequence[str]], list[Record]]
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
