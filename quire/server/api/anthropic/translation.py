"""Anthropic's conversations and tools, as the messages and tools of OpenAI's chat that all dialects share."""

from collections.abc import Iterator, Mapping, Sequence

from quire.engine.inputs import template_variables
from quire.errors import RequestError
from quire.server.api.anthropic.schema import (
    AnthropicMessage,
    ContentBlock,
    ConversationBody,
    TextBlock,
    ToolBody,
)
from quire.server.api.conversation import RENDERING_FIELDS, Rendering, reasoning_variables
from quire.tokenizer.chat_template import REASONING_SWITCHES

# A line that Claude Code puts in front of its instructions. It is about the client and differs in each request, so
# that no prompt after it would be found in the cache.
_BILLING = "x-anthropic-billing-header"
_EFFORTS = {"xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OWN_VARIABLES = (*RENDERING_FIELDS, *REASONING_SWITCHES, "reasoning_effort")
_OWN_TYPES = (None, "custom")  # of tools that the client runs
_KINDS = "text, tool_use, tool_result and thinking"


def chat_messages(body: ConversationBody) -> list[dict[str, object]]:
    """The messages with OpenAI's names. Raises RequestError for blocks that are no text, such as images."""
    messages = []
    system = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or ()
    texts = [text for text in map(_text, system) if not text.startswith(_BILLING)]
    if texts:
        messages.append({"role": "system", "content": _content(texts)})
    for message in body.messages:
        messages += _assistant(message) if message.role == "assistant" else _user(message)
    return messages


def chat_tools(tools: Sequence[ToolBody] | None) -> list[dict[str, object]] | None:
    """The tools with OpenAI's names, without those that Anthropic defines or runs."""
    return None if tools is None else [_tool(tool) for tool in tools if tool.type in _OWN_TYPES]


def left_out(tools: Sequence[ToolBody] | None) -> list[str]:
    """The types of the tools that Anthropic defines or runs, which `chat_tools` leaves out.

    Raises RequestError for OpenAI's form of a tool.
    """
    if any(tool.type == "function" for tool in tools or ()):
        raise RequestError(
            "a tool has an input_schema, and no type function as in OpenAI's API; leave the type out", "tools"
        )
    return list(dict.fromkeys(str(tool.type) for tool in tools or () if tool.type not in _OWN_TYPES))


def chat_tool_choice(body: ConversationBody) -> object:
    """OpenAI's `tool_choice`. Raises RequestError if it requires a tool that is left out or has no name."""
    choice, others = body.tool_choice, [tool for tool in body.tools or () if tool.type not in _OWN_TYPES]
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice of type 'tool' needs the name of a tool", "tool_choice")
    has_own = len(others) < len(body.tools or ())
    for tool in others:
        if (choice.type == "tool" and choice.name == tool.name) or (choice.type == "any" and not has_own):
            raise RequestError(
                f"tool_choice requires the tool {tool.name!r:.80} of type {tool.type!r:.80}, which this server does "
                "not run; it has only tools with an input_schema, which the client runs",
                "tool_choice",
            )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def rendering_of(body: ConversationBody, tools: Sequence[Mapping[str, object]] | None) -> Rendering:
    """How the chat template renders the conversation. A last message of the assistant is continued."""
    body.check_edits()
    effort = None if body.output_config is None else body.output_config.effort
    enabled = None if body.thinking is None else body.thinking.type != "disabled"
    named = {} if effort is None else {"reasoning_effort": _EFFORTS.get(effort, effort)}  # of the whole answer
    return Rendering(
        tools=None if body.tool_choice is not None and body.tool_choice.type == "none" else tools,
        continue_final_message=bool(body.messages) and body.messages[-1].role == "assistant",
        variables={
            **template_variables(body.chat_template_kwargs, _OWN_VARIABLES),
            **reasoning_variables(None, enabled=enabled),
            **named,
        },
    )


def num_unknown_fields(body: ConversationBody) -> int:
    """Number of fields without an effect, in messages, their blocks and tools."""
    blocks = [block for message in body.messages for block in _blocks(message)]
    return sum(len(one.model_extra or ()) for one in (*body.messages, *blocks, *(body.tools or ())))


def _blocks(message: AnthropicMessage) -> Sequence[ContentBlock]:
    content = message.content
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _user(message: AnthropicMessage) -> Iterator[dict[str, object]]:
    """A message of the user or the system: each result of a tool becomes a message of its own."""
    texts: list[str] = []
    results = 0
    for block in _blocks(message):
        if block.type != "tool_result":
            texts.append(_text(block))
            continue
        if texts:
            yield {"role": message.role, "content": _content(texts)}
            texts = []
        results += 1
        yield _tool_result(block)
    if texts or not results:
        yield {"role": message.role, "content": _content(texts)}


def _tool_result(block: ContentBlock) -> dict[str, object]:
    if block.tool_use_id is None:
        raise RequestError("a tool_result block needs a tool_use_id", "messages")
    content = block.content
    texts = [content] if isinstance(content, str) else [_text(one) for one in content or ()]
    if block.is_error and not "".join(texts).lower().startswith("error"):
        texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(texts)}


def _assistant(message: AnthropicMessage) -> Iterator[dict[str, object]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for block in _blocks(message):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # unreadable for other models
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                texts.append(_text(block))
    yield {
        "role": "assistant",
        "content": _content(texts) if texts else None,
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _tool_call(block: ContentBlock) -> dict[str, object]:
    if block.id is None or block.name is None or block.input is None:
        raise RequestError("a tool_use block needs an id, a name and an input", "messages")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _text(block: TextBlock) -> str:
    if block.type != "text":
        raise RequestError(
            f"content blocks of type {block.type!r:.80} are not supported here, as quire serves text models; supported "
            f"are {_KINDS}",
            "messages",
        )
    if block.text is None:
        raise RequestError("a text block needs a text", "messages")
    return block.text


def _content(texts: Sequence[str]) -> object:
    """One text as it is, several as a list of text parts."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _tool(tool: ToolBody) -> dict[str, object]:
    if tool.type not in _OWN_TYPES:
        raise RequestError(
            f"tools of type {tool.type!r:.80} are not supported, as Anthropic defines or runs them; give a tool of "
            "your own, with a name, a description and an input_schema, or start the server with "
            "--unknown-fields ignore",
            "tools",
        )
    if tool.input_schema is None:
        raise RequestError(f"the tool {tool.name!r:.80} needs an input_schema", "tools")
    parameters = {"type": "object", **tool.input_schema}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
