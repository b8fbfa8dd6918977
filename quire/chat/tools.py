"""The tools that a request offers, read from OpenAI's chat JSON."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from quire.errors import RequestError, nearest
from quire.tokenizer.messages import plain_json

MAX_TOOLS = 512
MAX_NAME = 128  # characters; OpenAI allows 64, Anthropic and clients of MCP servers write longer ones
NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")
_MODES = ("none", "auto", "required")
_INSTEAD_OF_CUSTOM = "give a function with one string parameter, such as input, with a pattern in place of a grammar"


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call.

    parameters: JSON schema of the arguments, an object. strict: whether every call has to satisfy the schema.
    raw: the tool as the chat template gets it.
    """

    name: str
    description: str
    parameters: dict[str, object]
    strict: bool
    raw: dict[str, object]


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model has to call tools. names: only these may be called; None: all of them."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of a request. parallel: whether a message may have more than one call."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the choice allows to call; none with the mode "none"."""
        if self.choice.mode == "none":
            return ()
        names = self.choice.names
        return self.tools if names is None else tuple(tool for tool in self.tools if tool.name in names)

    @property
    def barred_names(self) -> tuple[str, ...]:
        """The names of the tools that the choice does not allow to call, although they are offered."""
        names = self.choice.names
        return () if names is None else tuple(tool.name for tool in self.tools if tool.name not in names)


def toolbox(tools: object, tool_choice: object = None, parallel_tool_calls: object = None) -> Toolbox | None:
    """The toolbox of a chat request, from the JSON values of these fields. None without tools.

    tool_choice: "none", "auto" (also None), "required", {"type": "function", "function": {"name": ...}} (one call of
    this tool), or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [...]}}.
    parallel_tool_calls: true (also None) or false. Raises RequestError that names the field in `param`.
    """
    if not isinstance(parallel_tool_calls, bool | None):
        raise RequestError("parallel_tool_calls must be true or false", "parallel_tool_calls")
    if tools is None or tools == []:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools; add tools, or leave tool_choice out", "tool_choice")
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list of objects", "tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools, not {len(tools)}", "tools")
    read = tuple(_tool(tool, f"tools/{index}") for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two tools have the name {twice!r}; give each tool a name of its own", "tools")
    is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    return Toolbox(read, _choice(tool_choice, names), parallel_tool_calls is not False and not is_named)


def _tool(value: object, at: str) -> Tool:
    raw = plain_json(value, "tools")
    if not isinstance(raw, dict) or raw.get("type", "function") != "function":
        kind = raw.get("type") if isinstance(raw, dict) else raw
        hint = f"; {_INSTEAD_OF_CUSTOM}" if kind == "custom" else ""
        raise RequestError(f'{at}: only tools with "type": "function" are supported, not {kind!r:.80}{hint}', "tools")
    function = raw.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{at} needs a function with name and parameters", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{at}/function/name must have 1 to {MAX_NAME} letters, digits, '_', '.' or '-', not {name!r:.80}", "tools"
        )
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(description, str | None):
        raise RequestError(f"{at}/function/description must be text", "tools")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{at}/function/strict must be true or false", "tools")
    parameters = function.get("parameters")
    if parameters in (None, {}):
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(f'{at}/function/parameters must be a JSON schema with "type": "object"', "tools")
    return Tool(name, description or "", parameters, bool(strict), raw)


def _choice(value: object, names: list[str]) -> ToolChoice:
    if value is None:
        return ToolChoice("auto")
    if isinstance(value, str):
        for mode in _MODES:
            if value == mode:
                return ToolChoice(mode)  # type: ignore[arg-type]  # one of the three literals
        raise RequestError(
            f"tool_choice must be one of {', '.join(_MODES)} or an object, not {value!r:.80}{nearest(value, _MODES)}",
            "tool_choice",
        )
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and kind == "function":
        return ToolChoice("required", (_named_function(value, names),))
    if isinstance(value, Mapping) and kind == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"), names)
    raise RequestError("tool_choice is an object of type 'function' or 'allowed_tools'", "tool_choice")


def _allowed_tools(value: object, names: list[str]) -> ToolChoice:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    mode = value.get("mode") if isinstance(value, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise RequestError(
            'allowed_tools is {"mode": "auto" or "required", "tools": [...]} with at least one tool', "tool_choice"
        )
    allowed = tuple(dict.fromkeys(_named_function(tool, names) for tool in tools))
    return ToolChoice("auto" if mode == "auto" else "required", allowed)


def _named_function(value: object, names: list[str]) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            "a function in tool_choice is {'type': 'function', 'function': {'name': ...}}", "tool_choice"
        )
    if name not in names:
        raise RequestError(f"tool_choice: there is no tool {name!r:.80}{nearest(name, names)}", "tool_choice")
    return name
