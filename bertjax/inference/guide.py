"""Vectors of a guide model, for training an embedder."""

import numpy as np

from bertjax.errors import UsageError
from bertjax.inference.encode import encode_texts
from bertjax.inference.load import load_model
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.task import Task


def add_guide_vectors(task: Task) -> None:
    """Adds the guide model's vectors to an embedding task whose loss needs them. Call this before training."""
    if not isinstance(task, EmbedTask) or not task.config.loss.needs_guide:
        return
    model, vectors = load_model(task.config.data.guide), []
    for file in task.files:
        columns = range(file.num_columns)
        arrays = [encode_texts(model, file.strings[i :: file.num_columns], is_query=i == 0) for i in columns]
        vectors.append(np.stack(arrays, axis=1))
    width, expected = vectors[0].shape[-1], task.objective.model.width
    if task.config.embed.loss == "distill_vectors" and width != expected:
        raise UsageError(
            f"the vectors of {task.config.data.guide} have {width} components, but the model's have {expected}; set "
            f"--config.embed.dense={width}"
        )
    task.add_guide(vectors)
