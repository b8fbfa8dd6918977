"""The formats of a model, found in the source of its chat template."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat, ReasoningFormat, ToolFormat
from quire.errors import ConfigError, nearest

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

# The first format all of whose texts are in the template is taken. Texts that only one family uses come first.
_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("\uff5ctool\u2581sep\uff5c", "```json")),
    ("deepseek_v31", ("\uff5ctool\u2581sep\uff5c",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("kimi_k2", ("tool_declare", "<|im_middle|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("seed:tool_call",)),
    ("gemma4", ("<|tool_call>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("internlm", ("<|action_start|>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_functools", ("functools[",)),
    ("phi4_mini_json", ("<|/tool|>",)),
    ("phi4_mini_json", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("olmo3", ("<function_calls>",)),
    ("jamba", ("<tool_calls>",)),
    ("smollm3", ("<tool_call>", "python_tools")),
    ("exaone4", ('<tool_call>{"name"',)),
    ("exaone4", ('<tool_call>{\\"name\\"',)),
    ("hermes", ("<tool_call>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("llama4_pythonic", ("[func_name1(", "<|header_start|>")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("ipython", '"parameters": ')),
    ("generic", ("tools",)),
)
_REASONING_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("seed:think",)),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<think>", "<response>")),
    ("deepseek_r1", ("</think>", "<\uff5cAssistant\uff5c>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
    ("qwen3", ("enable_thinking",)),
)


def chat_format(
    template: str | None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> ChatFormat:
    """The formats of a model. template: source of its chat template; None if it has none.

    tool_parser, reasoning_parser: names of TOOL_FORMATS and REASONING_FORMATS, which override what is found.
    Raises ConfigError for an unknown name, with the nearest one.
    """
    source = template or ""
    tools, why_tools = _chosen(TOOL_FORMATS, _TOOL_MARKERS, source, tool_parser, "--tool-call-parser")
    reasoning, why_reasoning = _chosen(
        REASONING_FORMATS, _REASONING_MARKERS, source, reasoning_parser, "--reasoning-parser"
    )
    return ChatFormat(tools, reasoning, f"tool calls: {why_tools}; reasoning: {why_reasoning}")


def _chosen(
    formats: Mapping[str, Format],
    markers: Iterable[tuple[str, tuple[str, ...]]],
    source: str,
    name: str | None,
    option: str,
) -> tuple[Format | None, str]:
    """A format, and why it was chosen."""
    if name is not None and name not in formats:
        raise ConfigError(f"{option}: unknown parser {name!r:.80}{nearest(name, formats)}; known: {', '.join(formats)}")
    for found, texts in markers:
        if all(text in source for text in texts) and name in (None, found, formats[found].parser):
            with_texts = " and ".join(map(repr, texts))
            return formats[found], f"{found}, because the chat template has {with_texts}"
    if name is not None:
        return formats[name], f"{name}, because of {option}"
    return None, "none, because the chat template names no format" if source else "none without a chat template"
