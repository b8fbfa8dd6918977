"""Turns that a user types."""

import pytest

from quire.terminal.input import TurnReader


@pytest.fixture
def read(monkeypatch, tmp_path):
    def all_turns(*lines):
        left = iter(lines)

        def line(_prompt):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", line)
        reader = TurnReader(tmp_path / "history")
        turns = []
        while (turn := reader.read()) is not None:
            turns.append(turn)
        reader.close()
        return turns

    return all_turns


def test_a_line_is_a_turn_and_empty_lines_are_none(read):
    assert read(" one ", "", "  ", "two") == ["one", "two"]


def test_several_lines_are_one_turn(read):
    assert read("one\\", "two", "three") == ["one\ntwo", "three"]
    assert read('"""', "one", "", "/exit", '"""', "two") == ["one\n\n/exit", "two"]


def test_input_that_ends_within_a_turn_ends_the_chat(read):
    assert read('"""', "one") == []


def test_ctrl_c_clears_what_was_typed(monkeypatch, tmp_path, capsys):
    typed = iter(["first \\", KeyboardInterrupt, KeyboardInterrupt, '"""', "quoted", KeyboardInterrupt, "second"])

    def read(_prompt):
        line = next(typed)
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert TurnReader(tmp_path / "history").read() == "second"
    assert capsys.readouterr().out == "\n" * 3


def test_ctrl_c_cancels_the_result_of_a_tool(monkeypatch, tmp_path):
    def interrupted(_prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert TurnReader(tmp_path / "history").read(can_cancel=True) is None


def test_lines_are_remembered_for_the_next_chat(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    history = tmp_path / "history"
    readline.clear_history()
    reader = TurnReader(history)
    readline.add_history("hello")
    reader.close()
    assert history.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    TurnReader(history)
    assert readline.get_history_item(1) == "hello"
    readline.clear_history()
