"""The tools of /v1/responses, as the functions that the model may call.

Functions may be in a namespace. A custom tool, whose input is text, is a function with one string. Tools that a server
would have to run, such as a web search, are left out, unless the request requires one.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from quire.chat.tools import MAX_NAME, MAX_TOOLS, NAME
from quire.errors import RequestError, nearest

INPUT = "input"  # the parameter of a custom tool
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CALLABLE = ("function", "custom")
_RUN_BY_CLIENT = (*_CALLABLE, "namespace")
CALLS = frozenset({"function_call", "custom_tool_call"})  # items,
RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})  # and those with what a call returned

Tool = Mapping[str, Any]


class ToolOrigin(NamedTuple):
    """The tool of the body that a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseTools(NamedTuple):
    """functions: in the form of chat requests. origins: by name of a function. left_out: types of other tools.

    names: of functions, by name and namespace of the tools for which they stand.
    """

    functions: list[Tool]
    origins: Mapping[str, ToolOrigin]
    left_out: Collection[str]
    names: Mapping[tuple[str, str | None], str]

    def function_name(self, name: object, namespace: object = None) -> object:
        """The name of the function that stands for a tool; `name` itself for an unknown one."""
        if not isinstance(name, str) or not isinstance(namespace, str | None):
            return name
        return self.names.get((name, namespace), name)

    def choice(self, choice: str | Mapping[str, Any] | None) -> object:
        """`tool_choice` in the form of chat requests. Raises RequestError if it requires a tool that is left out."""
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        if self.left_out and (kind in self.left_out or (kind == "required" and not self.functions)):
            raise _required(self.left_out)
        if not isinstance(choice, Mapping):
            return choice
        if kind in ("function", "custom") and "function" not in choice:
            return self._named(choice)
        if kind == "allowed_tools" and "allowed_tools" not in choice:
            tools, mode = choice.get("tools"), choice.get("mode")
            if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
                return {"type": kind, kind: {"mode": mode, "tools": tools}}
            ours = [tool for tool in tools if not isinstance(tool, Mapping) or tool.get("type") not in self.left_out]
            if tools and not ours:
                if mode == "required":
                    raise _required(self.left_out)
                return "none"
            return {"type": kind, kind: {"mode": mode, "tools": [self._named(tool) for tool in ours]}}
        return choice

    def _named(self, tool: object) -> object:
        """A tool that is named by a choice, in the form of chat requests."""
        names = (tool.get("name"), tool.get("namespace")) if isinstance(tool, Mapping) else (None,)
        return {"type": "function", "function": {"name": self.function_name(*names)}}


def _required(left_out: Collection[str]) -> RequestError:
    return RequestError(
        f"tool_choice requires a tool of type {' or '.join(left_out)}, which this server does not run; it has only "
        "tools that the client runs: functions, custom tools, and namespaces of them",
        "tool_choice",
    )


def read_tools(tools: Sequence[Tool]) -> ResponseTools:
    """The tools of a body. Raises RequestError for too many, and for one that is wrong, by its place."""
    found = list(islice(_by_client(tools), MAX_TOOLS + 1))
    if len(found) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools, those in namespaces included", "tools")
    counts = Counter(name for _, _, name, _ in found)
    functions: list[Tool] = []
    origins: dict[str, ToolOrigin] = {}
    for place, tool, name, namespace in found:
        if "function" in tool:  # as in chat requests
            functions.append(tool)
            continue
        is_custom = tool["type"] == "custom"
        own = f"{namespace}.{name}" if namespace is not None and counts[name] > 1 else name
        if namespace is not None and not NAME.fullmatch(own):
            raise RequestError(
                f"{place}: {own!r:.200} must have 1 to {MAX_NAME} letters, digits, '_', '.' or '-'", "tools"
            )
        about = (
            _text_function(tool, place) if is_custom else {key: tool[key] for key in _FUNCTION_FIELDS if key in tool}
        )
        functions.append({"type": "function", "function": {**about, "name": own}})
        origins[own] = ToolOrigin(name, namespace, is_custom)
    names = {(origin.name, origin.namespace): own for own, origin in origins.items()}
    left_out = [_other_type(tool, f"tools.{place}") for place, tool in enumerate(tools)]
    return ResponseTools(functions, origins, dict.fromkeys(kind for kind in left_out if kind is not None), names)


def _other_type(tool: Tool, place: str) -> str | None:
    """The type of a tool that the server would have to run; None for others. Raises RequestError for a likely typo."""
    kind = tool.get("type")
    if kind in _RUN_BY_CLIENT:
        return None
    hint = nearest(kind, _RUN_BY_CLIENT) if isinstance(kind, str) else ""
    if not isinstance(kind, str) or hint:
        raise RequestError(
            f"{place}: the type of a tool is one of {', '.join(_RUN_BY_CLIENT)}, not {kind!r:.80}{hint}", "tools"
        )
    return kind[:64]


def _by_client(tools: Sequence[Tool]) -> Iterator[tuple[str, Tool, str, str | None]]:
    """Functions and custom tools with their places, names and namespaces."""
    for index, tool in enumerate(tools):
        if tool.get("type") in _CALLABLE:
            yield f"tools.{index}", tool, _name(tool, f"tools.{index}"), None
        elif tool.get("type") == "namespace":
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                raise RequestError(f"tools.{index}: a namespace needs a name and a list of tools", "tools")
            for number, one in enumerate(inner):
                place = f"tools.{index}.tools.{number}"
                if not isinstance(one, Mapping) or one.get("type") not in _CALLABLE:
                    raise RequestError(f"{place}: a namespace has tools of type function or custom", "tools")
                yield place, one, _name(one, place), name


def _name(tool: Tool, place: str) -> str:
    """The name of a tool, which a function in the form of chat requests has in its `function`. Raises RequestError."""
    inner = tool.get("function") if tool["type"] == "function" else None
    name = inner.get("name") if isinstance(inner, Mapping) else tool.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{place}: a tool of type {tool['type']} needs a name", "tools")
    return name


def _text_function(tool: Tool, place: str) -> dict[str, Any]:
    """A function for a custom tool. A grammar of its input is part of the description."""
    description, format = tool.get("description"), tool.get("format")
    if not isinstance(description, str | None):
        raise RequestError(f"{place}.description must be text", "tools")
    if isinstance(format, Mapping) and format.get("type") == "grammar":
        grammar = f"The input follows this grammar ({format.get('syntax')}):\n{format.get('definition')}"
        description = f"{description}\n\n{grammar}" if description else grammar
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {**({"description": description} if description else {}), "parameters": parameters, "strict": True}
