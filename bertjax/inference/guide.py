"""Vectors of a guide model for the training of an embedder."""

import numpy as np

from bertjax.errors import UsageError
from bertjax.inference.encode import MEAN
from bertjax.inference.load import load_model
from bertjax.inference.vectors import AUTO, VectorEncoder, resolve_prompt
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.task import Task


def add_guide_vectors(task: Task) -> None:
    """Encodes the training texts of an embedder's task with `data.guide`, if its loss needs that, before training.

    Anchors get the guide's prompt `query`, and other texts its prompt `document`, if it has them.
    """
    if not isinstance(task, EmbedTask) or not task.config.loss.needs_guide:
        return
    model, vectors = load_model(task.config.data.guide), []
    pooling = AUTO if model.embedder else MEAN
    for file in task.files:
        texts = np.array(file.strings, object).reshape(-1, file.num_columns)
        columns = []
        for column, name in enumerate(["query", *["document"] * (file.num_columns - 1)]):
            is_known = model.embedder is not None and name in model.embedder.prompts
            prompt = resolve_prompt(model, pooling, None, name if is_known else None)
            columns.append(VectorEncoder(model, pooling, prompt, len(texts)).encode(texts[:, column].tolist()))
        vectors.append(np.stack(columns, axis=1))
    width, expected = vectors[0].shape[-1], task.vector_width
    if task.config.embed.loss == "distill_vectors" and width != expected:
        raise UsageError(
            f"the vectors of {task.config.data.guide} have {width} components, but the model's have {expected}; set "
            f"--config.embed.dense={width}"
        )
    task.add_guide(vectors)
