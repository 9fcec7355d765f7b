"""Tests of table files: an irregular row is counted or raises an error with its line number."""

import pytest

from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.errors import UsageError


def read_rows(tmp_path, content: bytes, columns=("text", "label"), **options):
    path = tmp_path / "file"
    path.write_bytes(content)
    stats = ReadStats(str(path))
    return [(row.line, *row.fields.values()) for row in read_table(path, columns, stats, **options)], stats


def test_byte_order_mark_and_windows_line_endings_are_removed(tmp_path):
    rows, stats = read_rows(tmp_path, b"\xef\xbb\xbftext\tlabel\r\na b\t1\r\nc\t0\r\n")
    assert rows == [(2, "a b", "1"), (3, "c", "0")]
    assert stats.read == 2 and not stats.skipped


def test_quotes_are_literal_in_tsv(tmp_path):
    rows, _ = read_rows(tmp_path, b'text\tlabel\n"He said\t1\n"x" y"\t0\n')
    assert rows == [(2, '"He said', "1"), (3, '"x" y"', "0")]


def test_rows_with_too_few_fields_are_skipped_and_counted(tmp_path):
    rows, stats = read_rows(tmp_path, b"id\ttext\tlabel\n1\ta\t1\n2\tb\n3\n4\td\t0\n")
    assert [row[0] for row in rows] == [2, 5]
    assert stats.skipped == {"with too few fields": {"rows": 2, "first": "line 3"}}
    assert "4 rows read" in stats.summary() and "line 3" in stats.summary()


def test_keep_short_keeps_rows_with_missing_fields(tmp_path):
    rows, stats = read_rows(tmp_path, b"id\ttext\n1\ta\n\n2\n3\td\n", columns=("text",), keep_short=True)
    assert rows == [(2, "a"), (3, ""), (4, ""), (5, "d")]
    assert stats.noted["with too few fields"]["rows"] == 2 and not stats.skipped


def test_blank_line_is_a_row(tmp_path):
    for file_format in ("tsv", "csv"):
        assert [
            row[1] for row in read_rows(tmp_path, b"text\na\n\nb\n", columns=("text",), file_format=file_format)[0]
        ] == ["a", "", "b"]
    rows, stats = read_rows(tmp_path, b"text\tlabel\na\t1\n\nb\t0\n")
    assert [row[0] for row in rows] == [2, 4] and stats.read == 3
    assert stats.skipped["with too few fields"]["first"] == "line 3"


def test_empty_file_is_an_error(tmp_path):
    for file_format in ("tsv", "csv", "jsonl"):
        with pytest.raises(UsageError, match="file is empty"):
            read_rows(tmp_path, b"\xef\xbb\xbf\r\n", file_format=file_format)


def test_only_newlines_end_a_line(tmp_path):
    rows, _ = read_rows(tmp_path, "text\tlabel\na\u2028b\x85c\x0bd\t1\n".encode())
    assert rows == [(2, "a\u2028b\x85c\x0bd", "1")]


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    rows, stats = read_rows(tmp_path, b"text\tlabel\ncaf\xe9\t1\n")
    assert rows == [(2, "caf\ufffd", "1")]
    assert stats.noted["with bytes that are not UTF-8"]["first"] == "line 2"


def test_csv_fields_may_have_quotes_line_breaks_and_commas(tmp_path):
    rows, _ = read_rows(tmp_path, b'text,label\n"a, ""b""\nc",1\nd,0\n', file_format="csv")
    assert rows == [(2, 'a, "b"\nc', "1"), (4, "d", "0")]


def test_space_before_a_quote_in_csv_is_not_a_part_of_the_field(tmp_path):
    rows, _ = read_rows(tmp_path, b'"text", "label"\n"a, b", "x"\nc, y\n', file_format="csv")
    assert rows == [(2, "a, b", "x"), (3, "c", "y")]


def test_row_that_repeats_the_header_is_an_error(tmp_path):
    for keep_short in (False, True):
        with pytest.raises(UsageError, match="file line 3 repeats the header, as in joined files; remove the line"):
            read_rows(tmp_path, b"text\tlabel\na\t1\ntext\tlabel\nb\t0\n", keep_short=keep_short)
    assert read_rows(tmp_path, b"text\ntext\n", ["text"])[0] == [(2, "text")]


def test_error_for_an_unclosed_quote_names_the_line(tmp_path):
    with pytest.raises(UsageError, match="line 3: the quote opened here is never closed"):
        read_rows(tmp_path, b'text,label\na,1\n"b,0\nc,1\n', file_format="csv")


def test_json_lines_without_a_column_are_skipped(tmp_path):
    rows, stats = read_rows(tmp_path, b'{"text": "a", "label": 1}\n\n{"text": "b"}\n', file_format="jsonl")
    assert rows == [(1, "a", "1")]
    assert stats.read == 3 and stats.skipped == {"with too few fields": {"rows": 2, "first": "line 2"}}
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        read_rows(tmp_path, b"text\n", file_format="jsonl")


def test_null_and_nan_in_json_lines_are_missing_and_not_too_few_fields(tmp_path):
    content = b'{"text": "a", "label": NaN}\n{"text": null, "label": 1}\n{"text": "b", "label": 1.0}\n'
    rows, stats = read_rows(tmp_path, content, file_format="jsonl")
    assert rows == [(3, "b", "1.0")]
    assert stats.skipped == {
        "with null or NaN as 'label'": {"rows": 1, "first": "line 1"},
        "with null or NaN as 'text'": {"rows": 1, "first": "line 2"},
    }
    rows, stats = read_rows(tmp_path, content, file_format="jsonl", keep_short=True)
    assert rows[:2] == [(1, "a", ""), (2, "", "1")] and not stats.skipped


@pytest.mark.parametrize("newline", [b"\r", b"\n", b"\r\n", b"\r\r\n"])
def test_all_line_ends_are_read_also_mixed(newline, tmp_path):
    for file_format, lines in (("tsv", b"text\tlabel|a\t1|b\t0"), ("csv", b"text,label|a,1|b,0")):
        content = lines.replace(b"|", newline, 1).replace(b"|", b"\r") + newline
        assert read_rows(tmp_path, content, file_format=file_format)[0] == [(2, "a", "1"), (3, "b", "0")]
    rows, _ = read_rows(tmp_path, b'{"text": "a"}' + newline + b'{"text": "b"}\r', ["text"], file_format="jsonl")
    assert rows == [(1, "a"), (2, "b")]


def test_header_with_too_few_names_is_an_error(tmp_path):
    # R's write.table writes row names, but no name of their column.
    with pytest.raises(UsageError, match="all rows of .* have more fields than its header"):
        read_rows(tmp_path, b"text\tlabel\n1\ta film\tpos\n2\ta book\tneg\n")
    # Separators at the end of a line are not fields.
    assert len(read_rows(tmp_path, b"text\tlabel\na\tpos\t\nb\tneg\t\n")[0]) == 2


def test_index_column_of_pandas_is_ignored(tmp_path):
    rows, stats = read_rows(tmp_path, b",text,label\n0,a,pos\n1,b,neg\n", file_format="csv")
    assert rows == [(2, "a", "pos"), (3, "b", "neg")]
    assert "ignored: a column without a name" in stats.summary()


def test_missing_file_or_column_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no column 'label'; its columns are 'text', 'x'; use one of them"):
        read_rows(tmp_path, b"text\tx\na\t1\n")
    with pytest.raises(UsageError, match="its columns are .none.; use one"):
        read_rows(tmp_path, b"\ntext\n")
    with pytest.raises(UsageError, match="cannot read .*none.tsv"):
        list(read_table(tmp_path / "none.tsv", ("text",), ReadStats("")))


def test_csv_fields_may_be_long(tmp_path):
    rows, _ = read_rows(tmp_path, b"text,label\n" + b"a " * 100_000 + b",1\n", file_format="csv")
    assert len(rows[0][1]) == 200_000


def test_rows_with_extra_fields_are_counted_and_unused_columns_are_listed(tmp_path):
    rows, stats = read_rows(tmp_path, b"id,text,label\n1,well, good film,pos\n2,a,neg\n", file_format="csv")
    assert rows[1] == (3, "a", "neg")
    assert stats.noted["with more fields than columns"] == {"rows": 1, "first": "line 2"}
    assert "columns text, label (ignored: id)" in stats.summary()


def test_duplicate_column_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="has 2 columns named 'text'"):
        read_rows(tmp_path, b"text\ttext\tlabel\na\tb\t1\n")


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '[{"text": "a", "label": "x"}]', '{"text": {"a": 1}, "label": "x"}', "5"]
)
def test_error_for_malformed_json_names_the_line(line, tmp_path):
    with pytest.raises(UsageError, match="line 1"):
        read_rows(tmp_path, line.encode(), file_format="jsonl")


def test_unpaired_surrogate_is_replaced_and_counted(tmp_path):
    rows, stats = read_rows(tmp_path, b'{"text": "a\\ud83d", "label": "x"}', file_format="jsonl")
    assert rows == [(1, "a\ufffd", "x")] and len(stats.noted) == 1
