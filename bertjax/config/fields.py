"""Conversion between config dataclasses and ConfigDicts, checks of field values, and documentation of fields.

A config is a frozen dataclass, and so is each of its sections. Experiments and the command line edit a config as an
`ml_collections.ConfigDict`. Each class documents its fields under `Attributes:` and checks them in `__post_init__`.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ml_collections import ConfigDict, config_dict

from bertjax.errors import UsageError, shortened
from bertjax.model.config import ModelConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Config = TypeVar("_Config", bound="DataclassInstance")
# Default limit of integer fields, because counters on devices are int32.
_MAX_INTEGER = 2**31 - 1
_MAX = "max"
_MODEL_DEFAULTS = dataclasses.asdict(ModelConfig())
_WIDTH = 100
# Maps the type of a field's default to the allowed types of its value, and to a description of them for messages.
_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    tuple: ((tuple, list), "a list"),
}


class Field(NamedTuple):
    """Config field with its value and documentation.

    Attributes:
      path: path of the field, such as `data.seq_len`.
      value: current value.
      meaning: documentation from the docstring of the config class.
    """

    path: str
    value: Any
    meaning: str


def limited(default: int, max_value: int) -> Any:
    """Returns a dataclass field for an integer whose maximum is `max_value` instead of 2^31 - 1."""
    return dataclasses.field(default=default, metadata={_MAX: max_value})


def to_config_dict(config: Any) -> ConfigDict:
    """Returns a config as a mutable ConfigDict. Unset model fields become typed placeholders."""
    fields = dataclasses.asdict(config)
    if "model" in fields:
        fields["model"] = {
            name: config_dict.placeholder(type(_MODEL_DEFAULTS[name])) if value is None else value
            for name, value in fields["model"].items()
        }
    return ConfigDict(fields)


def from_config_dict(config_class: type[_Config], values: ConfigDict, path: str = "config") -> _Config:
    """Converts a ConfigDict to a config. Missing fields get their defaults. Error messages start with `path`."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    _check_section(values, fields, path)
    return config_class(**{name: _convert(fields[name], values[name], f"{path}.{name}") for name in values})


def _convert(field: dataclasses.Field, value: Any, path: str) -> Any:
    default = _default(field)
    if dataclasses.is_dataclass(default):
        return from_config_dict(type(default), value, path)
    if isinstance(default, dict):
        _check_section(value, default, path)
        for name, item in value.items():
            if item is not None or default[name] is not None:
                _check_type(_MODEL_DEFAULTS[name], item, f"{path}.{name}")
        return {**default, **value.to_dict()}
    _check_type(default, value, path, field.metadata.get(_MAX, _MAX_INTEGER))
    return type(default)(value)


def _check_section(values: Any, known: dict[str, Any], path: str) -> None:
    if not isinstance(values, ConfigDict):
        raise UsageError(f"{path} is {shortened(repr(values))}; it must be a ConfigDict")
    if unknown := sorted({*values} - {*known}):
        raise UsageError(f"{path} contains unknown fields: {', '.join(unknown)}; use one of {', '.join(sorted(known))}")


def _check_type(default: Any, value: Any, path: str, max_integer: int = _MAX_INTEGER) -> None:
    types, description = _TYPES[type(default)]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"{path} is {shortened(repr(value))}; it must be {description}")
    if type(default) is int and abs(value) > max_integer:
        raise UsageError(f"{path} is {value:,}; it must be at most {max_integer:,}")


def check_value_text(field_type: type, path: str, text: str) -> None:
    """Raises a UsageError if the text of an override is not a valid boolean, integer or float."""
    try:
        is_valid = text.lower() in ("true", "false", "1", "0") if field_type is bool else field_type(text) is not None
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"{path}={text} is invalid; it must be {_TYPES[field_type][1]}")


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def iter_fields(config: Any, prefix: str = "") -> Iterator[Field]:
    """Yields all fields of a config and its sections, with their documentation. Each path starts with `prefix`."""
    meanings = field_meanings(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from iter_fields(value, f"{prefix}{field.name}.")
        elif isinstance(value, dict):
            model_meanings = field_meanings(ModelConfig)
            for name, item in value.items():
                yield Field(f"{prefix}{field.name}.{name}", item, model_meanings[name])
        else:
            yield Field(f"{prefix}{field.name}", value, meanings[field.name])


def field_meanings(config_class: type) -> dict[str, str]:
    """Returns the documentation of each field, from the `Attributes:` sections of a class and its base classes."""
    meanings: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        text = inspect.cleandoc(cls.__doc__ or "")
        section = re.search(r"^Attributes:\n((?: .*\n?|\n)*)", text, re.MULTILINE)
        for paragraph in re.split(r"\n(?=  \w)", "\n" + section[1] if section else ""):
            names, colon, meaning = paragraph.partition(":")
            if colon:
                meanings |= dict.fromkeys(re.split(r",\s*", names.strip()), " ".join(meaning.split()))
    return meanings


def describe_fields(config: Any) -> str:
    """Formats every field of a config with its value and documentation as lines for a terminal."""
    lines = []
    for field in iter_fields(config):
        lines.append(f"{field.path} = {field.value!r}")
        lines += textwrap.wrap(field.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def with_defaults(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved config (nested dictionaries) with defaults for fields that later versions have added."""

    def merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        nested = {name: merge(defaults[name], values[name]) for name in values if isinstance(defaults.get(name), dict)}
        return {**defaults, **values, **nested}

    return merge(dataclasses.asdict(config_class()), values)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the fields that differ between two nested dictionaries, as lines `name: old value -> new value`."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {str(before)[:60]} -> {str(after)[:60]}")
    return lines
