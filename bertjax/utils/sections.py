"""Config sections: frozen dataclasses that check the declared bounds of their fields on construction."""

import dataclasses
import math
import operator
from collections.abc import Collection
from typing import Any, ClassVar

from bertjax.errors import UsageError

_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt, "at_most": operator.le}
# Default maximum of integer fields, because counters on devices are int32.
_MAX_INTEGER = 2**31 - 1


def bounds_problem(value: Any, choices: Collection[str] = (), **bounds: float) -> str:
    """Returns advice on how to correct a value that is out of bounds, else "". `bounds` are keys of `_COMPARISONS`."""
    if choices:
        return "" if value in choices else f"use one of {', '.join(filter(None, choices))}"
    # Every comparison with NaN is False, so NaN breaks every bound.
    broken = [name for name, limit in bounds.items() if not _COMPARISONS[name](value, limit)]
    return " and ".join(f"it must be {name.replace('_', ' ')} {bounds[name]:,}" for name in broken)


def bounded(default: Any, **bounds: Any) -> Any:
    """Returns a dataclass field with a default and bounds; `bounds` are the arguments of `bounds_problem`."""
    return dataclasses.field(default=default, metadata=bounds)


@dataclasses.dataclass(frozen=True)
class Section:
    """Base class of configs and their sections.

    A subclass that checks combinations of fields overrides `__post_init__`, and calls the base class's method first.
    """

    _prefix: ClassVar[str] = "config."
    may_be_unset: ClassVar[bool] = False

    def __init_subclass__(cls, *, prefix: str = "", may_be_unset: bool = False) -> None:
        """Sets the prefix of field names in error messages, and whether fields may be None (defaults: inherited).

        Fields may be None, for example, if a checkpoint determines the architecture.
        """
        super().__init_subclass__()
        cls._prefix, cls.may_be_unset = prefix or cls._prefix, may_be_unset or cls.may_be_unset

    def __post_init__(self) -> None:
        """Raises a UsageError if a value violates its field's bounds, or a float is not finite."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            bounds: dict[str, Any] = ({"at_most": _MAX_INTEGER} if type(value) is int else {}) | entry.metadata
            is_infinite = type(value) is float and not math.isfinite(value)
            problem = "it must be finite" if is_infinite else ""
            if type(value) in (int, float, str) and (problem := bounds_problem(value, **bounds) or problem):
                shown = repr(value) if isinstance(value, str) else f"{value:,}"
                raise UsageError(f"{self._prefix}{entry.name} is {shown}; {problem}")
