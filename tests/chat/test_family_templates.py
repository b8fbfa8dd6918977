"""Calls and reasoning of families are found in a template of each, and read as the template writes them."""

import json
from typing import NamedTuple

import family_templates as templates
import pytest
from call_writers import FURTHER_WRITERS, WRITERS
from grammar_mask_walks import matches

from quire.chat.constraint import call_constraint
from quire.chat.detect import chat_format
from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.chat.output import output_format
from quire.chat.parts import Message, message_of
from quire.chat.tools import toolbox
from quire.tokenizer.chat_template import ChatTemplate
from tools.chat_transcripts import TOOLS

WRITE = WRITERS | FURTHER_WRITERS
FIND = {"q": "Grüße", "tags": ["a", 'b "c"'], "where": {"lang": "de", "ids": [1, 2.5, None]}, "exact": True}
CALLS = [("find", FIND), ("now", {}), ("note", {"text": "1\n{}"})]
SHUT = {"enable_thinking": False, "reasoning_effort": "none"}


class Family(NamedTuple):
    """tags: before and behind reasoning. begins, shuts: whether a prompt ends within reasoning, or with its end."""

    template: str
    tools: str
    reasoning: str
    tags: tuple[str, str]
    begins: bool = False
    shuts: bool = True


THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
FAMILIES = {
    "Gemma 4": Family(templates.GEMMA4, "gemma4", "gemma4", ("<|channel>thought\n", "<channel|>")),
    "MiniMax-M2": Family(
        templates.MINIMAX_M2, "minimax_m2", "qwen3", ("<think>\n", "\n</think>\n\n"), begins=True, shuts=False
    ),
    "GLM-4.5": Family(templates.GLM45, "glm45", "qwen3", ("<think>", "</think>")),
    "GLM-4.7": Family(templates.GLM47, "glm47", "qwen3", ("<think>", "</think>"), begins=True),
    "Ministral 3": Family(templates.MINISTRAL3, "mistral_v11", "mistral", ("[THINK]", "[/THINK]"), shuts=False),
    "SmolLM3": Family(templates.SMOLLM3, "smollm3", "qwen3", ("<think>\n", "\n</think>\n")),
    "EXAONE 4": Family(templates.EXAONE4, "exaone4", "qwen3", ("<think>\n", "\n</think>\n\n"), begins=True),
    "Command R7B": Family(templates.COMMAND_R7B, "cohere_command3", "cohere_command3", THINKING),
    "Command A": Family(templates.COMMAND_A, "cohere_command4", "cohere_command4", THINKING, begins=True),
}
ANSWERS = {"Command R7B": "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Command A": "<|START_TEXT|>Hi.<|END_TEXT|>"}
USER = {"role": "user", "content": "Hello"}
families = pytest.mark.parametrize("family", FAMILIES)


def prompt_of(source, messages, **variables):
    return ChatTemplate(source).render(
        {"messages": messages, "tools": TOOLS, "add_generation_prompt": True, **variables}
    )


def format_of(source, prompt):
    return output_format(chat_format(source), toolbox(TOOLS), prompt, reasons=True, special_texts=frozenset())


@families
def test_the_formats_of_a_family_are_found_in_its_template(family):
    one = FAMILIES[family]
    found = chat_format(one.template)
    assert (found.tools, found.reasoning) == (TOOL_FORMATS[one.tools], REASONING_FORMATS[one.reasoning])


@families
def test_a_turn_that_a_template_writes_is_read(family):
    one = FAMILIES[family]
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS]
    turn = {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": calls}
    text = f"{one.tags[0]}So.{one.tags[1]}{WRITE[one.tools](CALLS)}"
    assert text in prompt_of(one.template, [USER, turn])
    message = format_of(one.template, "").read(text)
    assert (message.content, message.reasoning) == ("", "So.")
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == CALLS


@families
def test_reasoning_is_read_as_the_prompt_leaves_it(family):
    one = FAMILIES[family]
    answer, calls = ANSWERS.get(family, "Hi."), WRITE[one.tools](CALLS[:2])
    format = format_of(one.template, prompt_of(one.template, [USER], enable_thinking=True))
    assert (format.begun, format.may_reason) == (one.begins, True)
    thought = f"{'' if one.begins else one.tags[0]}Why?{one.tags[1]}"
    for text, content in ((f"{thought}{answer}", "Hi."), (f"{thought}{calls}", "")):
        message = format.read(text)
        assert (message.content, message.reasoning) == (content, "Why?")
        assert [call.name for call in message.calls] == ([] if content else ["find", "now"])
        for place in range(len(text)):
            parser = format.new_parser()
            assert message_of([*parser.push(text[:place]), *parser.push(text[place:]), *parser.finish()]) == message
    if one.shuts:
        shut = format_of(one.template, prompt_of(one.template, [USER], **SHUT))
        assert (shut.begun, shut.may_reason) == (False, False)
        assert shut.read(answer) == Message("Hi.", None, [])


@families
def test_required_and_named_calls_are_written_as_the_template_writes_them(family):
    one = FAMILIES[family]
    format = TOOL_FORMATS[one.tools]
    several = call_constraint(format, toolbox(TOOLS, "required"))
    named = call_constraint(format, toolbox(TOOLS, {"type": "function", "function": {"name": "now"}}))
    for calls in ([("now", {})], CALLS[:1], [("note", {"text": ""}), ("now", {})]):
        text = WRITE[one.tools](calls)
        assert matches(several, text), text
        assert matches(named, text) == (calls == [("now", {})]), text
    for text in ("Hi.", WRITE[one.tools]([("zzz", {})]), WRITE[one.tools]([("note", {"txt": "a"})])):
        assert not matches(several, text), text


@families
def test_a_call_of_a_strict_tool_has_its_arguments(family):
    one = FAMILIES[family]
    note = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == "note")
    tools = [
        {"type": "function", "function": {**note, "strict": True}},
        *(tool for tool in TOOLS if tool["function"] != note),
    ]
    auto = call_constraint(TOOL_FORMATS[one.tools], toolbox(tools))
    valid, free = ("note", {"text": "a"}), ("now", {"x": 1})
    for text in ("Hi.", WRITE[one.tools]([valid]), f"So: {WRITE[one.tools]([free, valid])} Done."):
        assert matches(auto, text), text
    assert not matches(auto, WRITE[one.tools]([free, ("note", {"txt": "a"})]))
