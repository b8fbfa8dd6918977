"""The toolbox of a request: what is read from OpenAI's chat JSON, and what is refused."""

import pytest

from quire.chat.tools import MAX_TOOLS, ToolChoice, toolbox
from quire.errors import RequestError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def test_a_tool_is_read():
    box = toolbox([tool("get_weather", description="Weather", parameters=CITY, strict=True), tool("now")])
    first, second = box.tools
    assert (first.name, first.description, first.parameters, first.strict) == ("get_weather", "Weather", CITY, True)
    assert first.raw == tool("get_weather", description="Weather", parameters=CITY, strict=True)
    assert (second.description, second.parameters, second.strict) == (
        "",
        {"type": "object", "properties": {}},
        False,
    )
    assert box.choice == ToolChoice("auto")
    assert box.parallel


def test_names_may_be_as_long_as_clients_of_mcp_servers_write_them():
    assert toolbox([tool("mcp__" + "a" * 123)]).tools[0].name == "mcp__" + "a" * 123


def test_a_tool_is_a_copy():
    given = tool("f", parameters={"type": "object", "properties": {}})
    box = toolbox([given])
    given["function"]["parameters"]["properties"]["x"] = {}
    assert box.tools[0].parameters["properties"] == {}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, ToolChoice("auto"), ["f", "g"]),
        ("auto", ToolChoice("auto"), ["f", "g"]),
        ("none", ToolChoice("none"), []),
        ("required", ToolChoice("required"), ["f", "g"]),
        (named("g"), ToolChoice("required", ("g",)), ["g"]),
        (allowed("auto", "g", "f", "g"), ToolChoice("auto", ("g", "f")), ["f", "g"]),
        (allowed("required", "f"), ToolChoice("required", ("f",)), ["f"]),
    ],
)
def test_a_choice_is_read(choice, expected, names):
    box = toolbox([tool("f"), tool("g")], choice)
    assert box.choice == expected
    assert [one.name for one in box.callable_tools] == names


def test_calls_are_parallel_unless_a_request_says_otherwise_or_names_a_function():
    assert toolbox([tool()], parallel_tool_calls=True).parallel
    assert not toolbox([tool()], parallel_tool_calls=False).parallel
    assert not toolbox([tool()], named("f")).parallel
    assert toolbox([tool()], allowed("required", "f")).parallel


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_there_is_no_toolbox(tools):
    for choice in (None, "none", "auto"):
        assert toolbox(tools, choice, parallel_tool_calls=False) is None
    for choice in ("required", named("f")):
        with pytest.raises(RequestError, match="needs tools") as found:
            toolbox(tools, choice)
        assert found.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "must be a list"),
        (["f"], "tools/0: only tools"),
        ([tool(), {"type": "custom", "name": "g"}], "tools/1: only tools with .* not 'custom'; give a function"),
        ([{"type": "function"}], "tools/0 needs a function"),
        ([tool(None)], "tools/0/function/name must have 1 to 128"),
        ([tool("a b")], "tools/0/function/name must have 1 to 128 .* not 'a b'"),
        ([tool("")], "1 to 128"),
        ([tool("a" * 129)], "1 to 128"),
        ([tool("größe")], "1 to 128"),
        ([tool(description=1)], "description must be text"),
        ([tool(strict="yes")], "strict must be true or false"),
        ([tool(parameters=[])], "must be a JSON schema"),
        ([tool(parameters="{}")], "must be a JSON schema"),
        ([tool(parameters={"type": "array"})], "must be a JSON schema"),
        ([tool("f"), tool("g"), tool("f")], "two tools have the name 'f'"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "at most 512 tools, not 513"),
        ([tool(parameters={"type": "object", "x": {1: 2}})], "keys of objects in tools must be strings"),
    ],
)
def test_invalid_tools_are_refused(tools, message):
    with pytest.raises(RequestError, match=message) as found:
        toolbox(tools)
    assert found.value.param == "tools"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("requierd", r"must be one of none, auto, required or an object, not 'requierd' \(did you mean 'required'\?\)"),
        (5, "is an object of type 'function' or 'allowed_tools'"),
        ({"type": "custom"}, "is an object of type"),
        ({"type": "function"}, "a function in tool_choice is"),
        (named("get_wether"), r"there is no tool 'get_wether' \(did you mean 'get_weather'\?\)"),
        (allowed("auto", "get_weather", "x"), "there is no tool 'x'"),
        (allowed("none", "get_weather"), "allowed_tools is"),
        (allowed("auto"), "allowed_tools is"),
        ({"type": "allowed_tools"}, "allowed_tools is"),
    ],
)
def test_an_invalid_choice_is_refused(choice, message):
    with pytest.raises(RequestError, match=message) as found:
        toolbox([tool("get_weather")], choice)
    assert found.value.param == "tool_choice"


def test_whether_calls_are_parallel_is_true_or_false():
    with pytest.raises(RequestError, match="true or false") as found:
        toolbox([tool()], parallel_tool_calls="no")
    assert found.value.param == "parallel_tool_calls"
