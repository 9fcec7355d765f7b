"""Inference settings that a fine-tuned checkpoint brings along from its training."""

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
class InferenceDefaults:
    """Settings of the fine-tuning run; converted checkpoints get the defaults.

    Attributes:
      seq_len: maximum tokens per row (default: 0, as many as the model takes).
      texts: texts per row, 1 or 2 (default: 0, either).
      doc_stride, max_query_len, n_best, max_answer_len: as in `SquadData`.
      threshold: probability from which a label of a multilabel model is predicted.
      null_threshold: odds above which a question is unanswerable (default: None, every question has an answer).
    """

    seq_len: int = 0
    texts: int = 0
    doc_stride: int = SquadData.doc_stride
    max_query_len: int = SquadData.max_query_len
    n_best: int = SquadData.n_best
    max_answer_len: int = SquadData.max_answer_len
    null_threshold: float | None = None
    threshold: float = TextData.threshold


def read_inference_defaults(checkpoint: epath.Path) -> InferenceDefaults:
    """Reads the settings from the config and results in the checkpoint's workdir."""
    workdir = workdir_of(checkpoint)
    output_layer = read_output_layer(workdir)
    if output_layer is None or is_converted(workdir):
        return InferenceDefaults()
    data = checkpoint_config(checkpoint, []).data
    names = [field.name for field in dataclasses.fields(InferenceDefaults)]
    settings = {name: data[name] for name in names if name in data}
    null_threshold = None
    if data.get("version") == "2.0":
        # Runs with a dev set choose the threshold on it.
        results = read_results(workdir) if (workdir / RESULTS).exists() else {}
        null_threshold = float(results.get("null_threshold", data.null_threshold))
    return InferenceDefaults(**{**settings, "texts": output_layer.texts, "null_threshold": null_threshold})
