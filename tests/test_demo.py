"""The labeled text of the demo does not depend on where the libraries with its docstrings are installed."""

import runpy
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"


def test_modules_are_taken_in_an_order_that_their_place_does_not_change():
    order = runpy.run_path(str(DEMO / "docstring_labels.py"))["order"]
    names = [f"lib/python3/site-packages/numpy/{name}.py" for name in "abc"]
    here, there = ([order(f"{folder}/{name}") for name in names] for folder in ("/opt/.venv", "/home/me"))
    assert here == there and len(set(here)) == 3
