"""Docstrings that the demo reads: their prose, their documents and their order."""

import importlib.metadata
import sys
from collections import Counter
from pathlib import Path

import pytest

from bertjax.data.corpus import readers

DEMO = Path(__file__).parents[1] / "demo"


@pytest.fixture
def docstrings(monkeypatch):
    """Returns the module `demo/docstrings.py`."""
    monkeypatch.syspath_prepend(DEMO)
    import docstrings

    return docstrings


def test_sort_key_of_a_module_does_not_depend_on_the_folder_of_the_environment(docstrings):
    import docstring_labels

    names = [f"lib/python3/site-packages/numpy/{name}.py" for name in "abc"]
    here, there = (
        [docstring_labels.sort_key(f"{folder}/{name}") for name in names] for folder in ("/opt/.venv", "/home/me")
    )
    assert here == there and len(set(here)) == 3


def test_prose_leaves_out_code_and_tables(docstrings):
    docstring = """Adds two numbers and returns
    what they make together.

    >>> add(1, 2)
    3

    Args:
      first: a number of the
        usual kind, not a string.
      second: another one of that kind.

    Example code follows here::

        result = add(3, 4)
        this line is code as well

    ==== =====
    a    b

    Raises nothing that anyone has ever seen.
    """
    assert docstrings.prose(docstring).split("\n") == [
        "Adds two numbers and returns what they make together.",
        "first: a number of the usual kind, not a string.",
        "second: another one of that kind.",
        "Example code follows here:",
        "Raises nothing that anyone has ever seen.",
    ]


def test_prepare_reads_each_module_as_one_document(docstrings, tmp_path, monkeypatch):
    river, walk, paper = "The green river is quiet. " * 5, "Walk under the seven lamps.", "Paper and stone, once again."
    function = f'"""{river}"""\ndef f():\n    """{walk}"""\n'
    method = f'"""{river}"""\nclass C:\n    """{paper}"""\n    def f():\n        """{walk} {paper}"""\n'
    for number, source in enumerate([function, method, method, '"""This is not Python any more.""" ((\n']):
        (tmp_path / f"{number}.py").write_text(source)
    monkeypatch.setattr(docstrings, "modules", lambda: sorted(map(str, tmp_path.glob("*.py"))))
    monkeypatch.setattr(sys, "argv", ["docstrings.py", str(tmp_path / "runs" / "docs.txt")])
    docstrings.main()
    (source,), _ = readers.find_sources([f"prose:{tmp_path}/runs/docs.txt"])
    texts = [text.text.strip().split("\n") for text in readers.read(source, Counter())]
    assert texts == [[river.strip(), walk], [paper, f"{walk} {paper}"]]


def test_modules_have_a_fixed_order(docstrings, monkeypatch):
    # Use two distributions, because listing all installed ones takes seconds.
    some = [importlib.metadata.distribution(name) for name in ("jax", "numpy")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: some)
    names = docstrings.modules()
    assert names == docstrings.modules() and len(names) == len(set(names)) > 1000
    assert any(name.endswith("/argparse.py") for name in names) and any("/numpy/" in name for name in names)
