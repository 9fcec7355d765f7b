"""Conversion between configs and ConfigDicts, and documentation of their fields.

A config is a frozen dataclass, and so is each of its sections. Experiments and the command line edit a config as an
`ml_collections.ConfigDict`. Each class documents its fields under `Attributes:`, and declares their bounds
(`bertjax/utils/sections.py`).
"""

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict, config_dict
from ml_collections.config_flags.tuple_parser import TupleParser

from bertjax.errors import UsageError, shortened
from bertjax.utils.sections import Section

_Config = TypeVar("_Config", bound=Section)
_WIDTH = 100
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
# Allowed value types and their description in messages, keyed by field type.
_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    tuple: ((tuple, list), "a list"),
}


def to_config_dict(config: Section) -> ConfigDict:
    """Returns a config as a mutable ConfigDict. Unset fields become typed placeholders."""
    values, types = ConfigDict(), _field_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            value = to_config_dict(value)
        values[field.name] = config_dict.placeholder(types[field.name]) if value is None else value
    return values


def from_config_dict(default: _Config, values: ConfigDict | dict[str, Any], path: str = "config") -> _Config:
    """Returns `default` with the fields in `values` replaced. `path` precedes field names in error messages."""
    types = _field_types(type(default))
    if not isinstance(values, (ConfigDict, dict)):
        raise UsageError(f"{path} is {shortened(repr(values))}; it must be a dictionary of fields")
    if unknown := sorted({*values} - {*types}):
        raise UsageError(f"{path} contains unknown fields: {', '.join(unknown)}; use one of {', '.join(sorted(types))}")
    changes: dict[str, Any] = {}
    for name, value in values.items():
        current = getattr(default, name)
        if isinstance(current, Section):
            changes[name] = from_config_dict(current, value, f"{path}.{name}")
        elif value is None and default.may_be_unset:
            changes[name] = None
        else:
            changes[name] = _convert(types[name], value, f"{path}.{name}")
    return dataclasses.replace(default, **changes)


@functools.cache
def _field_types(config_class: type) -> dict[str, type]:
    """Returns the type of each field, without item types: `tuple` for `tuple[str, ...]`."""
    hints = typing.get_type_hints(config_class)
    return {
        field.name: typing.get_origin(hints[field.name]) or hints[field.name]
        for field in dataclasses.fields(config_class)
    }


def _convert(field_type: type, value: Any, path: str) -> Any:
    types, description = _TYPES[field_type]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"{path} is {shortened(repr(value))}; it must be {description}")
    return field_type(value)


def parse_value(field_type: type, item: str) -> Any:
    """Parses the value of a field or argument, given as `NAME=VALUE`. For a boolean, `NAME` alone means true."""
    _, has_value, text = item.partition("=")
    try:
        if field_type is bool:
            return _BOOLEANS[text.lower() if has_value else "true"]
        if not has_value:
            raise UsageError(f"{item} has no value; use {item}=VALUE")
        return (TupleParser().parse if field_type is tuple else field_type)(text)
    except (KeyError, ValueError):
        raise UsageError(f"{shortened(item)} is invalid; it must be {_TYPES[field_type][1]}") from None


def iter_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields path, value and documentation of all fields of a config. Each path starts with `prefix`."""
    meanings = field_meanings(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            yield from iter_fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, meanings[field.name]


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
    for path, value, meaning in iter_fields(config):
        lines.append(f"{path} = {value!r}")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def with_defaults(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved config (nested dictionaries) with defaults for fields that later versions have added."""
    defaults = flatten_dict(dataclasses.asdict(config_class()), keep_empty_nodes=True)
    return unflatten_dict(defaults | flatten_dict(values, keep_empty_nodes=True))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the fields that differ between two nested dictionaries, as lines `name: old value -> new value`."""
    before, after = flatten_dict(old, sep="."), flatten_dict(new, sep=".")
    pairs = {name: (before.get(name, "(absent)"), after.get(name, "(absent)")) for name in sorted({*before, *after})}
    return [f"{name}: {str(first)[:60]} -> {str(last)[:60]}" for name, (first, last) in pairs.items() if first != last]
