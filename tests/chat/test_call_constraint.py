"""Constraints for calls: what they accept and reject, random outputs under them, and calls of the embedded model."""

import json
import random

import jsonschema
import numpy as np
import pytest
from call_writers import WRITERS
from grammar_mask_walks import allowed, encode, text_of, vocabulary, walk

from quire.chat.constraint import call_constraint
from quire.chat.formats import TOOL_FORMATS
from quire.chat.tools import toolbox
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import check, compile
from quire.structured_outputs.vocabulary import Vocabulary
from tools.chat_transcripts import TOOLS, TRANSCRIPTS, chat_format, parse, strict
from tools.forced_calls import forced_calls
from tools.tool_schemas import SCHEMAS

FORMATS = sorted(WRITERS)
BY_NAME = {one.name: one for one in SCHEMAS}
BETWEEN_TAGS = {"qwen3_coder", "minimax_m2", "glm45"}
VOCABULARY = vocabulary()
NOW, ADD, ECHO = ({**BY_NAME[name].tool} for name in ("now", "add", "echo"))


def named(name):
    return {"type": "function", "function": {"name": name}}


def grammar(format, tools, choice="required", parallel=None):
    constraint = call_constraint(TOOL_FORMATS[format], toolbox(tools, choice, parallel))
    return compile(constraint, VOCABULARY)


def accepts(grammar, text, known=VOCABULARY, tokens=encode):
    """Whether a text is a complete output."""
    matcher = grammar.new_matcher(fast_forward=False)
    verdict = matcher.advance(tokens(text))
    return not verdict.error and bool(set(allowed(matcher, known)) & set(known.end_ids))


def faults(schema, arguments):
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(json.loads(arguments))]


def is_read_otherwise(format, one, text):
    """Whether a text is read as arguments that are valid: between tags, 5 may be a text."""
    calls = parse(chat_format(format), [text], toolbox([one.tool])).calls
    return format in BETWEEN_TAGS and len(calls) == 1 and not faults(one.parameters, calls[0].arguments)


def test_the_tool_schemas_are_at_least_60_and_their_valid_arguments_are_valid():
    assert len(SCHEMAS) >= 60
    assert sum(len(one.invalid) for one in SCHEMAS) >= 60
    for one in SCHEMAS:
        assert not [arguments for arguments in one.valid if faults(one.parameters, json.dumps(arguments))]


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_of_each_schema_is_accepted_if_it_is_valid(format):
    """Every schema in one format of each kind of arguments, and a part of the schemas in the others."""
    share = 1 if format in ("hermes", "qwen3_coder", "pythonic", "gemma4") else 5
    for one in SCHEMAS[FORMATS.index(format) % share :: share]:
        compiled = grammar(format, [one.tool])
        box = toolbox([one.tool])
        for arguments in one.valid:
            text = WRITERS[format]([(one.name, arguments)])
            if format in BETWEEN_TAGS and one.name in ("ping", "bounded_or_text"):
                continue  # any arguments are texts there; a number with bounds beside a text is left out
            assert accepts(compiled, text), text
            (call,) = parse(chat_format(format), [text], box).calls
            assert call.name == one.name
            assert strict(json.loads(call.arguments)) == strict(arguments)
        for arguments in one.invalid:
            text = WRITERS[format]([(one.name, arguments)])
            assert not accepts(compiled, text) or is_read_otherwise(format, one, text), text


@pytest.mark.parametrize("format", FORMATS)
def test_every_output_is_valid_calls(format):
    """Random tokens that the masks allow."""
    rng = random.Random(format)
    num_complete = 0
    for one in rng.sample(SCHEMAS, 8):
        others = rng.sample(SCHEMAS, 2)
        tools = {tool.name: tool for tool in (one, *others)}
        compiled = grammar(format, [tool.tool for tool in tools.values()])
        limit = 70 + 2 * len(encode(WRITERS[format]([("now", {})])))
        tokens, is_complete = walk(compiled, VOCABULARY, rng, limit=limit, fast_forward=rng.random() < 0.5)
        num_complete += is_complete
        if is_complete:
            text = text_of(tokens, VOCABULARY).decode()
            message = parse(chat_format(format), [text], toolbox([tool.tool for tool in tools.values()]), forced=True)
            assert message.calls, text
            assert not message.content, text
            for call in message.calls:
                assert not faults(tools[call.name].parameters, call.arguments), text
    assert num_complete >= 3


@pytest.mark.parametrize("format", FORMATS)
def test_the_grammar_accepts_one_call_or_parallel_calls_as_the_format_allows(format):
    write = WRITERS[format]
    calls = [("now", {}), ("echo", {"text": "a"}), ("now", {})]
    is_parallel = TOOL_FORMATS[format].has_parallel
    several = grammar(format, [NOW, ECHO])
    one = grammar(format, [NOW, ECHO], parallel=False)
    assert accepts(one, write(calls[:1]))
    assert accepts(several, write(calls[1:2]))
    if is_parallel:
        assert accepts(several, write(calls))
        assert not accepts(one, write(calls[:2]))
    for text in ("", "Hello", write(calls[:1]) + " Done.", " " + write(calls[:1])):
        assert not accepts(several, text), text


@pytest.mark.parametrize("format", FORMATS)
def test_only_offered_tools_are_called(format):
    tools = [BY_NAME[name].tool for name in ("get", "get_all", "get_price")]
    write = WRITERS[format]
    calls = {"get": {"key": "a"}, "get_all": {"keys": []}, "get_price": {"item": "x"}}
    every, two, one = (
        grammar(format, tools, choice)
        for choice in (
            "required",
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [named("get"), named("get_price")]},
            },
            named("get"),
        )
    )
    for name, arguments in calls.items():
        text = write([(name, arguments)])
        assert accepts(every, text)
        assert accepts(two, text) == (name != "get_all")
        assert accepts(one, text) == (name == "get")
    for name in ("ge", "get_", "got", "get_priced"):
        assert not accepts(every, write([(name, {"key": "a"})]))


def strict_tool(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


STRICT_ECHO = strict_tool(ECHO)


@pytest.mark.parametrize("format", FORMATS)
def test_tools_that_are_not_strict_constrain_nothing_with_auto(format):
    assert call_constraint(TOOL_FORMATS[format], toolbox([NOW, ECHO])) is None
    assert call_constraint(TOOL_FORMATS[format], toolbox([NOW, ECHO], "auto", parallel_tool_calls=False)) is None


@pytest.mark.parametrize("format", FORMATS)
def test_with_auto_a_strict_tool_constrains_its_own_calls_alone(format):
    write = WRITERS[format]
    auto = grammar(format, [NOW, STRICT_ECHO], "auto")
    call, free = write([("echo", {"text": "a"})]), write([("now", {"any": ["thing", {"a": 1.50}]})])
    unknown = write([("echo_all", {"other": "a"})])
    for text in (
        *("", "Hello.\n", "a <b> [c] {d}: ", "[echo chamber] of echo(es), {", "  \n\n", '"echo"'),
        *(call, free, unknown, f"I look.\n{call}\n", f"{call}x", f"{free}\n{call}", f"{unknown} and {call}"),
        *(free.replace(" ", "  "), free.replace(": ", ":"), free[:-3], unknown[:-5], free[: len(free) // 2], free * 3),
    ):
        assert accepts(auto, text), text
    for text in (
        *(write([("echo", {"other": "a"})]), write([("echo", {})])),
        *(f"{unknown}\n{write([('echo', {})])}", f"{call}\n{write([('echo', {})])}"),
    ):
        assert not accepts(auto, text), text


@pytest.mark.parametrize("format", sorted(one for one in FORMATS if TOOL_FORMATS[one].has_parallel))
def test_with_auto_each_strict_call_of_several_is_valid(format):
    write = WRITERS[format]
    auto = grammar(format, [NOW, STRICT_ECHO], "auto")
    valid, invalid = ("echo", {"text": "a"}), ("echo", {"text": 1})
    for calls in ([("now", {"a": {"b": 1}})], [valid], [("now", {}), valid], [valid, ("now", {}), valid]):
        if calls[0] == ("now", {}) and format != "pythonic":
            calls = [("now", {"a": {}}), *calls[1:]]
        assert accepts(auto, write([*calls, valid])), calls
        if format not in BETWEEN_TAGS:  # where 1 is a text
            text = write([*calls, invalid])
            assert not accepts(auto, text), text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{ "name" : "echo" ,"arguments":{"text": "a"} }</tool_call>'),
        ("hermes", '<tool_call>\n{"type": "function", "name": "echo", "arguments": {"text": "a"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"index": 0, "of": "a", "name": "echo", "arguments": {"text": "a"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]echo\n[ARGS]{"text": "a"}'),
        ("generic", '<function_call>{"name": "echo", "parameters": {"text": "a"}}</function_call>'),
        ("llama3_json", '<|python_tag|>{"name": "echo", "parameters": {"text": "a"}}'),
        ("mistral", '[TOOL_CALLS]echo[ARGS]{"text": "a"}'),
        ("mistral", '[TOOL_CALLS]echo{"text": "a"}'),
        ("mistral_v11", '[TOOL_CALLS][{"name": "echo", "arguments": {"text": "a"}}]'),
        ("openai", '<|channel|>analysis to=functions.echo code<|message|>{"text": "a"}'),
        ("qwen3_coder", "<function=echo><parameter=text>\na\n</parameter>\n</function>"),
        ("pythonic", 'Look:\n  [ echo (text="a")]'),
        ("gemma4", '<|tool_call>echo{text:<|"|>a<|"|>}<tool_call|>'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "echo", "parameters": {"text": "a"}}]'),
        ("cohere_command3", '<|START_ACTION|>[{"name": "echo", "arguments": {"text": "a"}}]'),
        ("smollm3", '<tool_call>{"name": "echo", "arguments": {"text": "a"}}</tool_call>'),
        ("smollm3", '<code>\necho(text="a")\n</code>'),
    ],
)
def test_with_auto_strict_calls_are_seen_in_each_form_that_the_parser_reads(format, text):
    auto = grammar(format, [NOW, STRICT_ECHO], "auto")
    assert [call.name for call in parse(chat_format(format), [text], toolbox([STRICT_ECHO])).calls] == ["echo"]
    assert accepts(auto, text), text
    wrong = text.replace("text", "other")
    assert not accepts(auto, wrong), wrong
    other = wrong.replace("echo", "echo2")
    assert accepts(auto, other), other


@pytest.mark.parametrize(
    ("format", "first", "between"),
    [
        ("pythonic", "[now()]", ""),
        ("pythonic", '[echo(text="a")]', " "),
        ("llama3_json", '{"name": "now", "parameters": {}}', ""),
        ("llama3_json", '{"name": "now", "parameters": {"a": {"b": {}}}}', " "),
        ("llama3_json", '{"name": "now", "parameters": {"a": {"b": {}}}}', "; "),
        ("generic", '[{"name": "now", "arguments": {"a": {}}}]', " "),
    ],
)
def test_with_auto_a_strict_call_in_the_line_of_another_one_is_valid(format, first, between):
    auto = grammar(format, [NOW, STRICT_ECHO], "auto")
    for arguments in ({"text": "a"}, {"b": 1}, {}):
        call = WRITERS[format]([("echo", arguments)])
        text = first + between + (f"[{call}]" if format == "generic" else call)
        calls = parse(chat_format(format), [text], toolbox([NOW, STRICT_ECHO])).calls
        assert [one.name for one in calls][1:] == ["echo"]
        assert accepts(auto, text) == ("text" in arguments), text


def test_with_auto_each_strict_call_of_a_list_without_markup_is_valid():
    auto = grammar("generic", [NOW, STRICT_ECHO], "auto")
    for arguments in ({"text": "a"}, {"b": 1}):
        text = json.dumps([{"name": "now", "arguments": {"a": {}}}, {"name": "echo", "arguments": arguments}])
        assert len(parse(chat_format("generic"), [text], toolbox([NOW, STRICT_ECHO])).calls) == 2
        assert accepts(auto, text) == ("text" in arguments), text


def test_without_tools_that_may_be_called_there_is_no_constraint():
    assert call_constraint(TOOL_FORMATS["hermes"], toolbox([NOW], "none")) is None


@pytest.mark.parametrize("format", FORMATS)
def test_with_auto_tools_that_are_not_allowed_are_not_called(format):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now"), named("echo")]}}
    write = WRITERS[format]
    for tools in ([NOW, ADD, ECHO], [NOW, ADD, STRICT_ECHO]):
        auto = grammar(format, tools, choice)
        for text in (
            "Hello",
            write([("now", {"a": 1})]),
            write([("echo", {"text": "a"})]),
            write([("addend", {"a": 1})]),
        ):
            assert accepts(auto, text), text
        assert not accepts(auto, write([("add", {"a": 1, "b": 2})]))
        assert accepts(auto, write([("echo", {"b": 1})])) == (tools[2] is ECHO)
    if format != "pythonic":
        compiled = compile(call_constraint(TOOL_FORMATS[format], toolbox([NOW, ADD, ECHO], choice), NUMBER), VOCABULARY)
        write = WRITERS["hermes"] if format == "generic" else write
        before = "<|python_tag|>" if format == "llama3_json" else ""
        assert accepts(compiled, before + write([("addend", {"a": 1})]))
        assert not accepts(compiled, before + write([("add", {"a": 1, "b": 2})]))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one.id)
def test_with_auto_a_strict_tool_that_is_not_called_changes_no_token(transcript):
    if transcript.format.tools is None:
        pytest.skip("a transcript of reasoning alone")
    constraint = call_constraint(transcript.format.tools, toolbox([*TOOLS, strict_tool(BY_NAME["get_price"].tool)]))
    matcher = compile(constraint, VOCABULARY).new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    texts = {
        token for token, data in enumerate(VOCABULARY.tokens) if data and data.decode(errors="ignore").encode() == data
    }
    for token in encode(transcript.text):
        assert verdict.forced == [] and not verdict.error
        verdict = matcher.advance([token])
    assert texts | set(VOCABULARY.end_ids) <= set(allowed(matcher, VOCABULARY)), "any text, or the end"


SPECIAL = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "[TOOL_CALLS]", "[ARGS]")
SPECIAL += ("<|tool_call>", "<tool_call|>", '<|"|>', "<|START_ACTION|>", "<|END_ACTION|>")
END = 256 + len(SPECIAL)
WITH_SPECIAL = Vocabulary(
    [bytes([i]) for i in range(256)] + [b""] * (len(SPECIAL) + 1),
    (END,),
    frozenset(range(256, END + 1)),
    lambda text: list(text.encode()),
    {256 + place: text.encode() for place, text in enumerate(SPECIAL)},
)


def special_tokens(text):
    """The tokens of a text, in which special tokens are tokens."""
    tokens = []
    while text:
        found = next((one for one in SPECIAL if text.startswith(one)), None)
        tokens += [WITH_SPECIAL.special_ids_by_text[found]] if found else list(text[0].encode())
        text = text[len(found or "x") :]
    return tokens


def test_markup_that_is_a_special_token_is_written_as_one():
    for format in ("openai", "mistral", "mistral_v11", "gemma4", "cohere_command3"):
        constraint = call_constraint(TOOL_FORMATS[format], toolbox([ECHO], "required"))
        check(constraint)
        compiled = compile(constraint, WITH_SPECIAL)
        text = WRITERS[format]([("echo", {"text": ""})])
        assert accepts(compiled, text, WITH_SPECIAL, special_tokens)
        assert not accepts(compiled, text, WITH_SPECIAL, lambda text: list(text.encode()))
        matcher = compiled.new_matcher(fast_forward=True)
        forced = matcher.advance([]).forced
        assert not forced or forced[0] == special_tokens(text)[0]


def test_a_call_of_gpt_oss_may_follow_reasoning():
    compiled = compile(call_constraint(TOOL_FORMATS["openai"], toolbox([NOW], "required")), WITH_SPECIAL)
    text = WRITERS["openai"]([("now", {})])
    assert accepts(compiled, f"<|start|>assistant{text}", WITH_SPECIAL, special_tokens)


@pytest.mark.parametrize("format", ["openai", "mistral", "mistral_v11", "gemma4", "cohere_command3"])
def test_with_auto_any_special_token_may_be_written(format):
    compiled = compile(call_constraint(TOOL_FORMATS[format], toolbox([NOW, STRICT_ECHO])), WITH_SPECIAL)
    write = WRITERS[format]
    call = write([("echo", {"text": "a"})])
    for text in (
        *(
            "",
            "Hello",
            "<|channel|>final<|message|>Hello.",
            "[TOOL_CALLS]",
            "[TOOL_CALLS] b <|end|>",
            "<|start|><|start|>",
        ),
        "<|start|>assistant<|channel|>final<|message|>Hello.",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}",
        *(call, f"{call}x", f"{call}<|end|>{call}", f"{write([('now', {'a': 1})])}<|end|>{call}"),
        *(write([("echo_all", {"b": 1})]), write([("now", {"b": 1})])[:-2]),
    ):
        assert accepts(compiled, text, WITH_SPECIAL, special_tokens), text
    wrong = write([("echo", {"b": 1})])
    for text in (wrong, f"a {wrong}", f"{call}<|end|>{wrong}", f"{write([('now', {'a': 1})])}<|end|>{wrong}"):
        assert not accepts(compiled, text, WITH_SPECIAL, special_tokens), text


def test_with_auto_a_strict_call_in_a_list_behind_a_special_token_is_valid():
    compiled = compile(call_constraint(TOOL_FORMATS["mistral"], toolbox([NOW, STRICT_ECHO])), WITH_SPECIAL)
    for arguments in ({"text": "a"}, {"b": 1}):
        for before in (("now", {"b": {}}), ("echo", {"text": "b"})):
            text = WRITERS["mistral"]([before, ("echo", arguments)])
            assert accepts(compiled, text, WITH_SPECIAL, special_tokens) == ("text" in arguments), text


def test_objects_have_no_properties_that_their_schema_does_not_name():
    nested = {"type": "object", "properties": {"p": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    compiled = grammar("hermes", [tool])
    write = WRITERS["hermes"]
    assert accepts(compiled, write([("f", {"p": {"x": 1}})]))
    assert not accepts(compiled, write([("f", {"p": {"x": 1, "y": 2}})]))
    assert not accepts(compiled, write([("f", {"p": {}, "q": 1})]))


def test_objects_of_composed_schemas_have_all_their_properties():
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "allOf": [base, more]}}}
    assert accepts(grammar("hermes", [tool]), WRITERS["hermes"]([("f", {"a": 1, "b": 2})]))


@pytest.mark.parametrize(
    ("format", "parameters", "message"),
    [
        (
            "hermes",
            {"type": "object", "properties": {"a": {"not": {"pattern": "x"}}}},
            "tool f: schema at #/properties/a/not",
        ),
        (
            "hermes",
            {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]},
            "required property 'a'",
        ),
        ("glm45", {"type": "object", "anyOf": [{"required": ["a"]}]}, "the required 'a' must be in properties"),
        ("glm45", {"type": "object", "patternProperties": {"a": {}}}, "'patternProperties' beside the properties"),
        ("glm45", {"type": "object", "required": ["a"]}, "the required 'a' must be in properties"),
        ("glm45", {"type": "object", "properties": {"</arg_key>": {}}}, "a name cannot have '</arg_key>'"),
        ("glm45", {"type": "object", "properties": {"a": {"enum": ["</arg_value>"]}}}, "no text satisfies the schema"),
        ("pythonic", {"type": "object", "properties": {"a-b": {}}}, "a name must be a Python identifier"),
        (
            "qwen3_coder",
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
            "schema at #/properties/a/pattern: pattern: in this format ^ and $ are supported only around",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(format, parameters, message):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    constraint = call_constraint(TOOL_FORMATS[format], toolbox([tool], "required"))
    with pytest.raises(RequestError) as found:
        check(constraint)
    assert message in str(found.value)
    assert "start:" not in str(found.value), "errors do not quote the grammar"
    with pytest.raises(RequestError, match=r"grammar|schema"):
        check(call_constraint(TOOL_FORMATS[format], toolbox([strict_tool(tool)])))


def test_texts_between_tags_may_be_anything_but_the_end_tag():
    compiled = grammar("qwen3_coder", [ECHO])
    write = WRITERS["qwen3_coder"]
    for text in ("", "\n", "\n\n", " a ", '"', "</parameter", "<parameter=x>", "</function>\n</tool_call>", "日本🎉"):
        written = write([("echo", {"text": text})])
        assert accepts(compiled, written), text
        (call,) = parse(chat_format("qwen3_coder"), [written], toolbox([ECHO])).calls
        assert json.loads(call.arguments) == {"text": text}
    assert not accepts(compiled, write([("echo", {"text": "a</parameter>b"})]))


NUMBER = StructuredOutputsParams(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"pythonic"}))
def test_beside_an_answer_in_json_calls_are_possible(format):
    """Agents ask for an answer of a schema, which the model gives behind its calls."""
    before = "<|python_tag|>" if format == "llama3_json" else ""
    written = WRITERS["hermes" if format == "generic" else format]  # the form with a begin

    def write(calls):
        return before + written(calls)

    constraint = call_constraint(TOOL_FORMATS[format], toolbox([NOW, ECHO]), NUMBER)
    compiled = compile(constraint, VOCABULARY)
    for text in (write([("now", {})]), write([("echo", {"any": "a"})]), write([("other", {})]), '{"n": 5}'):
        assert accepts(compiled, text), text
    for text in ("", "Hello", '{"m": 5}', '{"n": 5}' + write([("now", {})]), "5"):
        assert not accepts(compiled, text), text
    compiled = compile(call_constraint(TOOL_FORMATS[format], toolbox([NOW, STRICT_ECHO]), NUMBER), VOCABULARY)
    for text in (write([("echo", {"text": "a"})]), write([("echo_all", {"any": "a"})]), '{"n": 5}'):
        assert accepts(compiled, text), text
    assert not accepts(compiled, write([("echo", {"any": "a"})]))


def test_the_answer_of_gpt_oss_has_its_header():
    header = "<|channel|>final<|message|>"
    constraint = call_constraint(TOOL_FORMATS["openai"], toolbox([NOW]), NUMBER, header)
    compiled = compile(constraint, VOCABULARY)
    assert accepts(compiled, header + '{"n": 5}')
    assert accepts(compiled, WRITERS["openai"]([("now", {})]))
    assert not accepts(compiled, '{"n": 5}')


def test_beside_another_answer_no_calls_are_possible():
    for answer in (StructuredOutputsParams(regex="a"), StructuredOutputsParams(choice=["a"])):
        assert call_constraint(TOOL_FORMATS["hermes"], toolbox([NOW]), answer) is None
    assert call_constraint(TOOL_FORMATS["pythonic"], toolbox([NOW]), NUMBER) is None


def test_many_tools_with_long_descriptions_fit():
    tools = []
    for index in range(128):
        properties = {f"p{i}": {"type": "string", "description": "x" * 300} for i in range(6)}
        function = {"name": f"tool_{index}", "strict": True, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    for choice in ("required", "auto"):
        constraint = call_constraint(TOOL_FORMATS["hermes"], toolbox(tools, choice))
        compiled = compile(constraint, VOCABULARY)
        assert accepts(compiled, WRITERS["hermes"]([("tool_127", {"p5": "a"})]))


def test_masks_of_free_text_allow_most_tokens():
    compiled = grammar("hermes", [STRICT_ECHO], "auto")
    matcher = compiled.new_matcher(fast_forward=True)
    assert not matcher.advance(encode("Hello")).forced
    words = np.zeros(VOCABULARY.num_words, np.uint32)
    matcher.fill_bitmask(words)
    assert int(np.bitwise_count(words).sum()) > 1900


@pytest.mark.parametrize(
    "text",
    ["start: %special 5", 'start: %tagged {"key_begin": "a"}', 'start: %tagged {"schema": {}, "key_begin": "a"}'],
)
def test_invalid_directives_are_refused(text):
    with pytest.raises(RequestError, match=r"grammar|%tagged"):
        check(StructuredOutputsParams(grammar=text))


def test_forced_calls_of_the_embedded_model_are_valid(llm):
    """`python -m benchmarks.tool_calls` generates 300 of them."""
    for format, num_calls in (("hermes", 32), ("qwen3_coder", 8)):
        calls = list(forced_calls(llm, format, num_calls))
        assert len(calls) == num_calls
        assert [(call.name, call.fault, call.text) for call in calls if call.fault] == []


def with_values(name, num_values):
    """A strict tool whose schema has about ten characters for each value; its description does not count."""
    values = {"type": "string", "enum": [f"value{i:05}" for i in range(num_values)], "description": "x" * 200_000}
    parameters = {"type": "object", "properties": {"value": values}}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


def test_long_names_that_are_not_allowed_are_refused_without_a_schema():
    others = [{"type": "function", "function": {"name": f"a{number}".ljust(128, "x")}} for number in range(511)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now")]}}
    with pytest.raises(RequestError, match=r"descriptions not counted\. Shorten the schemas") as caught:
        grammar("openai", [NOW, *others], choice)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("format", ["hermes", "openai"])
def test_schemas_that_are_too_long_together_are_refused_with_the_longest(format, choice):
    tools = [with_values(f"tool{i}", num) for i, num in enumerate([100, 4000, 3000, 5000])]
    assert call_constraint(TOOL_FORMATS[format], toolbox(tools[:3], choice)) is not None
    with pytest.raises(
        RequestError, match=r"more than 131,072.* of tool3 \(70,...\), tool1 .*, tool2 .*\. Shorten"
    ) as refused:
        call_constraint(TOOL_FORMATS[format], toolbox(tools, choice))
    assert refused.value.param == "tools"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": choice, "tools": [named("tool3")]}}
    assert call_constraint(TOOL_FORMATS[format], toolbox(tools, allowed)) is not None
