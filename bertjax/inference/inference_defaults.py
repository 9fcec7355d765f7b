"""What a checkpoint tells of how it was fine-tuned, beside its output layer."""

import dataclasses

from etils import epath

from bertjax.tasks.finetuning.output_layer import read_output_layer
from bertjax.tasks.squad import SquadData
from bertjax.tasks.text import TextData
from bertjax.training.checkpoint import workdir_of
from bertjax.training.checkpoint_config import checkpoint_config
from bertjax.training.results import read_results
from bertjax.training.workdir import RESULTS, is_converted


@dataclasses.dataclass(frozen=True)
class Habits:
    """What a model was fine-tuned on; the defaults are for one that does not tell.

    Attributes:
      seq_len: tokens a row at most; 0 is as many as the model takes.
      texts: 1 or 2 a row; 0 is either.
      doc_stride, max_query_len, n_best, max_answer_len: see `SquadData`.
      threshold: probability from which on a label is given, where there may be several.
      null_threshold: a question has no answer where its odds are above; None where every question has one.
    """

    seq_len: int = 0
    texts: int = 0
    doc_stride: int = SquadData.doc_stride
    max_query_len: int = SquadData.max_query_len
    n_best: int = SquadData.n_best
    max_answer_len: int = SquadData.max_answer_len
    null_threshold: float | None = None
    threshold: float = TextData.threshold


def habits_of(checkpoint: epath.Path) -> Habits:
    """The habits of one of our own checkpoints, which are in its workdir; a converted one does not tell.

    Raises:
      UsageError: a file of the workdir cannot be read.
      BertjaxError: its results have been changed.
    """
    workdir = workdir_of(checkpoint)
    layer = read_output_layer(workdir)
    if layer is None or is_converted(workdir):
        return Habits()
    data = checkpoint_config(checkpoint, []).data
    known = {field.name: data[field.name] for field in dataclasses.fields(Habits) if field.name in data}
    threshold = None
    if data.get("version") == "2.0":
        # Chosen on dev, where there was a dev set.
        results = read_results(workdir) if (workdir / RESULTS).exists() else {}
        threshold = float(results.get("null_threshold", data.null_threshold))
    return Habits(**{**known, "texts": layer.texts, "null_threshold": threshold})
