"""Tests of table files and cells: an irregular row is counted or raises an error with its line number."""

import pytest

from bertjax.data.finetuning.cells import label_key, read_list
from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats, Row, column_names, read_table
from bertjax.data.finetuning.tagged import read_tagged_rows
from bertjax.errors import UsageError

SHORT = "with too few fields"


def read_rows(tmp_path, content: bytes | str, columns=("text", "label"), form="tsv", **options):
    path = tmp_path / f"file.{form}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    stats = ReadStats(str(path))
    return [(row.line, *row.fields.values()) for row in read_table(path, columns, stats, **options)], stats


@pytest.mark.parametrize(
    "form, content, rows",
    [
        # Byte-order mark, and line ends of old Macs and Windows.
        ("tsv", b"\xef\xbb\xbftext\tlabel\ra b\t1\r\r\nc\t0\r\n", [(2, "a b", "1"), (3, "c", "0")]),
        # Quotes are literal in TSV.
        ("tsv", 'text\tlabel\n"He said\t1\n"x" y"\t0\n', [(2, '"He said', "1"), (3, '"x" y"', "0")]),
        # Only newlines end a line.
        ("tsv", "text\tlabel\na\u2028b\x85c\x0bd\t1\n", [(2, "a\u2028b\x85c\x0bd", "1")]),
        # Separators at the end of a line are not fields.
        ("tsv", "text\tlabel\na\tpos\t\nb\tneg\t\n", [(2, "a", "pos"), (3, "b", "neg")]),
        ("csv", 'text,label\n"a, ""b""\nc",1\nd,0\n', [(2, 'a, "b"\nc', "1"), (4, "d", "0")]),
        # A blank line is a row only in a table with one column.
        ("csv", 'text,label\n"a\n\nb",x\n\n \nb,y\n', [(2, "a\n\nb", "x"), (7, "b", "y")]),
        # A space before a quote is not a part of the field.
        ("csv", '"text", "label"\n"a, b", "x"\nc, y\n', [(2, "a, b", "x"), (3, "c", "y")]),
        # The column `split` has numbers of folds.
        ("tsv", "split\ttext\tlabel\n1\ta\tx\n2\tb\ty\n", [(2, "a", "x"), (3, "b", "y")]),
        # The index column of pandas has no name.
        ("csv", ",text,label\n0,a,pos\n1,b,neg\n", [(2, "a", "pos"), (3, "b", "neg")]),
        ("csv", "text,label\n" + "a " * 100_000 + ",1\n", [(2, "a " * 100_000, "1")]),
        ("jsonl", '{"text": "a", "label": 1}\n{"label": ["x"], "text": "b"}\n', [(1, "a", "1"), (2, "b", ["x"])]),
    ],
)
def test_rows_have_the_values_of_their_columns(form, content, rows, tmp_path):
    read, stats = read_rows(tmp_path, content, form=form)
    assert read == rows and stats.read == len(rows) and not stats.skipped and not stats.noted


@pytest.mark.parametrize(
    "form, content, lines, reasons",
    [
        ("tsv", "id\ttext\tlabel\n1\ta\t1\n2\tb\n3\n4\td\t0\n", [2, 5], {SHORT: (2, 3)}),
        ("tsv", "text\tlabel\na\t1\n\nb\t0\n", [2, 4], {SHORT: (1, 3)}),
        ("jsonl", '{"text": "a", "label": 1}\n\n{"text": "b"}\n', [1], {SHORT: (2, 2)}),
        (
            "jsonl",
            '{"text": "a", "label": NaN}\n{"text": null, "label": 1}\n{"text": "b", "label": 1.0}\n',
            [3],
            {"with null or NaN as 'label'": (1, 1), "with null or NaN as 'text'": (1, 2)},
        ),
    ],
)
def test_rows_with_missing_fields_are_skipped_or_kept_and_counted(form, content, lines, reasons, tmp_path):
    expected = {reason: {"rows": rows, "first": f"line {first}"} for reason, (rows, first) in reasons.items()}
    rows, stats = read_rows(tmp_path, content, form=form)
    assert [line for line, *_ in rows] == lines and stats.skipped == expected
    assert all(f"{reason} (first: line" in stats.summary() for reason in reasons)
    kept, stats = read_rows(tmp_path, content, form=form, keep_short=True)
    assert len(kept) == stats.read == len(rows) + sum(count for count, _ in reasons.values())
    assert stats.noted == expected and not stats.skipped and {*rows} < {*kept}
    assert all("" in row for row in kept if row not in rows)


def test_rows_that_an_annotator_rejected_or_ignored_are_not_used_for_training(tmp_path):
    answers = ("accept", "reject", "ignore")
    content = "".join(f'{{"text": "{answer}", "label": "x", "answer": "{answer}"}}\n' for answer in answers)
    rows, stats = read_rows(tmp_path, content, form="jsonl")
    assert rows == [(1, "accept", "x")] and [*stats.skipped] == ["with the answer 'reject'", "with the answer 'ignore'"]
    kept, stats = read_rows(tmp_path, content, form="jsonl", keep_short=True)
    assert len(kept) == 3 and [*stats.noted] == ["with the answer 'reject'", "with the answer 'ignore'"]
    # `keep_short` keeps rejected and ignored rows, but they are not scored.
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    columns, stats = ["text", "label"], ReadStats("")
    tagged = read_tagged_rows(read_table(path, columns, stats, keep_short=True), *columns, stats, keep_untagged=True)
    assert tagged.tags == [["x"], [""], [""]]
    assert len(read_rows(tmp_path, content, ["text", "answer"], form="jsonl")[0]) == 3


@pytest.mark.parametrize("form", ["tsv", "csv"])
def test_blank_line_is_a_row_of_a_table_with_one_column(form, tmp_path):
    assert read_rows(tmp_path, "text\na\n\ntext\n", ["text"], form)[0] == [(2, "a"), (3, ""), (4, "text")]


@pytest.mark.parametrize(
    "form, content, row, reason",
    [
        ("tsv", 'text\tlabel\n"a ""b"""\t1\n', (2, '"a ""b"""', "1"), "with quoted fields"),
        ("tsv", 'text\tlabel\n"a, b"\t1\nc\t0\n', (2, '"a, b"', "1"), "with quoted fields"),
        ("jsonl", '{"text": "a\\ud83d", "label": "x"}', (1, "a\ufffd", "x"), "with unpaired surrogates"),
        (
            "tsv",
            "id\ttext\tlabel\n1\twell\tfilm\tpos\n2\ta\tneg\n",
            (2, "well", "film"),
            "with more fields than columns",
        ),
    ],
)
def test_irregular_rows_are_read_and_counted(form, content, row, reason, tmp_path):
    rows, stats = read_rows(tmp_path, content, form=form)
    ((noted, entry),) = stats.noted.items()
    assert noted.startswith(reason) and entry == {"rows": 1, "first": f"line {row[0]}"}
    assert rows[0] == row


@pytest.mark.parametrize(
    ("form", "content"),
    [("csv", ",text,id,label\n0,a,1,pos\n"), ("jsonl", '{"": 0, "text": "a", "label": 1, "id": 2}\n')],
)
def test_ignored_columns_are_named(form, content, tmp_path):
    summary = read_rows(tmp_path, content, form=form)[1].summary()
    assert "columns text, label (ignored: a column without a name, id)" in summary


@pytest.mark.parametrize(
    "form, content, message",
    [
        *((form, b"\xef\xbb\xbf\r\n", "is empty") for form in ("tsv", "csv", "jsonl")),
        ("txt", "text\tlabel\n", "unknown format"),
        ("tsv", "text\tx\na\t1\n", "no column 'label'; its columns are 'text', 'x';"),
        ("csv", "text;label\na;1\n", "its columns are 'text;label';.*commas in .csv"),
        ("tsv", "\ntext\n", "its columns are .none."),
        ("tsv", "text\ttext\tlabel\na\tb\t1\n", "several columns named 'text'"),
        ("tsv", "text\tlabel\na\t1\ntext\tlabel\nb\t0\n", "line 3 repeats the header"),
        ("csv", 'text,label\na,1\n\ufeff"text","label"\nb,0\n', "line 3 repeats the header"),
        # Quoted fields of pandas and Excel that contain a tab or a line break.
        ("tsv", 'text\tlabel\n"a\tb"\t1\nc\t0\n', "quoted fields with tabs or line breaks"),
        ("tsv", 'label\ttext\tid\n1\t"a\nb"\t5\n0\tc\t6\n', "quoted fields with tabs or line breaks"),
        ("csv", "id,text,label\n2,a,neg\n1,well, film,pos\n", "line 3 has more fields than the header"),
        # The quotes of the last field are unbalanced.
        ("tsv", 'text\tlabel\n"a\nb\nc\nd"\t1\n"a"x"\n', "4 of 5 rows of .* have too few fields; use .csv"),
        # R's write.table writes a column of row names that has no name in the header.
        ("tsv", "text\tlabel\n1\ta film\tpos\n2\ta book\tneg\n", "all rows .* have more fields"),
        ("csv", 'text,label\na,1\n"b,0\nc,1\n', "line 3; check its quotes"),
        ("csv", "text,label,Part\na,1,Training\nb,0,TEST\n", "rows of several splits .column 'Part'"),
        ("tsv", "split\ttext\tlabel\ntrain\ta\t1\n\ntest\tb\t0\nextra\tc\t0\n", "rows of several splits"),
        ("csv", "text,label,part\na,1,train\nb,0,\nc,0,test\n", "rows of several splits .column 'part'"),
        ("csv", "text,label,is_valid\na,1,False\nb,0,True\n", "rows of several splits .column 'is_valid'"),
        ("jsonl", "text\n", "line 1: "),
        ("jsonl", "[" * 100_000, "line 1: "),
        ("jsonl", '[{"text": "a", "label": "x"}]', "line 1: not a JSON object"),
        ("jsonl", '{"text": {"a": 1}, "label": "x"}', "line 1: 'text' is an object"),
        ("jsonl", '{"a": 1, "label": "x"}\n{"label": "y"}', "no column 'text'; its columns are 'a', 'label'"),
    ],
)
def test_error_for_a_malformed_file_names_the_place(form, content, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        read_rows(tmp_path, content, form=form)


def test_column_names_of_json_lines_are_the_keys_of_all_objects(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n{"b": 2, "a": 3}\n')
    assert column_names(path) == ["a", "b"]


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*none.tsv"):
        list(read_table(tmp_path / "none.tsv", ("text",), ReadStats("")))


@pytest.mark.parametrize(
    "cell, items",
    [
        ("['a', \"b\"]", ["a", "b"]),
        (' ["a", 1, true] ', ["a", 1, True]),
        ("('a',)", ["a"]),
        ("{'a'}", ["a"]),
        ("set()", []),
        ("()", []),
        # As pandas writes a list to TSV.
        ('"[""a"", ""b""]"', ["a", "b"]),
        (["a"], ["a"]),
    ],
)
def test_lists_of_json_and_python_are_read(cell, items):
    assert read_list(cell, "") == items


@pytest.mark.parametrize(
    "cell, in_text",
    [
        *((cell, False) for cell in ("a", "(other)", "a [b]", "[a] b", "", "a, b", "NaN", "f(x)")),
        # A text in brackets is not a list of words.
        *((cell, True) for cell in ("[1]", "[a, b]", "(see above)", '("a")', "(a, b)", "[a] b [c]")),
    ],
)
def test_other_cells_are_not_lists(cell, in_text):
    assert read_list(cell, "", in_text) is None


@pytest.mark.parametrize(
    "cell",
    ["['a'\n 'b']", "[a, b]", "{'a': 1}", "array(['a'], dtype=object)", "['a'"],
)
def test_list_that_cannot_be_read_is_an_error(cell):
    with pytest.raises(UsageError, match="file line 7: label is .* not a list"):
        read(cell, ["a", "b"], ",")


@pytest.mark.parametrize(
    "text", ["['a' 'b']", "['a', 'b']", "b'it\\'s'", 'b"a"', "{'text': 'a'}", "nan", " N/A ", r"a.\nB"]
)
def test_text_that_is_probably_a_value_of_another_type_is_counted(text):
    stats = ReadStats("file")
    others = [
        "a",
        "[1] b",
        "b'",
        "nanny",
        "",
        '{"a": 1}',
        'define(["a"], f)',
        '["a" in x] and [b]',
        "b'x' or b'y'",
        r"\nabla",
    ]
    for line, each in enumerate([*others, text], 1):
        stats.count_irregular_text(each, line)
    ((reason, entry),) = stats.noted.items()
    assert entry == {"rows": 1, "first": "line 11"}
    assert (
        ("escaped" in reason) == ("." in text)
        and ("missing value" in reason) == (text in ("nan", " N/A "))
        and ("list or bytes" in reason) == (text[0] in "[b{")
    )


def read(cell, labels, separator=""):
    stats = ReadStats("file")
    return Target("label", labels, separator).read(Row(7, {"label": cell}), stats), stats


@pytest.mark.parametrize("cell", ["['a']", ["a"], "[1, 0]"])
@pytest.mark.parametrize("labels", [["a", "b"], []])
def test_list_in_a_column_with_one_label_per_row_is_an_error(cell, labels):
    with pytest.raises(UsageError, match="line 7: label is a list: .*data.kind=multilabel.* text:kind=tags"):
        read(cell, labels)


@pytest.mark.parametrize("cell", ["NaN", " nan ", "\\N"])
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
    # If labels are named 0 and 1, zeros and ones are names.
    assert read("[1, 0]", ["0", "1", "2"], ",")[0] == [1, 1, 0]
    with pytest.raises(UsageError, match="line 7: label has 3 zeros and ones, but there are 2 labels"):
        read("[1, 0, 1]", ["a", "b"], ",")


def test_labels_split_at_the_separator_equal_a_list_of_labels():
    for text, labels, expected in (("b; c", ["b", "c"], [0, 1, 1]), ("", [], [0, 0, 0]), (" a ;", ["a"], [1, 0, 0])):
        assert read(text, ["a", "b", "c"], ";")[0] == read(labels, ["a", "b", "c"], ";")[0] == expected
