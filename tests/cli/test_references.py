"""Reference pages of the documents: commands, config fields and the Python API."""

import re
from pathlib import Path

import pytest
import references

import bertjax

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("file", references.PAGES, ids=lambda file: file.name)
def test_generated_page_is_up_to_date(file):
    assert file.read_text() == references.PAGES[file]()


def test_api_page_has_all_public_names():
    text = (DOCS / "api.md").read_text()
    assert sorted(re.findall(r"^::: bertjax\.(\w+)$", text, re.MULTILINE)) == sorted(bertjax.__all__)
