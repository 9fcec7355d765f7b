"""Rows of user's files: odd ones are counted with their line or refused with it, never dropped in silence."""

import pytest

from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.errors import UsageError


def rows(tmp_path, content: bytes, columns=("text", "label"), **options):
    path = tmp_path / "file"
    path.write_bytes(content)
    reading = ReadStats(str(path))
    return [(row.line, *row.fields.values()) for row in read_table(path, columns, reading, **options)], reading


def test_a_byte_order_mark_and_windows_line_ends_are_taken_off(tmp_path):
    found, reading = rows(tmp_path, b"\xef\xbb\xbftext\tlabel\r\na b\t1\r\nc\t0\r\n")
    assert found == [(2, "a b", "1"), (3, "c", "0")]
    assert reading.read == 2 and not reading.skipped


def test_a_quote_is_text_in_tsv(tmp_path):
    found, _ = rows(tmp_path, b'text\tlabel\n"He said\t1\n"x" y"\t0\n')
    assert found == [(2, '"He said', "1"), (3, '"x" y"', "0")]


def test_short_rows_are_counted_with_the_first_line(tmp_path):
    found, reading = rows(tmp_path, b"id\ttext\tlabel\n1\ta\t1\n2\tb\n3\n4\td\t0\n")
    assert [row[0] for row in found] == [2, 5]
    assert reading.skipped == {"with too few fields": {"rows": 2, "first": "line 3"}}
    assert "4 rows read" in reading.summary() and "line 3" in reading.summary()


def test_rows_to_predict_are_kept_however_short(tmp_path):
    found, reading = rows(tmp_path, b"id\ttext\n1\ta\n\n2\n3\td\n", columns=("text",), keep_short=True)
    assert found == [(2, "a"), (3, ""), (4, ""), (5, "d")]
    assert reading.noted["with too few fields"]["rows"] == 2 and not reading.skipped


def test_a_blank_line_is_a_row(tmp_path):
    for form in ("tsv", "csv"):
        assert [row[1] for row in rows(tmp_path, b"text\na\n\nb\n", columns=("text",), form=form)[0]] == ["a", "", "b"]
    found, reading = rows(tmp_path, b"text\tlabel\na\t1\n\nb\t0\n")
    assert [row[0] for row in found] == [2, 4] and reading.read == 3
    assert reading.skipped["with too few fields"]["first"] == "line 3"


def test_an_empty_file_is_named(tmp_path):
    for form in ("tsv", "csv", "jsonl"):
        with pytest.raises(UsageError, match="file is empty"):
            rows(tmp_path, b"\xef\xbb\xbf\r\n", form=form)


def test_odd_characters_end_no_line(tmp_path):
    found, _ = rows(tmp_path, "text\tlabel\na\u2028b\x85c\x0bd\t1\n".encode())
    assert found == [(2, "a\u2028b\x85c\x0bd", "1")]


def test_bytes_that_are_not_utf8_are_noted(tmp_path):
    found, reading = rows(tmp_path, b"text\tlabel\ncaf\xe9\t1\n")
    assert found == [(2, "caf\ufffd", "1")]
    assert reading.noted["with bytes that are not UTF-8"]["first"] == "line 2"


def test_csv_has_quotes_line_breaks_and_commas_in_fields(tmp_path):
    found, _ = rows(tmp_path, b'text,label\n"a, ""b""\nc",1\nd,0\n', form="csv")
    assert found == [(2, 'a, "b"\nc', "1"), (4, "d", "0")]


def test_a_quote_that_never_closes_is_an_error_with_its_line(tmp_path):
    with pytest.raises(UsageError, match="line 3: a quote opens here and never closes"):
        rows(tmp_path, b'text,label\na,1\n"b,0\nc,1\n', form="csv")


def test_json_lines(tmp_path):
    found, reading = rows(tmp_path, b'{"text": "a", "label": 1}\n\n{"text": "b"}\n', form="jsonl")
    assert found == [(1, "a", "1")]
    assert reading.read == 3 and reading.skipped == {"with too few fields": {"rows": 2, "first": "line 2"}}
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        rows(tmp_path, b"text\n", form="jsonl")


def test_a_missing_file_or_column_is_named_with_the_columns_there_are(tmp_path):
    with pytest.raises(UsageError, match="no column 'label'; its columns are text, x"):
        rows(tmp_path, b"text\tx\na\t1\n")
    with pytest.raises(UsageError, match="cannot read .*none.tsv"):
        list(read_table(tmp_path / "none.tsv", ("text",), ReadStats("")))


def test_more_fields_than_columns_are_noted_and_what_is_read_is_told(tmp_path):
    found, reading = rows(tmp_path, b"id,text,label\n1,well, good film,pos\n2,a,neg\n", form="csv")
    assert found[1] == (3, "a", "neg")
    assert reading.noted["with more fields than columns"] == {"rows": 1, "first": "line 2"}
    assert "columns text, label (not read: id)" in reading.summary()


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has 2 columns 'text'"):
        rows(tmp_path, b"text\ttext\tlabel\na\tb\t1\n")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": {"a": 1}, "label": "x"}', "5"])
def test_json_of_another_form_is_refused_with_its_line(line, tmp_path):
    with pytest.raises(UsageError, match="line 1"):
        rows(tmp_path, line.encode(), form="jsonl")


def test_half_a_character_is_replaced_and_noted(tmp_path):
    found, reading = rows(tmp_path, b'{"text": "a\\ud83d", "label": "x"}', form="jsonl")
    assert found == [(1, "a\ufffd", "x")] and len(reading.noted) == 1
