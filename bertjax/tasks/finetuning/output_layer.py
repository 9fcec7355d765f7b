"""What a workdir keeps of the layer on top of the encoder: whose it is, and what its outputs mean."""

import json
from collections.abc import Sequence

from bertjax.errors import UsageError
from bertjax.files import read_json

OUTPUT_LAYER = "output_layer.json"
# Of a layer whose outputs are labels, any number of them a row: the kind, and a part of what a task calls it.
MULTILABEL = "multilabel"


def output_layer(output: str, labels: Sequence[str], kind: str = "") -> bytes:
    """The content of the file.

    Args:
      output: what the layer tells; "" where no task of ours made it.
      labels: of its classes, in the order of their ids.
      kind: of what it tells, where `output` does not say.
    """
    layer = {"output": output, **({"kind": kind} if kind else {}), "labels": list(labels)}
    return (json.dumps(layer, ensure_ascii=False, indent=1) + "\n").encode()


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
