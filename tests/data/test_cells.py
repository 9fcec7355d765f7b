"""Tests of lists, missing values and names of labels in table cells."""

import pytest

from bertjax.data.finetuning.cells import label_key, read_list
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError


@pytest.mark.parametrize(
    "cell, items",
    [
        ("['a', \"b\"]", ["a", "b"]),
        (' ["a", 1, true] ', ["a", 1, True]),
        ("('a',)", ["a"]),
        ("{'a'}", ["a"]),
        ("[]", []),
        ("set()", []),
        ("()", []),
        ("[1, 0, 1]", [1, 0, 1]),
        # As pandas writes a list to TSV.
        ('"[""a"", ""b""]"', ["a", "b"]),
        (["a"], ["a"]),
    ],
)
def test_lists_of_json_and_python_are_read(cell, items):
    assert read_list(cell) == items


@pytest.mark.parametrize(
    "cell, in_text",
    [
        *((cell, False) for cell in ("a", "(other)", "a [b]", "[a] b", "", "a, b", "NaN", "f(x)")),
        # A text in brackets is not a list of words.
        *((cell, True) for cell in ("[1]", "[a, b]", "(see above)", '("a")', "(a, b)", "[a] b [c]")),
    ],
)
def test_other_cells_are_not_lists(cell, in_text):
    assert read_list(cell, in_text) is None


@pytest.mark.parametrize(
    "cell",
    ["['a' 'b']", "['a'\n 'b']", "[1 0 1]", "[a, b]", "['a', nan]", "{'a': 1}", "array(['a'], dtype=object)", "['a'"],
)
def test_list_that_cannot_be_read_is_an_error(cell):
    with pytest.raises(ValueError, match="not a list"):
        read_list(cell)
    with pytest.raises(UsageError, match="file line 7: label is .* not a list"):
        read(cell, ["a", "b"], ",")


def read(cell, labels, separator=""):
    stats = ReadStats("file")
    return Target("label", labels, separator).read(Row(7, {"label": cell}), stats), stats


@pytest.mark.parametrize("cell", ["['a']", ["a"], "[1, 0]"])
@pytest.mark.parametrize("labels", [["a", "b"], []])
def test_list_in_a_column_with_one_label_per_row_is_an_error(cell, labels):
    with pytest.raises(UsageError, match="line 7: label is a list: .*data.kind=multilabel.* text:kind=tags"):
        read(cell, labels)


@pytest.mark.parametrize("cell", ["NaN", "None", " nan ", "null", "Null", "NA", "n.a.", "-1.#IND", "1.#QNAN"])
@pytest.mark.parametrize("labels, separator", [(["a", "b"], ""), (["a", "b"], ","), ([], "")])
def test_missing_label_is_counted(cell, labels, separator):
    label, stats = read(cell, labels, separator)
    assert label is None
    ((reason, entry),) = stats.noted.items()
    assert reason.startswith(f"with the label {cell.strip()!r}, missing") and entry == {"rows": 1, "first": "line 7"}


def test_missing_label_may_be_the_name_of_a_class():
    for cell, name in (("a,nan", "nan"), (["a,b", "c"], "a,b")):
        with pytest.raises(UsageError, match=f"line 7: label: '{name}' is not a label; .*label_separator=','"):
            read(cell, ["a", "b"], ",")
    assert read("a,nan", ["a", "nan"], ",")[0] == [1, 1]
    assert read("NA", ["NA", "b"])[0] == 0 and read("None", ["a", "None"], ",")[0] == [0, 1]
    assert read("none", ["none", "some"])[0] == 0


def test_spellings_of_a_number_or_boolean_are_one_label():
    assert {label_key(name) for name in ("1", "1.0", "1.00")} == {"1"}
    assert label_key("01") == "01" and label_key("1.5") == "1.5" and label_key("v1.0") == "v1.0"
    assert {label_key(name) for name in ("True", "true", "TRUE")} == {"true"} and label_key("TRUE-ish") == "TRUE-ish"
    assert [read(cell, ["0", "1"])[0] for cell in ("1", "1.0", "0.0")] == [1, 1, 0]
    assert [read(cell, ["0.0", "1.0"])[0] for cell in ("1", "1.0", "0")] == [1, 1, 0]
    # A checkpoint may have both spellings as classes.
    assert [read(cell, ["1", "1.0"])[0] for cell in ("1", "1.0")] == [0, 1]


def test_multi_hot_labels_need_names():
    for cell in ("[1, 0, 1]", [1.0, 0.0, 1.0], "[True, False, True]", "1,0,1"):
        assert read(cell, ["a", "b", "c"], ",")[0] == [1, 0, 1]
    with pytest.raises(UsageError, match="line 7: label: 0.2 is not a label"):
        read("[0.2, 0.7]", ["a", "b"], ",")
    # Names of labels are not multi-hot.
    assert read("[1, 0]", ["0", "1", "2"], ",")[0] == [1, 1, 0]
    with pytest.raises(UsageError, match="line 7: label has 3 zeros and ones, but there are 2 labels"):
        read("[1, 0, 1]", ["a", "b"], ",")


def test_labels_split_at_the_separator_equal_a_list_of_labels():
    for text, labels, expected in (("b; c", ["b", "c"], [0, 1, 1]), ("", [], [0, 0, 0]), (" a ;", ["a"], [1, 0, 0])):
        assert read(text, ["a", "b", "c"], ";")[0] == read(labels, ["a", "b", "c"], ";")[0] == expected
