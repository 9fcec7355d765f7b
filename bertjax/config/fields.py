"""From settings to configs and back, and what their fields mean.

Settings are frozen dataclasses, in parts: those of SQuAD have `data`, a `SquadData`. A config is the same tree as an
`ml_collections.ConfigDict`, which experiments and the command line change; it has no field that the settings have not.
Each class documents its own fields under `Attributes:` and checks them when it is made.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from bertjax.errors import UsageError, shortened

_Settings = TypeVar("_Settings")
# Counters on devices have 32 bits.
_MOST_INTEGER = 2**31 - 1
_MOST = "most"


class Field(NamedTuple):
    """A field of a config.

    Attributes:
      path: such as `data.seq_len`.
      value: that it has.
      meaning: in a sentence or two.
    """

    path: str
    value: Any
    meaning: str


def limited(default: int, most: int) -> Any:
    """A field of a dataclass that is an integer of at most `most`; others are below 2^31."""
    return dataclasses.field(default=default, metadata={_MOST: most})


def as_config(settings: Any) -> ConfigDict:
    """Settings as a config that can be changed."""
    return ConfigDict(dataclasses.asdict(settings))


def from_config(kind: type[_Settings], config: ConfigDict, path: str = "config") -> _Settings:
    """Settings from a config.

    Args:
      kind: of settings.
      config: has their fields and no others.
      path: of the config in the whole, for messages.

    Raises:
      UsageError: names the field that is missing, too much, of another type, or out of its range.
    """
    fields = dataclasses.fields(kind)
    _check_names([field.name for field in fields], config, path)
    return kind(**{field.name: _value(field, config[field.name], f"{path}.{field.name}") for field in fields})


def _value(field: dataclasses.Field, value: Any, path: str) -> Any:
    default = default_of(field)
    if dataclasses.is_dataclass(default):
        return from_config(type(default), value, path)
    if isinstance(default, dict):
        _check_names([*default], value, path)
        for name, usual in default.items():
            _check(usual, value[name], f"{path}.{name}")
        return value.to_dict()
    _check(default, value, path, field.metadata.get(_MOST, _MOST_INTEGER))
    return type(default)(value)


def _check_names(names: list[str], section: Any, path: str) -> None:
    if not isinstance(section, ConfigDict):
        raise UsageError(f"{path} is {shortened(repr(section))}; it must be a section of fields")
    if lacking := [name for name in names if name not in section]:
        raise UsageError(f"{path} has no {', '.join(lacking)}; begin with the defaults, see bertjax/presets.py")
    if unknown := sorted({*section} - {*names}):
        raise UsageError(f"{path} has {', '.join(unknown)}, which nothing reads; known: {', '.join(sorted(names))}")


def _check(default: Any, value: Any, path: str, most: int = _MOST_INTEGER) -> None:
    """Raises a UsageError for a value of another type than the default, or for an integer beyond all use."""
    kinds, what = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
        str: ((str,), "a text"),
        tuple: ((tuple, list), "a list"),
    }[type(default)]
    if not isinstance(value, kinds) or isinstance(value, bool) and bool not in kinds:
        raise UsageError(f"{path} is {shortened(repr(value))}; it must be {what}")
    if type(default) is int and abs(value) > most:
        raise UsageError(f"{path} is {value:,}; it must be at most {most:,}")


def default_of(field: dataclasses.Field) -> Any:
    """The default of a field, of whichever kind."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def at_least(settings: Any, section: str, **least: float) -> None:
    """Raises a UsageError where a field of settings is below its least value; `section` is the path of all of them."""
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise UsageError(f"{section}.{name} is {getattr(settings, name)}; it must be at least {low}")


def one_of(settings: Any, section: str, **known: tuple[str, ...]) -> None:
    """Raises a UsageError where a field of settings is none of its known values."""
    for name, values in known.items():
        if getattr(settings, name) not in values:
            raise UsageError(f"{section}.{name} is {getattr(settings, name)!r}; known: {', '.join(values)}")


def documented(settings: Any, model: type, prefix: str = "") -> Iterator[Field]:
    """All fields of settings, in order.

    Args:
      settings: of any kind.
      model: the class that a section which is a plain dictionary, `model`, is made into.
      prefix: of their paths.
    """
    meanings = meanings_of(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from documented(value, model, f"{prefix}{field.name}.")
        elif isinstance(value, dict):
            of_model = meanings_of(model)
            yield from (Field(f"{prefix}{field.name}.{name}", value[name], of_model[name]) for name in value)
        else:
            yield Field(f"{prefix}{field.name}", value, meanings[field.name])


def meanings_of(kind: type) -> dict[str, str]:
    """Field to meaning, as the docstrings of a class and of what it inherits from say it under `Attributes:`."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        text = inspect.cleandoc(part.__doc__ or "")
        section = re.search(r"^Attributes:\n((?: .*\n?|\n)*)", text, re.MULTILINE)
        for entry in re.split(r"\n(?=  \w)", "\n" + section[1] if section else ""):
            names, colon, meaning = entry.partition(":")
            if colon:
                found |= dict.fromkeys(re.split(r",\s*", names.strip()), " ".join(meaning.split()))
    return found
