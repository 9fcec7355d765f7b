"""Checkpoints of any format as models that can be asked."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from bertjax.errors import UsageError
from bertjax.inference.trained import TrainedModel, placed, read_trained
from bertjax.interop.convert import BERTJAX, detect, read
from bertjax.tasks.finetuning.output_layer import OutputLayer


def load_trained(
    path: str | Path, mesh: Mesh | None = None, tell: Callable[[str], None] = lambda line: None
) -> TrainedModel:
    """The model of a checkpoint of ours, of Hugging Face or of google-research/bert.

    Args:
      path: a workdir or a step in it; a folder; a folder, or the beginning of its files' names.
      mesh: to put it on; None is all devices, each with all parameters.
      tell: takes what there is to say, a line at a time.

    Raises:
      UsageError: there is none, or it has no vocabulary.
      BertjaxError: it is damaged.
    """
    if detect(str(path)) == BERTJAX:
        return read_trained(path, mesh)
    portable = read(str(path))
    for note in portable.notes:
        tell(note)
    if portable.vocabulary is None:
        raise UsageError(f"{path} has no vocab.txt; put the one it was trained with beside it")
    layer = OutputLayer(portable.output, portable.labels) if portable.output else None
    return placed(portable.model, portable.params, portable.vocabulary, layer, str(path), mesh)
