"""What decides a model's answers beside its parameters, and the seal that binds it to each of its checkpoints.

A checkpoint's `meta` holds the fingerprints of its arrays, its score, and its identity: the model's settings, those of
the task that decide an answer, which vocabulary, and what its output layer tells. The workdir's own files say the same
for people and for other commands; where the two differ, somebody has edited or exchanged one of them, and the answers
would be wrong without a word.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from bertjax.config.fields import differences
from bertjax.data.corpus.vocabulary_files import ENTRY
from bertjax.errors import BertjaxError
from bertjax.model.config import Architecture
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.utils.io import read_json

CONFIG = "config.json"
_ARCHITECTURE = "architecture"
# Of a task's data settings, those that decide what it answers to one row.
ANSWERS = ("seq_len", "doc_stride", "max_query_len", "n_best", "max_answer_len", "null_threshold", "threshold")
_ANSWERS = "answers"
_OF_CONFIG = (_ARCHITECTURE, _ANSWERS)
_SEAL = "seal"


def identity_of(
    architecture: Architecture, files: Mapping[str, bytes], data: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is sealed into a checkpoint: its architecture, and files of the workdir with their content.

    Args:
      architecture: whose parameters are saved.
      files: name to content of what the workdir keeps beside its checkpoints.
      data: the settings of the task's data; a converted checkpoint has none.
    """
    kept = {name: json.loads(files[name]) for name in (ENTRY, OUTPUT_LAYER) if name in files}
    answers = {_ANSWERS: {name: data[name] for name in ANSWERS if name in data}} if data else {}
    return {_ARCHITECTURE: dataclasses.asdict(architecture), **answers, **kept}


def architecture_of(meta: dict[str, Any]) -> Architecture:
    """The architecture that was sealed into a checkpoint.

    Raises:
      BertjaxError: it does not say one that this version knows.
    """
    try:
        return Architecture(**meta["identity"][_ARCHITECTURE])
    except (KeyError, TypeError) as error:
        raise BertjaxError("the checkpoint does not tell its architecture, as those of earlier versions") from error


def sealed(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta data of a checkpoint with a hash of all of it."""
    return {**meta, _SEAL: _seal(meta)}


def _seal(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def read_meta(checkpoint: epath.Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `step`, `score`, `fingerprints` and `identity`.

    Raises:
      BertjaxError: it is damaged.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        return unsealed(read_json(file))
    except (OSError, ValueError, BertjaxError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BertjaxError(f"checkpoint {checkpoint} is damaged: {file} ({reason})") from error


def unsealed(meta: Any) -> dict[str, Any]:
    """The meta data without its hash, which must fit.

    Raises:
      BertjaxError: it does not.
    """
    if not isinstance(meta, dict) or _SEAL not in meta:
        raise BertjaxError("it has no seal, as those of earlier versions")
    content = {name: value for name, value in meta.items() if name != _SEAL}
    if _seal(content) != meta[_SEAL]:
        raise BertjaxError("it does not fit its seal")
    return content


def check_identity(checkpoint: epath.Path, meta: dict[str, Any]) -> None:
    """Holds the files of a checkpoint's workdir against what was sealed into it.

    Raises:
      BertjaxError: one of them has been changed, or is gone.
    """
    workdir = checkpoint.parent.parent
    for part, expected in meta["identity"].items():
        name = CONFIG if part in _OF_CONFIG else part
        try:
            found = read_json(workdir / name)
            if part == _ARCHITECTURE:
                # What a config leaves 0 or empty is the vocabulary's or the checkpoint's.
                found = {field: found["model"][field] or value for field, value in expected.items()}
            elif part == _ANSWERS:
                found = {field: found["data"][field] for field in expected}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise BertjaxError(
                f"cannot read {workdir / name} ({reason}), which belongs to checkpoint {checkpoint}; bring it back"
            ) from error
        changed = ["it is no JSON object"] if not isinstance(found, dict) else differences(expected, found)
        if changed:
            raise BertjaxError(
                f"{workdir / name} has been changed since checkpoint {checkpoint} was saved ({'; '.join(changed)}); "
                "undo it, or the model would answer otherwise than it was trained to"
            )
