"""Text in another encoding, or with other line ends, is recognised wherever text is read."""

import pytest

from bertjax.data.corpus.prepare import prepare
from bertjax.data.corpus.tokenizer import load_vocabulary
from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.data.finetuning.tagged import read_conll
from bertjax.errors import UsageError
from bertjax.utils.plain_text import refuse_utf16

ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE", "utf-32": "UTF-32"}


def table(path):
    return list(read_table(path, ["sentence", "label"], ReadStats(str(path))))


@pytest.mark.parametrize(("encoding", "name"), ENCODINGS.items())
def test_a_table_in_utf_16_is_named_with_the_way_out(tmp_path, encoding, name):
    (tmp_path / "train.tsv").write_bytes("sentence\tlabel\na naïve one\t1\n".encode(encoding))
    with pytest.raises(UsageError, match=rf"train\.tsv is text in {name}; make it UTF-8, as with `iconv -f {name} "):
        table(tmp_path / "train.tsv")


@pytest.mark.parametrize("text", ["plain", "naïve ’quotes’", "日本語のテキスト", "", "one\0 NUL in a long enough text"])
def test_utf_8_is_not_taken_for_it(text):
    refuse_utf16("file", text.encode())


def test_tagged_words_a_vocabulary_and_a_corpus_in_utf_16_are_named(tmp_path, letters):
    path = tmp_path / "file.txt"
    path.write_text("U.N.\tB-ORG\nofficial\tO\n", encoding="utf-16")
    with pytest.raises(UsageError, match="is text in UTF-16"):
        read_conll(path, ReadStats(str(path)), True)
    with pytest.raises(UsageError, match="is text in UTF-16"):
        load_vocabulary(path)
    with pytest.raises(UsageError, match="is text in UTF-16"):
        prepare([f"text:{path}"], tmp_path / "out", vocabulary=letters, workers=1, progress=False)
    assert not (tmp_path / "out").exists()


def test_lines_that_end_with_a_carriage_return_alone_are_lines(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\rone\t1\rtwo\t0\r")
    assert [row.fields["sentence"] for row in table(tmp_path / "train.tsv")] == ["one", "two"]


def test_a_table_of_another_form_does_not_flood_the_error(tmp_path):
    (tmp_path / "train.tsv").write_text("\t".join(f"column_{index}" for index in range(10_000)) + "\n1\n")
    with pytest.raises(UsageError, match="no column 'sentence'.* and 9,990 more") as error:
        table(tmp_path / "train.tsv")
    assert len(str(error.value)) < 500
