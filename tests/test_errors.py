"""What stands in the one line of an error is bounded, whatever it is made of."""

import pytest

from bertjax.cli import main as cli
from bertjax.errors import first_line, listed, quoted, shortened


def test_a_long_text_keeps_its_beginning_and_its_end_which_says_why():
    text = shortened(f"Error writing {'x' * 5000}: No space\nleft on device")
    assert len(text) <= 200
    assert text.startswith("Error writing xxx") and text.endswith("No space left on device")
    assert shortened("a  short\n one") == "a short one"


def test_many_names_are_counted_and_long_ones_cut():
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == ""
    many = listed(f"label_{index}" for index in range(10_000))
    assert many.startswith("label_0, label_1, ") and many.endswith("label_9, and 9,990 more")
    assert len(listed(["x" * 80_000] * 10_000)) < 1200


def test_a_value_of_a_file_is_escaped_and_cut():
    assert quoted("\x1b[31mred") == r"'\x1b[31mred'"
    assert len(quoted("x" * 80_000)) <= 100


def test_what_libraries_append_for_programs_is_left_out():
    error = ValueError("DATA_LOSS: no such checksum [source locations='a.cc:1'] [tensorstore_spec='{...}']\nmore")
    assert first_line(error) == "DATA_LOSS: no such checksum"
    assert first_line(KeyError()) == "KeyError"


GONE = """
from bertjax.presets import finetuning_config
def get_config(arguments=None):
    config = finetuning_config("glue", "L1_H16")
    del config.data.task
    return config
"""
ENDS = """
import sys
def get_config(arguments=None):
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        (GONE, ["describe"], "config.data has no task"),
        (GONE, ["bench", "step", "--steps=1"], "config.data has no task"),
        (ENDS, ["describe"], "it ends the program"),
        (GONE, ["inspect", f"--steps={10**30}"], "is beyond 2,147,483,647"),
    ],
)
def test_what_a_config_lacks_or_does_is_wrong_use(config, arguments, says, tmp_path, capfd):
    (tmp_path / "config.py").write_text(config)
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, f"--config={tmp_path}/config.py"])
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert says in line


def test_a_link_to_itself_is_no_surprise(tmp_path, capfd):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for arguments in (
        ["convert", f"{tmp_path}/loop", f"{tmp_path}/out"],
        ["fill_mask", f"--checkpoint={tmp_path}/loop", "[MASK]"],
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        (line,) = capfd.readouterr().err.splitlines()
        assert "unexpected" not in line and "loop" in line
