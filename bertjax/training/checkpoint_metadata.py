"""Checkpoint metadata: the kind of model, its architecture, and fingerprints of the arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from etils import epath

from bertjax.errors import BertjaxError, first_line
from bertjax.model.config import Architecture
from bertjax.model.heads import model_kind
from bertjax.utils.io import read_json_object


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, stored beside its arrays as JSON.

    Attributes:
      step: training step; 0 for a converted checkpoint.
      model: kind of model, from which `bertjax.model.heads.build_model` builds the module.
      architecture: fields of `Architecture`.
      fingerprints: fingerprint of each array item, `params` and `training`.
      score: evaluation score, higher is better (default: None, no score).
      metric_lines: lines of `metrics.jsonl` written before the checkpoint (default: None, unknown).
    """

    step: int
    model: dict[str, Any]
    architecture: dict[str, Any]
    fingerprints: dict[str, str]
    score: float | None = None
    metric_lines: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the metadata as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "CheckpointMetadata":
        """Parses what `as_json` returns.

        Raises:
          BertjaxError: a field is missing or unknown.
        """
        try:
            metadata = cls(**content)
            if not isinstance(metadata.fingerprints["params"], str) or not isinstance(metadata.model["kind"], str):
                raise TypeError("wrong type of fingerprints or model")
            return metadata
        except (KeyError, TypeError) as error:
            raise BertjaxError(f"unknown format of checkpoint metadata: {first_line(error)}") from error


def model_metadata(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the fields `model` and `architecture` of a model's metadata."""
    return {"model": model_kind(model), "architecture": dataclasses.asdict(model.config.architecture)}


def read_metadata(checkpoint: epath.Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint directory.

    Raises:
      BertjaxError: the metadata is missing or damaged.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        return CheckpointMetadata.from_json(read_json_object(file))
    except (OSError, ValueError, BertjaxError) as error:
        raise BertjaxError(f"checkpoint {checkpoint} is damaged: {file} ({first_line(error)})") from error


def saved_architecture(checkpoint: epath.Path) -> Architecture:
    """Reads the architecture of a checkpoint; fields that its metadata lacks have their defaults.

    Raises:
      BertjaxError: the metadata is damaged, or has a field that this version does not know.
    """
    fields = read_metadata(checkpoint).architecture
    try:
        return Architecture(**fields)
    except TypeError as error:
        raise BertjaxError(f"unknown architecture of checkpoint {checkpoint}: {first_line(error)}") from error
