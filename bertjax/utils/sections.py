"""Config sections: frozen dataclasses that check the declared bounds of their fields on construction."""

import dataclasses
import math
import operator
from collections.abc import Collection
from typing import Any, ClassVar

from bertjax.errors import UsageError

_BOUNDS = "bounds"
_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt, "at_most": operator.le}
# Default maximum of integer fields, because counters on devices are int32.
_MAX_INTEGER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Allowed values of a field. Bounds that are None do not apply."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: Collection[str] = ()

    def problem(self, value: Any) -> str:
        """Returns advice for an error message if the value is not allowed, else ""."""
        if self.choices:
            return "" if value in self.choices else f"use one of {', '.join(filter(None, self.choices))}"
        limits = {name: getattr(self, name) for name in _COMPARISONS}
        # Every comparison with NaN is False, so NaN breaks every bound.
        broken = [name for name, limit in limits.items() if limit is not None and not _COMPARISONS[name](value, limit)]
        return " and ".join(f"it must be {name.replace('_', ' ')} {limits[name]:,}" for name in broken)


def bounded(default: Any, **bounds: Any) -> Any:
    """Returns a dataclass field with a default and bounds; `bounds` are the arguments of `Bounds`."""
    return dataclasses.field(default=default, metadata={_BOUNDS: Bounds(**bounds)})


@dataclasses.dataclass(frozen=True)
class Section:
    """Base class of configs and their sections.

    A subclass that checks combinations of fields overrides `__post_init__`, and calls the base class's method first.
    """

    # Prefix of field names in error messages.
    field_prefix: ClassVar[str] = "config."
    # Whether fields may be None, for example if a checkpoint determines the architecture.
    may_be_unset: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises a UsageError if a value violates its field's bounds, or a float is not finite."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            bounds = entry.metadata.get(_BOUNDS, Bounds())
            if type(value) is int and bounds.at_most is None:
                bounds = dataclasses.replace(bounds, at_most=_MAX_INTEGER)
            is_infinite = type(value) is float and not math.isfinite(value)
            problem = "it must be finite" if is_infinite else ""
            if type(value) in (int, float, str) and (problem := bounds.problem(value) or problem):
                shown = repr(value) if isinstance(value, str) else f"{value:,}"
                raise UsageError(f"{self.field_prefix}{entry.name} is {shown}; {problem}")
