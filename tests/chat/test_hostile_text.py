"""Hostile texts: the work of the parser increases as their length, and what it holds back is bounded."""

import cProfile

import pytest
from python_steps import python_steps

from tools.chat_transcripts import chat_format, parse, parts_of

BAR = "\uff5c"
# (format of tools, a beginning, what is repeated behind it)
TEXTS = {
    "begin tags": ("hermes", "", "<tool_call>"),
    "half begin tags": ("hermes", "", "<tool_cal"),
    "first characters of tags": ("hermes", "", "<"),
    "begins of calls": ("hermes", "", '<tool_call>{"name": "now", '),
    "calls": ("hermes", "", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    "objects that are no calls": ("hermes", "", '<tool_call>{"a": [1, {"b": "c"}], "d": 1} '),
    "a long key": ("hermes", '<tool_call>{"', "a"),
    "a long name": ("hermes", '<tool_call>{"name": "', "a"),
    "many keys": ("hermes", '<tool_call>{"name": "now"', ', "a": 1'),
    "deep arguments": ("hermes", '<tool_call>{"name": "now", "arguments": ', '{"a": ['),
    "deep arguments before the name": ("hermes", '<tool_call>{"arguments": ', '{"a": ['),
    "a long string": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', "b</tool_call>"),
    "quotes": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', '"'),
    "backslashes": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', "\\"),
    "a long number": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', "1"),
    "closing braces": ("hermes", '<tool_call>{"name": "now"', "}"),
    "half ends of a call": ("hermes", '<tool_call>{"name": "now"}', " </tool_cal"),
    "white space": ("hermes", "a", " \n"),
    "white space within a call": ("hermes", "<tool_call>", " \n"),
    "begins of reasoning": ("hermes", "", "<think>"),
    "half ends of reasoning": ("hermes", "<think>", "</think "),
    "braces in lines": ("generic", "", "{\n"),
    "brackets in lines": ("generic", "", "[\n"),
    "names in lines": ("generic", "", '{"name": "now",\n'),
    "fences": ("generic", "", "```json\n{"),
    "calls in lines": ("llama3_json", "", '{"name": "now", "parameters": {}};'),
    "lists in Python": ("pythonic", "[find(tags=", "["),
    "dicts in Python": ("pythonic", "[find(where=", "{'a': "),
    "escapes in Python": ("pythonic", "[note(text='", "\\u00"),
    "half ends of a text in Python": ("pythonic", '[note(text="""', '""'),
    "arguments in Python": ("pythonic", "[now(", "a=1, "),
    "calls in Python": ("pythonic", "[", "now(), "),
    "half calls in Python": ("pythonic", "", "[now(a"),
    "functions": ("qwen3_coder", "", "<function=now>"),
    "half functions": ("qwen3_coder", "", "<tool_call>\n<function="),
    "parameters": ("qwen3_coder", "<function=now>", "<parameter=a>"),
    "a long key in tags": ("qwen3_coder", "<function=now><parameter=", "a"),
    "half ends of a value": ("qwen3_coder", "<function=note><parameter=text>", "\n</parameter"),
    "an array in tags": ("qwen3_coder", "<function=find><parameter=tags>", "["),
    "strings in tags": ("qwen3_coder", "<function=find><parameter=tags>", '["'),
    "values": ("qwen3_coder", "<function=find>", "<parameter=tags>[1]</parameter>"),
    "text between parameters": ("qwen3_coder", "<function=now>", "</func"),
    "keys of GLM": ("glm45", "<tool_call>now", "<arg_key>"),
    "calls of GLM": ("glm45", "", "<tool_call>a"),
    "names of Mistral": ("mistral", "", "[TOOL_CALLS]now "),
    "half lists of Mistral": ("mistral", "", '[TOOL_CALLS][{"name": '),
    "a long name of Kimi": ("kimi_k2", "<|tool_call_begin|>", "functions."),
    "a list of Gemma 4": ("gemma4", "<|tool_call>call:find{tags:", "["),
    "objects of Gemma 4": ("gemma4", "<|tool_call>call:find{where:", "{a:"),
    "half quotes of Gemma 4": ("gemma4", '<|tool_call>call:note{text:<|"|>', '<|"'),
    "members of Gemma 4": ("gemma4", "<|tool_call>call:find{", "a:1,"),
    "a long word of Gemma 4": ("gemma4", "<|tool_call>call:find{q:", "a "),
    "calls of Gemma 4": ("gemma4", "", "<|tool_call>call:now"),
    "calls of Command": ("cohere_command3", "<|START_ACTION|>[", '{"tool_call_id": "0", "tool_name": "now"}, '),
    "actions of Command": ("cohere_command3", "", '<|START_ACTION|>[{"tool_call_id": "0", '),
    "code": ("smollm3", "", "<code>\nnow("),
    "headers": ("openai", "", "<|channel|>commentary to=now "),
    "starts": ("openai", "", "<|start|>assistant"),
    "sections of DeepSeek": ("deepseek_v3", "", f"<{BAR}tool▁calls▁begin{BAR}>"),
    "fences of DeepSeek": ("deepseek_v3", "", f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>now\n```js"),
}
NAMES = sorted(TEXTS)
PIECE = 16  # characters


def text_of(name, length):
    tools, begin, repeated = TEXTS[name]
    reasoning = "openai_gptoss" if tools == "openai" else "qwen3"
    return chat_format(tools, reasoning), begin + repeated * (length // len(repeated))


def pieces(text, size=PIECE):
    return [text[place : place + size] for place in range(0, len(text), size)]


def num_calls(format, text):
    """Number of function calls, of Python and of C, while a text is parsed."""
    profile = cProfile.Profile()
    profile.runcall(parts_of, format, pieces(text))
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("name", NAMES)
def test_work_increases_as_the_length(name):
    short, long = (num_calls(*text_of(name, length)) for length in (8_500, 17_000))
    assert long < 3 * short + 1000  # if it was quadratic, 4 times


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_text_is_the_same_message_in_any_pieces(name):
    format, text = text_of(name, 20_000)
    message = parse(format, [text])
    assert parse(format, pieces(text, 61)) == message


def test_a_megabyte_takes_bounded_time():
    """Copies and searches are no function calls: their time counts, too. A quadratic one would take minutes."""
    for name in ("a long string", "half ends of reasoning", "quotes"):
        format, text = text_of(name, 2**20)
        steps, _ = python_steps(parts_of, format, pieces(text, 64))
        assert steps < 800_000_000, name
