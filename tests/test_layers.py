"""Every module imports from its own floor and from those below it, and from nothing above."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bertjax"
# From the ground up. A folder is one floor, whatever is in it.
FLOORS = (
    ("errors", "utils"),
    ("model",),
    ("config",),
    ("data",),
    ("metrics",),
    ("tasks",),
    ("presets",),
    ("training",),
    ("inference", "convert"),
    ("api", "estimate"),
    ("reproduce",),
    ("cli", "__main__", "__init__"),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
# Where models are, no text, no file and no TensorFlow is.
PURE = ("model", "training/step.py")
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floor(module: str) -> int:
    """Of `bertjax.x.y`, that of x."""
    return FLOOR_OF[module.split(".")[1]]


def test_all_modules_have_a_floor():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert {path.stem for path in PACKAGE.glob("*.py")} | folders == FLOOR_OF.keys()


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_import_climbs(file):
    own = FLOOR_OF[file.relative_to(PACKAGE).with_suffix("").parts[0]]
    names = {name for name in imported(file) if name.startswith("bertjax.")}
    above = {name for name in names if name.split(".")[1] in FLOOR_OF and floor(name) > own}
    assert not above, f"{file} imports {above}"


def test_models_and_the_step_know_neither_files_nor_tensorflow():
    for place in PURE:
        for file in [PACKAGE / place] if place.endswith(".py") else sorted((PACKAGE / place).rglob("*.py")):
            roots = {name.split(".")[0] for name in imported(file)}
            assert not roots & {"tensorflow", "os", "pathlib", "etils", "orbax"}, file
            assert not {name for name in imported(file) if name.startswith("bertjax.utils.io")}, file
