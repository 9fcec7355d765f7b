"""What a workdir keeps of the layer on top of the encoder: whose it is, and what its outputs mean."""

import dataclasses
import json

from etils import epath

from bertjax.errors import UsageError
from bertjax.model.feature_head import FeatureHead
from bertjax.utils.io import read_json

OUTPUT_LAYER = "output_layer.json"
# What the outputs are: one of several classes (or, without labels, a number), any number of labels, the scores of
# choices, tags of words, or the ends of spans.
CLASSES, MULTILABEL, CHOICES, TAGS, SPANS = KINDS = ("classes", "multilabel", "choices", "tags", "spans")


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """The layer on top of an encoder.

    Attributes:
      kind: one of KINDS.
      labels: of classes, labels or tags, in the order of their ids; empty for a number, choices and spans.
      output: what it tells, such as `glue/mnli`; "" where no task of ours made it.
      texts: 1 or 2 a row; 0 is either.
      feature_head: what is between the encoder and this.
    """

    kind: str
    labels: tuple[str, ...] = ()
    output: str = ""
    texts: int = 0
    feature_head: FeatureHead = FeatureHead()

    def as_json(self) -> bytes:
        """The content of the file."""
        return (json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1) + "\n").encode()


def read_output_layer(workdir: epath.Path) -> OutputLayer | None:
    """The output layer of a workdir's checkpoints; None where they are pre-trained alone.

    Raises:
      UsageError: the file cannot be read.
    """
    file = workdir / OUTPUT_LAYER
    if not file.exists():
        return None
    try:
        told = read_json(file)
        layer = OutputLayer(**{**told, "feature_head": FeatureHead(**told.get("feature_head", {}))})
        if layer.kind not in KINDS or not all(isinstance(label, str) for label in layer.labels):
            raise ValueError("it is none")
        return dataclasses.replace(layer, labels=tuple(layer.labels))
    except (OSError, ValueError, TypeError, UsageError) as error:
        raise UsageError(f"cannot read {file} ({error}), which tells the output layer") from error


def saved_labels(path: str) -> list[str] | None:
    """The labels in a file of this kind, in the order of their ids.

    Raises:
      UsageError: the file has no list of labels.
    """
    if not path:
        return None
    try:
        labels = read_json(path)["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("it is no list of strings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'cannot read the labels in {path} ({error}); give a file with {{"labels": ["neg", "pos"]}} and the like'
        ) from error
    return labels
