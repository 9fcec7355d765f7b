"""Error messages: one line of bounded length."""

import pytest

from bertjax.cli import main as cli
from bertjax.errors import first_line, listed, quoted, shortened


def test_shortened_text_keeps_its_start_and_end():
    text = shortened(f"Error writing {'x' * 5000}: No space\nleft on device")
    assert len(text) <= 200
    assert text.startswith("Error writing xxx") and text.endswith("No space left on device")
    assert shortened("a  short\n one") == "a short one"


def test_long_lists_end_with_a_count_and_long_names_are_shortened():
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == ""
    many = listed(f"label_{index}" for index in range(10_000))
    assert many.startswith("label_0, label_1, ") and many.endswith("label_9, and 9,990 more")
    assert len(listed(["x" * 80_000] * 10_000)) < 1200


def test_quoted_values_are_escaped_and_shortened():
    assert quoted("\x1b[31mred") == r"'\x1b[31mred'"
    assert len(quoted("x" * 80_000)) <= 100


def test_details_of_cpp_error_messages_are_removed():
    error = ValueError("DATA_LOSS: no such checksum [source locations='a.cc:1'] [tensorstore_spec='{...}']\nmore")
    assert first_line(error) == "DATA_LOSS: no such checksum"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("arguments", [["convert", "{loop}", "{out}"], ["fill_mask", "--checkpoint={loop}", "[MASK]"]])
def test_error_for_a_link_to_itself_is_one_line(tmp_path, capfd, arguments):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SystemExit):
        cli.main([text.format(loop=tmp_path / "loop", out=tmp_path / "out") for text in arguments])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("bertjax: ") and "loop" in line
