"""`quire chat` on the embedded model: commands, tools, JSON, errors."""

import json
from contextlib import closing
from io import StringIO
from random import Random

import pytest
from rich.console import Console

from quire import LLM, SamplingParams
from quire.chat.parts import Content
from quire.core.prompt_progress import PromptProgress
from quire.terminal.chat import COMMANDS, Chat
from tools.demo_model.tool_use import TOOLS


@pytest.fixture(scope="module")
def llm():
    with closing(LLM(memory="256MiB", max_model_len=1024)) as made:
        yield made


@pytest.fixture
def talk(llm):
    def turns(*texts, system=None, result="7 coins"):
        """What a chat writes for each turn. Tools give `result`."""
        screen, asked = StringIO(), []
        console = Console(file=screen, width=60)
        chat = Chat(
            llm, SamplingParams(temperature=0, max_tokens=80), system, console, lambda p: asked.append(p) or result
        )
        written, goes_on = [], True
        for text in texts:
            assert goes_on
            goes_on = chat.turn(text)
            written.append(screen.getvalue())
            screen.seek(0)
            screen.truncate()
        return written, asked, goes_on

    return turns


def test_answers_are_those_of_chat_with_their_speed(llm, talk):
    (answer,), _, goes_on = talk("Hello! Who are you?")
    (expected,) = llm.chat(
        [{"role": "user", "content": "Hello! Who are you?"}], SamplingParams(temperature=0, max_tokens=80)
    )
    text, numbers = answer.rstrip("\n").rsplit("\n", 1)
    assert text == expected.outputs[0].text
    assert "tokens/s" in numbers
    assert goes_on


class SlowPrompt:
    """A model whose prompt takes three steps."""

    model_name, max_model_len = "m", 1000

    def stream_message(self, messages, params=None, *, tools=None, on_step, lora_request=None):
        for progress in (PromptProgress(1, 64, 150), PromptProgress(1, 128, 150), PromptProgress()):
            on_step(progress)
        yield [Content("an answer")], 2


def test_a_terminal_shows_how_far_a_long_prompt_is():
    written = {}
    for is_terminal in (True, False):
        screen = StringIO()
        console = Console(file=screen, width=60, force_terminal=is_terminal)
        Chat(SlowPrompt(), SamplingParams(), None, console, input).turn("long")
        written[is_terminal] = screen.getvalue()
    assert "prompt 128 of 150" in written[True]
    assert written[True].rindex("prompt") < written[True].index("an answer")
    assert written[False].startswith("an answer\n2 tokens")


def test_reset_forgets_and_system_sets_the_system_message(talk):
    question = "What is the capital of France?"
    written, _, _ = talk("Hello! Who are you?", question, "/reset", question, "/system Be kind.", "/system")
    assert "a new conversation" in written[2]
    assert "Fernhill" in written[3]
    assert written[5] == "system message: Be kind.\n"


def test_help_names_every_command(talk):
    (text,), _, _ = talk("/help")
    assert all(name in text for name in COMMANDS)
    assert talk("/exit")[2] is False
    assert "no command" in talk("/nope")[0][0]


def test_calls_are_shown_and_their_results_asked_for(talk, tmp_path):
    tool, ask = TOOLS["get_price"]
    use = ask(Random(1))
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([tool]))
    written, asked, _ = talk(f"/tools {file}", use.question, "/tools off", result=json.dumps(use.result))
    assert written[0] == "tools: get_price; you are asked for the results of calls\n"
    assert written[1].startswith("get_price {") and use.answer in written[1].replace("\n", " ")
    assert asked == ["result of get_price: "]


def test_answers_in_json(talk, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": [{"a": 1}, {"a": 2}]}))
    written, _, _ = talk(f"/json {file}", "Hello!", "/json off", "Hello!")
    assert json.loads(written[1].rstrip("\n").rpartition("\n")[0]) in ({"a": 1}, {"a": 2})
    assert "Pip" in written[3]
    assert talk("/json")[0] == ["answers are JSON\n"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[1]", "a list of tools"),
        ("[{}]", "tools"),
        (" " * 2**21, "larger"),
    ],
)
def test_files_that_are_none_are_refused(talk, tmp_path, content, says):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    (text,), _, goes_on = talk(f"/tools {file}")
    assert says in text and goes_on


def test_a_message_that_is_too_long_is_left_out_of_the_conversation(talk):
    written, _, _ = talk("a " * 3000, "Hello! Who are you?")
    assert "Shorten the prompt" in written[0]
    assert "Pip" in written[1]
