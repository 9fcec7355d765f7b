"""Description of a fine-tuned output layer (kind, labels and task), stored in the workdir's `output_layer.json`."""

import dataclasses
import json
from typing import Any

from etils import epath

from bertjax.config.fields import from_config_dict
from bertjax.errors import UsageError
from bertjax.model.feature_head import FeatureHead
from bertjax.utils.io import read_json_object
from bertjax.utils.sections import Section, bounded

OUTPUT_LAYER = "output_layer.json"
# Kinds of output layers. CLASSES predicts one class, or a number if there are no labels. MULTILABEL predicts any number
# of labels, CHOICES one of several texts, TAGS a tag for each word, and SPANS the start and end of an answer.
CLASSES, MULTILABEL, CHOICES, TAGS, SPANS = KINDS = ("classes", "multilabel", "choices", "tags", "spans")


@dataclasses.dataclass(frozen=True)
class OutputLayer(Section, prefix="layer."):
    """Description of the output layer of a fine-tuned model."""

    kind: str = bounded("", choices=("", *KINDS))  # one of KINDS (default: "", unset until a file is read)
    # Names of classes, labels or tags by id (default: (); regression, CHOICES and SPANS have none).
    labels: tuple[str, ...] = ()
    # Name of the fine-tuning task, such as `glue/mnli` (default: "", unknown, as for converted models).
    output: str = ""
    texts: int = 0  # number of texts per row, 1 or 2 (default: 0, either)
    feature_head: FeatureHead = FeatureHead()  # layers between encoder and output layer
    # Activation class that a converted model's `CrossEncoder` applies to logits (default: "", CrossEncoder's default).
    activation: str = ""

    @property
    def has_generic_labels(self) -> bool:
        """True if the labels are the default names of converted checkpoints: LABEL_0, LABEL_1 and so on."""
        names = [f"LABEL_{index}" for index in range(len(self.labels))]
        return bool(names) and not self.output and [*self.labels] == names

    def as_json(self) -> bytes:
        """Returns the content of `output_layer.json`."""
        return (json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1) + "\n").encode()


def read_output_layer(workdir: epath.Path) -> OutputLayer | None:
    """Reads a workdir's `output_layer.json`. Returns None if it does not exist, as for pre-trained models."""
    file = workdir / OUTPUT_LAYER
    return _read(file, "restore the file") if file.exists() else None


def saved_labels(path: str, *kinds: str) -> list[str] | None:
    """Reads the labels of an `output_layer.json`, whose kind must be one of `kinds`. Returns None if `path` is ""."""
    if not path:
        return None
    layer = _read(path, 'use a file such as {"labels": ["neg", "pos"]}', kind=kinds[0])
    if not layer.labels:
        raise UsageError(f"{path} has no labels; add labels, or set kind=number for regression")
    if len({*layer.labels}) < len(layer.labels):
        raise UsageError(f"{path} contains a label more than once; list each label once")
    if layer.kind not in kinds:
        raise UsageError(
            f"the output layer {path} is for {layer.kind}, but the task is for {kinds[0]}; use a checkpoint that was "
            "fine-tuned for this task"
        )
    return [*layer.labels]


def _read(file: str | epath.Path, remedy: str, **defaults: Any) -> OutputLayer:
    try:
        layer = from_config_dict(OutputLayer(), defaults | read_json_object(file), "layer")
        if not layer.kind or not all(isinstance(label, str) for label in layer.labels):
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, and labels a list of strings")
        return layer
    except (OSError, ValueError, UsageError) as error:
        raise UsageError(f"cannot read the output layer {file}: {error}; {remedy}") from error
