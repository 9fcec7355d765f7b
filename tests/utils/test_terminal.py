"""Tests of progress that is logged as lines, because standard error is not a terminal."""

from types import SimpleNamespace

import pytest

from bertjax.utils import terminal
from bertjax.utils.terminal import configure_logging


@pytest.fixture
def clock(monkeypatch):
    """Replaces tqdm's clock. Returns an object whose attribute `seconds` is the time."""
    configure_logging()
    clock = SimpleNamespace(seconds=0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.seconds)
    return clock


def test_progress_is_logged_every_half_minute(capsys, clock):
    with terminal.progress_bar("reading", 200, " rows", after_seconds=2) as bar:
        for _ in range(9):
            clock.seconds += 10
            bar.update(10)
            bar.set_postfix_str("2 files", refresh=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("reading: ") and "\r" not in line for line in lines)
    assert "30% of 200 rows, 01:00 done, 02:20 left" in lines[1] and "2 files" in lines[1]
    with terminal.progress_bar("reading", None, "B") as bar:
        clock.seconds += 40
        bar.update(5_000_000)
    assert capsys.readouterr().err.startswith("reading: 5.00MB in 00:40, 125kB/s")


def test_hidden_progress_bar_is_not_logged(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0)
    with terminal.progress_bar("reading", 10, " rows", shown=False) as bar:
        bar.update()
        bar.set_postfix_str("2 files")
    assert capsys.readouterr().err == ""
