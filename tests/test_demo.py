"""Order of the docstrings that the demo labels, which must not depend on where the libraries are installed."""

import runpy
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"


def test_order_of_modules_does_not_depend_on_their_folder():
    sort_key = runpy.run_path(str(DEMO / "docstring_labels.py"))["sort_key"]
    names = [f"lib/python3/site-packages/numpy/{name}.py" for name in "abc"]
    here, there = ([sort_key(f"{folder}/{name}") for name in names] for folder in ("/opt/.venv", "/home/me"))
    assert here == there and len(set(here)) == 3
