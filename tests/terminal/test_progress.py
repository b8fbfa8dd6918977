"""Progress bars: they fill on a terminal, and write nothing elsewhere."""

import io

import pytest

from quire.terminal.progress import CountBar, WeightsBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("make", "steps", "shown"),
    [
        (lambda: CountBar("lines"), [(1, 2), (2, 2)], ("lines", "2/2")),
        (WeightsBar, [(10**6, 2 * 10**6), (2 * 10**6, 2 * 10**6)], ("model files", "2.0/2.0 MB")),
    ],
)
def test_a_bar_fills_each_time_that_it_is_used(make, steps, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = make()
    assert terminal.getvalue() == ""
    for _ in range(2):
        before = len(terminal.getvalue())
        for step in steps:
            bar(*step)
        written = terminal.getvalue()[before:]
        assert all(text in written for text in (*shown, 40 * "━"))


def test_a_bar_writes_nothing_to_a_file(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    bar = WeightsBar()
    bar(1, 2)
    bar(2, 2)
    assert file.getvalue() == ""
