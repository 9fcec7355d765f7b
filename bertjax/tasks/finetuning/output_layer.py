"""Description of a fine-tuned output layer (kind, labels and task), stored in the workdir's `output_layer.json`."""

import dataclasses
import json

from etils import epath

from bertjax.errors import UsageError
from bertjax.model.feature_head import FeatureHead
from bertjax.utils.io import read_json_object

OUTPUT_LAYER = "output_layer.json"
# Kinds of output layers. CLASSES predicts one class, or a number if there are no labels. MULTILABEL predicts any number
# of labels, CHOICES one of several texts, TAGS a tag for each word, and SPANS the start and end of an answer.
CLASSES, MULTILABEL, CHOICES, TAGS, SPANS = KINDS = ("classes", "multilabel", "choices", "tags", "spans")


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """Description of the output layer of a fine-tuned model.

    Attributes:
      kind: one of KINDS.
      labels: names of classes, labels or tags by id (default: (), for regression, choices and spans).
      output: task that the layer was trained on, such as `glue/mnli` (default: "", unknown, as in converted models).
      texts: number of texts per row, 1 or 2 (default: 0, either).
      feature_head: layers between encoder and output layer.
    """

    kind: str
    labels: tuple[str, ...] = ()
    output: str = ""
    texts: int = 0
    feature_head: FeatureHead = FeatureHead()

    @property
    def has_generic_labels(self) -> bool:
        """True if the labels are the names that converted checkpoints have by default: LABEL_0, LABEL_1 and so on."""
        names = [f"LABEL_{index}" for index in range(len(self.labels))]
        return bool(names) and not self.output and [*self.labels] == names

    def as_json(self) -> bytes:
        """Returns the content of `output_layer.json`."""
        return (json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1) + "\n").encode()


def read_output_layer(workdir: epath.Path) -> OutputLayer | None:
    """Reads a workdir's `output_layer.json`. Returns None if it does not exist, as for pre-trained models."""
    file = workdir / OUTPUT_LAYER
    if not file.exists():
        return None
    try:
        fields = read_json_object(file)
        layer = OutputLayer(**fields | {"feature_head": FeatureHead(**fields.get("feature_head", {}))})
        if layer.kind not in KINDS or not all(isinstance(label, str) for label in layer.labels):
            raise ValueError("unknown kind or labels")
        return dataclasses.replace(layer, labels=tuple(layer.labels))
    except (OSError, ValueError, TypeError, UsageError) as error:
        raise UsageError(f"cannot read the output layer {file}: {error}; restore the file") from error


def saved_labels(path: str, *kinds: str) -> list[str] | None:
    """Reads the labels in an `output_layer.json`, in the order of their ids. Returns None if `path` is "".

    Raises a UsageError if the kind of the output layer is not in `kinds`.
    """
    if not path:
        return None
    try:
        content = read_json_object(path)
        labels = content["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("labels is not a list of strings")
        if len({*labels}) < len(labels):
            raise ValueError("a label is more than once in the list")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f'cannot read the labels in {path}: {error}; use a file such as {{"labels": ["neg", "pos"]}}'
        ) from error
    if content.get("kind", kinds[0]) not in kinds:
        raise UsageError(
            f"the output layer {path} is for {content['kind']}, but the task is for {kinds[0]}; use a checkpoint that "
            "was fine-tuned for this task"
        )
    return labels
