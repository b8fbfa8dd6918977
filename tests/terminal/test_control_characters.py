"""Text of others cannot control the terminal: each place that writes it shows control characters."""

import json
import logging
import sys
from io import StringIO
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table

from quire import SamplingParams, cli
from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Reasoning
from quire.control_characters import VisibleFormatter, visible, visible_json, visible_line
from quire.errors import ModelError, RequestError
from quire.terminal import bench
from quire.terminal.chat import Chat, converse
from quire.terminal.console import VisibleConsole

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4K\x07"
HOSTILE = f"a{CLIPBOARD}b\x1b[2J\x9b31mc\rd\x08e\x7f\u202efdp\u2066\ud800\x00"
OBEYED = [chr(i) for i in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0xD800)]


def is_harmless(written):
    return not [character for character in OBEYED if character in written]


def test_control_characters_are_shown_and_all_others_stay():
    assert visible("a\tb\n\x1b[1m\x9b\u202e") == "a\tb\n\\x1b[1m\\x9b\\u202e"
    assert visible_line("a\nb\t\x00") == "a\\x0ab\\x09\\x00"
    text = "é 日本語 👩‍👩‍👧 שלום \u200f e\u0301 \\x1b ~"
    assert visible(text) == visible_line(text) == text
    assert all(is_harmless(visible(chr(number))) for number in range(sys.maxunicode + 1))


def test_json_has_the_same_value_without_control_characters():
    value = {"a": HOSTILE[:-2] + "é\n\t\u200f", "\x9b": ["\x7f"]}
    data = visible_json(msgspec.json.encode(value))
    assert is_harmless(data.decode())
    assert json.loads(data) == value
    plain = msgspec.json.encode({"a": "é"})
    assert visible_json(plain) == plain


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_shows_them_in_texts_tables_and_markup(is_terminal):
    screen = StringIO()
    console = VisibleConsole(file=screen, force_terminal=is_terminal, color_system=None, width=400)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE, markup=False, soft_wrap=True)
    console.print(f"[bold]{HOSTILE}[/bold]")
    assert is_harmless(screen.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[3m", ""))
    assert "\\x1b]52" in screen.getvalue()


def test_styles_and_live_displays_keep_their_own_control_characters():
    screen = StringIO()
    console = VisibleConsole(file=screen, force_terminal=True, width=60)
    with Live("one\ntwo", console=console, auto_refresh=False) as live:
        live.update("three\nfour", refresh=True)
    console.print("red", style="red")
    assert "\x1b[1A" in screen.getvalue(), "the cursor goes up"
    assert "\x1b[31mred" in screen.getvalue()


class Scripted:
    """A model that answers with the given parts, first a call, then a text."""

    model_name = f"model{CLIPBOARD}[red]"
    max_model_len = 100

    def __init__(self, *turns):
        self.turns = list(turns)

    def stream_message(self, messages, params=None, *, tools=None, on_step=None, lora_request=None):
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        for part in turn:
            yield [part], 1


def test_a_chat_shows_them_in_all_that_a_model_or_a_file_says(monkeypatch, tmp_path):
    screen, prompts = StringIO(), []
    console = Console(file=screen, width=80)
    call = [Reasoning(HOSTILE), CallBegin(0, f"f\n{HOSTILE}"), CallArguments(0, HOSTILE), CallEnd(0)]
    llm = Scripted(call, [Content(text) for text in HOSTILE], RequestError(HOSTILE))
    monkeypatch.setattr(
        "quire.terminal.chat.TurnReader", lambda: SimpleNamespace(read=lambda: None, close=lambda: None)
    )
    converse(llm, SamplingParams(), None, console)
    chat = Chat(llm, SamplingParams(), HOSTILE, console, lambda prompt: prompts.append(prompt))
    for turn in (
        "Hello",
        "again",
        f"/nope{HOSTILE}",
        "/system",
        f"/tools {tmp_path}/{CLIPBOARD}",
        f"/json {CLIPBOARD}",
    ):
        chat.turn(turn)
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f", "description": HOSTILE[:-2]}}]))
    chat.turn(f"/tools {tools}")
    assert is_harmless(screen.getvalue())
    assert screen.getvalue().count("\\x1b]52") >= 7
    (prompt,) = prompts
    assert is_harmless(prompt)
    assert "\n" not in prompt


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, visible(HOSTILE[:-2])), (False, HOSTILE[:-2])])
def test_generate_shows_them_on_a_terminal_and_keeps_them_in_a_file(monkeypatch, is_terminal, expected):
    class Stdout(StringIO):
        def isatty(self):
            return is_terminal

    llm = SimpleNamespace(
        stream_generate=lambda prompt, params: iter([HOSTILE[:5], HOSTILE[5:-2]]),
        get_default_sampling_params=SamplingParams,
        close=lambda: None,
    )
    monkeypatch.setattr(cli, "_load", lambda options: llm)
    monkeypatch.setattr(sys, "argv", ["quire", "generate", "a"])
    monkeypatch.setattr(sys, "stdout", out := Stdout())
    with pytest.raises(SystemExit):
        cli.main()
    assert out.getvalue() == f"{expected}\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [("serve", "serve"), ("doctor", "examine"), ("plan", "plan"), ("bench serve", "bench_serve"), ("chat", "LLM")],
)
def test_lines_and_errors_of_commands_show_them(monkeypatch, capsys, command, name):
    def said(*args, report=None, console=None, **options):
        for say in (report, console and console.print):
            if say is not None:
                say(HOSTILE)
        raise ModelError(HOSTILE)

    monkeypatch.setattr(cli.quire, name, said, raising=False)
    monkeypatch.setattr(sys, "argv", ["quire", *command.split(), *(["--device", "H100"] if command == "plan" else [])])
    with pytest.raises(SystemExit):
        cli.main()
    written = capsys.readouterr()
    assert "\\x1b]52" in written.err
    assert is_harmless((written.out + written.err).replace("\x1b[31m", "").replace("\x1b[0m", ""))


def test_failed_requests_of_a_benchmark_show_them():
    screen = StringIO()
    measured = bench.Measured(seconds=1.0, errors={HOSTILE: 3})
    bench.show_server(measured, (50,), {}, VisibleConsole(file=screen, width=400))
    assert "failed     3: a\\x1b]52" in screen.getvalue()
    assert is_harmless(screen.getvalue())


def test_a_log_line_is_one_line_and_a_traceback_keeps_its_lines():
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "said %s\nnext", (HOSTILE,), sys.exc_info())
    written = VisibleFormatter().format(record)
    assert is_harmless(written)
    first, *others = written.split("\n")
    assert first.startswith("said a\\x1b]52")
    assert first.endswith("\\x0anext")
    assert others[0].startswith("Traceback")
