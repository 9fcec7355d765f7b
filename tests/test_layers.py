"""Layers: a module imports only from its own layer and from lower layers. The wheel contains all folders."""

import ast
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bertjax"
# Groups of folders and modules, from the lowest layer to the highest. Members of a group may import each other.
LAYERS = (
    ("errors", "utils"),
    ("model",),
    ("config",),
    ("data",),
    ("metrics",),
    ("tasks",),
    ("presets",),
    ("training",),
    ("convert",),
    ("inference",),
    ("api", "estimate"),
    ("reproduce",),
    ("cli", "__main__", "__init__"),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# Modules that must not import file, path or TensorFlow libraries.
PURE = ("model", "training/step.py")
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Returns the names of all modules that a file imports, including imports inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_every_top_level_module_and_folder_has_an_import_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert {path.stem for path in PACKAGE.glob("*.py")} | folders == LAYER_OF.keys()


def test_wheel_contains_every_folder():
    pyproject = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    folders = {file.parent.relative_to(PACKAGE.parent) for file in MODULES}
    experiments = {"bertjax.experiments", "bertjax.experiments.tables"}
    assert {*pyproject["tool"]["setuptools"]["packages"]} == {".".join(path.parts) for path in folders} | experiments


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_import_only_from_their_own_or_lower_layers(file):
    own = LAYER_OF[file.relative_to(PACKAGE).with_suffix("").parts[0]]
    names = {name for name in imported(file) if name.startswith("bertjax.")}
    # `from bertjax import X` may import a name that is no module.
    above = {name for name in names if LAYER_OF.get(name.split(".")[1], own) > own}
    assert not above, f"{file} imports {above}"


def test_model_and_train_step_do_not_import_file_io_or_tensorflow():
    for path in PURE:
        for file in [PACKAGE / path] if path.endswith(".py") else sorted((PACKAGE / path).rglob("*.py")):
            roots = {name.split(".")[0] for name in imported(file)}
            assert not roots & {"tensorflow", "os", "pathlib", "etils", "orbax"}, file
            assert not {name for name in imported(file) if name.startswith("bertjax.utils.io")}, file
