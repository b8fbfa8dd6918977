"""The formats of a model, found in the source of its chat template."""

from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat
from quire.errors import ConfigError, nearest


def chat_format(
    template: str | None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> ChatFormat:
    """The formats of a model. template: source of its chat template. The parsers' names override what is found.

    Raises ConfigError for an unknown name, with the nearest one.
    """
    for name, known in ((tool_parser, TOOL_FORMATS), (reasoning_parser, REASONING_FORMATS)):
        if name is not None and name not in known:
            raise ConfigError(f"unknown parser {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    source = template or ""
    tool_name = tool_parser or ("hermes" if "<tool_call>" in source else None)
    reasoning_name = reasoning_parser or ("qwen3" if "think" in source else None)
    return ChatFormat(
        TOOL_FORMATS[tool_name] if tool_name else None,
        REASONING_FORMATS[reasoning_name] if reasoning_name else None,
        f"tool calls {tool_name or 'none'}, reasoning {reasoning_name or 'none'}: found in the chat template",
    )
