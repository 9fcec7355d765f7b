"""Config and configs: one is made of the other, each field is checked, and each is documented."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from bertjax.config import paths as places
from bertjax.config.fields import as_config, documented, from_config, limited, meanings_of
from bertjax.config.reference import describe_fields, document
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.build import config_class, parse_config, task_names

TASKS = task_names()


@dataclasses.dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
      rate: how much,
        told in two lines.
      names: of things.
    """

    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whole(Part):
    """A whole.

    Attributes:
      first, second: counts.
      is_on: or off.

    Raises:
      UsageError: never.
    """

    first: int = limited(1, 10)
    second: int = 2
    is_on: bool = False
    part: Part = Part()


def test_a_config_gives_the_settings_it_was_made_of():
    made = Whole(rate=0.25, first=7, part=Part(names=("a", "b")))
    assert from_config(Whole, as_config(made)) == made
    config = as_config(made)
    config.part.names = ["c"]
    config.rate = 1
    changed = from_config(Whole, config)
    assert changed.part.names == ("c",) and type(changed.rate) is float


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("first", 11, "config.first is 11; it must be at most 10"),
        ("second", 1 << 31, "config.second is 2,147,483,648; it must be at most 2,147,483,647"),
        ("second", "two", "config.second is 'two'; it must be a whole number"),
        ("second", True, "config.second is True; it must be a whole number"),
        ("is_on", 1, "config.is_on is 1; it must be true or false"),
        ("rate", "fast", "config.rate is 'fast'; it must be a number"),
        ("names", 3, "config.names is 3; it must be a list"),
        ("part", 5, "config.part is 5; it must be a section of fields"),
        ("part", {"rate": 0.5}, "config.part has no names"),
        ("third", 3, "config has third, which nothing reads; known: first, is_on, names, part, rate, second"),
    ],
)
def test_a_value_of_another_kind_is_named(field, value, says):
    content = as_config(Whole()).to_dict() | {field: value}
    with pytest.raises(UsageError) as refusal:
        from_config(Whole, type(as_config(Whole()))(content))
    assert str(refusal.value).startswith(says)


def test_meanings_are_those_of_the_docstrings():
    assert meanings_of(Whole) == {
        "rate": "how much, told in two lines.",
        "names": "of things.",
        "first": "counts.",
        "second": "counts.",
        "is_on": "or off.",
    }


def test_tasks_are_the_files_that_have_settings():
    assert {"pretraining", "glue", "squad", "swag", "ner", "text"} <= {*TASKS}
    assert all(config_class(task)().task == task for task in TASKS)
    with pytest.raises(UsageError, match="config.task is 'run'; known: glue, ner"):
        config_class("run")


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_every_task_has_a_meaning_of_its_own(task):
    settings = config_class(task)()
    fields = list(documented(settings, ModelConfig))
    config = as_config(settings)

    def paths(section, prefix=""):
        for name, value in section.items():
            yield from paths(value, f"{prefix}{name}.") if hasattr(value, "items") else [f"{prefix}{name}"]

    assert {field.path for field in fields} == {*paths(config)}
    assert all(len(field.meaning) > 8 for field in fields)
    text = describe_fields(settings)
    assert all(f"{field.path} = " in text for field in fields)


def test_the_reference_is_that_of_the_code():
    assert (Path(__file__).parents[1] / "docs" / "configs.md").read_text() == document()


def test_the_defaults_of_every_task_are_settings_a_run_can_have():
    assert parse_config(pretraining_config("tiny")).model_config(100).num_hidden_layers == 2
    for task in {*TASKS} - {"pretraining"}:
        given, of_checkpoint = (parse_config(finetuning_config(task, size)) for size in ("tiny", ""))
        assert given.model["hidden_size"] == 128 and not of_checkpoint.model["hidden_size"]
        assert of_checkpoint.model["hidden_dropout_prob"] == given.model["hidden_dropout_prob"] == 0.1


@pytest.mark.parametrize("attention", ["auto", "fused"])
def test_a_config_is_checked_without_asking_for_devices(attention):
    # Several processes have to find each other before one of them does, and the config says how.
    script = f"""
from bertjax.tasks.build import parse_config
from bertjax.presets import finetuning_config, pretraining_config
for config in (pretraining_config("tiny"), finetuning_config("glue", "tiny")):
    config.model.attention = "{attention}"
    config.data.update({{"task": "cola"}} if config.task == "glue" else {{}})
    parse_config(config)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("task", TASKS)
def test_every_field_that_names_a_place_is_known_as_one(task):
    """By its name: else moved files would be another run's, or relative ones others from another folder."""
    (data,) = (field for field in dataclasses.fields(config_class(task)) if field.name == "data")
    names = {field.name for field in dataclasses.fields(data.default)}
    places_of_it = {
        name for name in names if name.endswith("_file") or name in ("path", "corpus", "vocabulary", "labels")
    }
    assert places_of_it and {f"data.{name}" for name in places_of_it} <= {*places.FIELDS}
