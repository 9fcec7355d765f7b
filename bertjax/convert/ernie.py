"""ERNIE as in transformers, without embeddings of task types: BERT with other names (arXiv 1904.09223)."""

import dataclasses

from bertjax.convert.bert import BERT

_PREFIX = "ernie."


def _renamed(name: str) -> str:
    return _PREFIX + name.removeprefix(BERT.prefix) if name.startswith(BERT.prefix) else name


ERNIE = dataclasses.replace(
    BERT,
    model_type="ernie",
    refused=(*BERT.refused, "use_task_id"),
    classes={name.replace("Bert", "Ernie"): each for name, each in BERT.classes.items()},
    base_class="ErnieModel",
    prefix=_PREFIX,
    arrays=tuple((path, _renamed(name)) for path, name in BERT.arrays),
    tied={_renamed(copy): _renamed(original) for copy, original in BERT.tied.items()},
    ignored=(*map(_renamed, BERT.ignored), "ernie.embeddings.task_type_ids"),
)
