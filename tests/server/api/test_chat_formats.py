"""Reasoning, text and calls of a model of each family pass the server and come out apart, whole and streamed.

A scripted model writes them as the family's chat template does, with tags that are bytes or special tokens.
"""

import asyncio
import json

import httpx
import pytest
from call_writers import FURTHER_WRITERS, WRITERS
from embedded_model_server import service_of
from scripted_dialects import DIALECTS, Answer, merged
from scripted_model import Script, write_scripted_model

from quire.chat.detect import chat_format
from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.config import EngineOptions
from quire.server.app import make_app
from quire.startup.build import build

WRITE = WRITERS | FURTHER_WRITERS
THOUGHT, TEXT, ARGUMENTS = "The city is Oslo.", "I look it up.", {"city": "Oslo", "days": 2}
CALL = ("get_weather", ARGUMENTS)
TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
# The reasoning format of models that write calls so, and the texts before and behind reasoning.
REASONING = {
    "deepseek_v3": ("deepseek_r1", "<think>", "</think>"),
    "deepseek_v31": ("deepseek_r1", "<think>", "</think>"),
    "granite": ("granite", "<think>", "</think>"),
    "mistral": ("mistral", "[THINK]", "[/THINK]"),
    "mistral_v11": ("mistral", "[THINK]", "[/THINK]"),
    "gemma4": ("gemma4", "<|channel>thought\n", "<channel|>"),
    "cohere_command3": ("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere_command4": ("cohere_command4", "<|START_THINKING|>", "<|END_THINKING|>"),
    "seed_oss": ("seed_oss", "<seed:think>", "</seed:think>"),
    "openai": ("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}
QWEN3 = ("qwen3", "<think>\n", "\n</think>\n\n")
# Tags of single arguments. They are text in the tokenizers of their families: a constraint writes arguments as text.
ARGUMENT_TAGS = {"</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
# Texts around an answer, and around a text before a call.
RESPONSE, TEXT_TAGS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")
AROUND = {
    "openai": (("<|channel|>final<|message|>", ""), ("<|channel|>commentary<|message|>", "<|end|><|start|>assistant")),
    "cohere_command3": (RESPONSE, RESPONSE),
    "cohere_command4": (TEXT_TAGS, TEXT_TAGS),
}
# Each family with tags that are bytes and special tokens. Those that differ from others in tags have special tokens.
CASES = [
    (format, tags)
    for format in sorted(WRITE)
    for tags in ("bytes", "special")
    if tags == "special" or format in WRITERS
]


def scripts_of(format):
    """What a model of a family says: reasoning before an answer, before a call, and with both."""
    _, begin, end = REASONING.get(format, QWEN3)
    around, (before, behind) = AROUND.get(format, (("", ""), ("", "\n")))
    answer = TEXT.join(around)
    call = WRITE[format]([CALL])
    return {
        "answer": Script(f"{begin}{THOUGHT}{end}{answer}"),
        "call": Script(f"{begin}{THOUGHT}{end}{call}"),
        "both": Script(f"{begin}{THOUGHT}{end}{before}{TEXT}{behind}{call}"),
    }


def test_each_format_has_a_writer():
    assert {id(TOOL_FORMATS[name]) for name in WRITE} == set(map(id, TOOL_FORMATS.values()))
    assert {REASONING.get(name, QWEN3)[0] for name in WRITE} == {one.parser for one in REASONING_FORMATS.values()}


@pytest.mark.parametrize(("format", "tags"), CASES)
def test_reasoning_text_and_calls_come_out_apart(tmp_path, format, tags):
    reasoning, *_ = REASONING.get(format, QWEN3)
    special = chat_format(None, format, reasoning).special_tokens - ARGUMENT_TAGS if tags == "special" else ()
    model = write_scripted_model(tmp_path / "model", scripts_of(format), special=sorted(special))
    asyncio.run(check(model, format, reasoning))


async def check(model, format, reasoning):
    options = EngineOptions(
        model=str(model.folder), tool_call_parser=format, reasoning_parser=reasoning, memory="64MiB", dtype="float32"
    )
    app = make_app(service_of(build(options, report=lambda line: None, progress=lambda done, total: None)))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client,
    ):
        for dialect, tool in (
            ("chat", {"type": "function", "function": TOOL}),
            ("messages", {"name": TOOL["name"], "input_schema": TOOL["parameters"]}),
        ):
            tools = {"tools": [tool]}
            required = {**tools, "tool_choice": "required" if dialect == "chat" else {"type": "any"}}
            kinds = (("answer", {}), ("answer", tools), ("call", tools), ("both", tools), ("call", required))
            asked = [(name, fields, stream) for name, fields in kinds for stream in (False, True)]
            answers = await asyncio.gather(*(answer(client, dialect, model, *one) for one in asked))
            for (name, fields, stream), found in zip(asked, answers, strict=True):
                about = f"{dialect}, {name}, {fields.get('tool_choice', 'auto') if fields else 'no tools'}, {stream=}"
                calls = [(CALL[0], ARGUMENTS)] * (name != "answer")
                text = (TEXT,) * (name != "call")
                read = [(name, json.loads(arguments)) for name, arguments in found.calls]
                assert (found.reasoning, found.blocks, read) == (THOUGHT, text, calls), about
                ends = ("tool_calls", "stop") if dialect == "chat" else ("tool_use", "end_turn")
                assert found.end[0] == ends[name == "answer"], about


async def answer(client, dialect, model, name, fields, stream) -> Answer:
    spoken = DIALECTS[dialect]
    body = merged(spoken.body(name, ""), {spoken.limit[0]: 300}, fields, {"stream": stream})
    response = await client.post(spoken.path, json=body | (dict(spoken.stream_fields) if stream else {}))
    assert response.status_code == 200, response.text
    (found,) = (spoken.streamed(response.text) if stream else spoken.whole(response.json())).choices
    return found
