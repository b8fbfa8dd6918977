"""The parser of messages: transcripts of model families, every split of them, and random texts against slow oracles."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS, NamedCall, QuotedArguments, TaggedArguments
from quire.chat.parser import MAX_SPACE, MessageParser
from quire.chat.parts import Call, CallArguments, CallBegin, CallEnd, Content, Message, Reasoning, message_of
from quire.chat.reader import MAX_HELD
from quire.chat.tools import toolbox
from tools.chat_transcripts import TOOLBOX, TOOLS, TRANSCRIPTS, chat_format, parse

HERMES = chat_format("hermes", "qwen3")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MAX_SPLITS = 40  # of one transcript in three pieces; `python -m benchmarks.tool_calls` tries all of them


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one.id)
def test_a_transcript_is_read(transcript):
    assert transcript.is_read_as(transcript.parse([transcript.text]))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one.id)
def test_a_transcript_in_pieces_is_the_same_message(transcript):
    text = transcript.text
    whole = transcript.parse([text])
    assert transcript.parse(list(text)) == whole
    assert transcript.parse([text[i : i + 3] for i in range(0, len(text), 3)]) == whole
    for place in range(len(text) + 1):
        assert transcript.parse([text[:place], text[place:]]) == whole
    pairs = [(i, j) for i in range(len(text)) for j in range(i + 1, len(text))]
    for i, j in pairs[:: len(pairs) // MAX_SPLITS + 1]:
        assert transcript.parse([text[:i], text[i:j], text[j:]]) == whole


def test_every_format_has_transcripts():
    """The formats that the documentation names first have a file of their own, with 12 transcripts at least."""
    counts = {}
    for transcript in TRANSCRIPTS:
        name = transcript.id.split(":")[0]
        counts[name] = counts.get(name, 0) + 1
    others = counts.pop("others")
    assert others >= 8
    assert min(counts.values()) >= 12
    assert {one.format.tools for one in TRANSCRIPTS} >= set(TOOL_FORMATS.values()) - {
        TOOL_FORMATS["mistral_v11"],  # the same forms in another order
        TOOL_FORMATS["phi4_functools"],
    }


def split(text, cuts):
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 10**6), max_size=12)


@settings(max_examples=300)
@given(transcript=st.sampled_from(TRANSCRIPTS), cuts=CUTS)
def test_a_transcript_in_more_pieces_is_the_same_message(transcript, cuts):
    assert transcript.is_read_as(transcript.parse(split(transcript.text, cuts)))


def markup(format):
    """Texts that may mean something in a format."""
    found = []
    for form in format.forms:
        call = form.call
        found += [form.begin, form.open, form.separator, form.close, form.end]
        if isinstance(call, NamedCall):
            found += [call.begin, call.name_prefix, call.after_name, call.name_end, call.end]
            style = call.arguments
            if isinstance(style, TaggedArguments):
                found += [style.key_begin, style.key_end, style.value_begin, style.value_end]
            elif isinstance(style, QuotedArguments):
                found += [style.quote, f"text:{style.quote}a{style.quote}", "q:"]
        else:
            found += ['{"name": "', '", "arguments": ', "}"]
    return [text for text in [*found, *format.dropped] if text]


OTHERS = (
    *("now", "note", "f", " ", "\n", "\n\n", "x", "ä🎉", "{", "}", "{}", "[", "]", "(", ")", ":", ",", '"', "'", "\\"),
    *('{"a": 1}', '"text": "b"', "text=", "1", "-2.5", "True", "null", '"""', "\\u00e9", "\\x4", "function", "name"),
)


def texts_of(name):
    format = TOOL_FORMATS[name]
    known = [*markup(format), *OTHERS, "<think>", "</think>", "<|channel|>analysis<|message|>", "<|end|>"]
    broken = [text[:end] for text in markup(format) for end in {1, len(text) // 2, len(text) - 1} - {0, len(text)}]
    return st.lists(st.sampled_from([*known, *known, *broken]), max_size=25).map("".join)


@settings(max_examples=30)
@pytest.mark.parametrize("name", sorted({format.parser for format in TOOL_FORMATS.values()}))
@given(data=st.data())
def test_markup_at_random_is_the_same_message_in_any_pieces(name, data):
    reasoning = "openai_gptoss" if name == "openai" else "qwen3"
    format, text = chat_format(name, reasoning), data.draw(texts_of(name))
    whole = parse(format, [text])
    assert parse(format, list(text)) == whole
    assert parse(format, split(text, data.draw(CUTS))) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
NAMES = st.text("abcXYZ019_.-", min_size=1, max_size=64)
PROSE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{\n"), max_size=12)


def slow_tagged_json(text, begin, end):
    """A message of JSON calls between tags, read as a whole. Only for texts whose markup is complete and no more."""
    content, calls = [], []
    for piece in re.split(f"({re.escape(begin)}.*?{re.escape(end)})", text, flags=re.DOTALL):
        if piece.startswith(begin):
            value = json.loads(piece.removeprefix(begin).removesuffix(end))
            calls.append((value["name"], value["arguments"]))
        else:
            content.append(piece)
    return content, calls


@settings(max_examples=60)
@given(
    calls=st.lists(st.tuples(PROSE, NAMES, ARGUMENTS), max_size=4),
    last=PROSE,
    ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    cuts=CUTS,
)
def test_json_in_tags_is_read_as_by_a_slow_search(calls, last, ascii, indent, cuts):
    begin, end = "<tool_call>", "</tool_call>"
    text = ""
    for before, name, arguments in calls:
        value = {"name": name, "arguments": arguments}
        written = json.dumps(value, ensure_ascii=ascii, indent=indent)
        text += f"{before}{begin}{written.replace('</', '<')}{end}"
    text += last
    content, expected = slow_tagged_json(text, begin, end)
    message = parse(HERMES, split(text, cuts))
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == expected
    assert "".join(message.content.split()) == "".join("".join(content).split())


@given(text=st.text(max_size=60), cuts=CUTS)
def test_a_text_without_formats_is_content(text, cuts):
    assert parse(chat_format(), split(text, cuts)) == Message(text, None, [])


@settings(max_examples=60)
@given(data=st.data())
def test_without_tools_markup_of_calls_is_content(data):
    text = data.draw(texts_of("hermes")).replace("<think>", "").replace("</think>", "")
    pieces = split(text, data.draw(CUTS))
    assert parse(HERMES, pieces, toolbox=None) == Message(text, None, [])
    assert parse(HERMES, pieces, toolbox=toolbox(TOOLS, "none")) == Message(text, None, [])


def test_parts_come_as_early_as_they_are_certain():
    parser = MessageParser(HERMES, TOOLBOX)
    steps = [
        ("<", []),
        ("think>\nA", [Reasoning("A")]),
        (" b\n", [Reasoning(" b")]),
        ("</think>\n\n", []),
        ("Hi <b", [Content("Hi <b")]),
        (" \n", []),
        ("<tool", []),
        ('_call>{"name": "note"', []),
        (', "arguments": {"te', [CallBegin(0, "note"), CallArguments(0, '{"te')]),
        ('xt": "a', [CallArguments(0, 'xt": "a')]),
        ("\\", []),
        ('"b', [CallArguments(0, '\\"b')]),
        ('"}', [CallArguments(0, '"}'), CallEnd(0)]),
        ("}\n</tool_call>\n", []),
        ("x", [Content("\nx")]),
    ]
    for text, parts in steps:
        assert parser.push(text) == parts, text
    assert parser.finish() == []


def test_texts_between_quotes_of_gemma_4_come_as_they_are_written():
    parser = MessageParser(chat_format("gemma4"), TOOLBOX)
    steps = [
        ("<|tool_call>call:find", []),
        ("{", [CallBegin(0, "find"), CallArguments(0, "{")]),
        ("q", []),
        (':<|"|>ab', [CallArguments(0, '"q": "ab')]),
        ("<|", []),
        ("c", [CallArguments(0, "<|c")]),
        ('<|"|>,tags:[1', [CallArguments(0, '", "tags": [')]),
        ("2,", [CallArguments(0, "12")]),
        ("3]}", [CallArguments(0, ", 3]}"), CallEnd(0)]),
        ("<tool_call|>", []),
    ]
    for text, parts in steps:
        assert parser.push(text) == parts, text


def test_texts_of_arguments_between_tags_come_as_they_are_written():
    parser = MessageParser(chat_format("qwen3_coder"), TOOLBOX)
    steps = [
        ("<tool_call>\n<function=note>\n", []),
        ("<parameter=text>", [CallBegin(0, "note"), CallArguments(0, "{")]),
        ("\nab", [CallArguments(0, '"text": "ab')]),
        ('"\nc', [CallArguments(0, '\\"\\nc')]),
        ("\n", []),
        ("</parameter>\n", [CallArguments(0, '"')]),
        ("</function>", [CallArguments(0, "}"), CallEnd(0)]),
    ]
    for text, parts in steps:
        assert parser.push(text) == parts, text


@pytest.mark.parametrize(
    ("text", "in_reasoning", "content", "reasoning"),
    [
        ("I think so.\n</think>\n\nThe answer is 7.", False, "I think so.\n\nThe answer is 7.", None),
        ("</think>\n\nHi", False, "Hi", None),
        ("<think>\na\n</think>\n\nOne.\n</think>\n\nTwo.", False, "One.\n\nTwo.", "a"),
        ("a\n</think>\n wants 5.\n</think>\n\nSix.", True, "wants 5.\n\nSix.", "a"),
        ("a</think></think>\n<think>b</think>c", True, "c", "a\nb"),
        ("Models write <think>a</think> first.", False, "Models write <think>a</think> first.", None),
        ("Models write <think>a</think>.</think> Yes", False, "Models write <think>a</think>. Yes", None),
        ("The tag `</think>` ends it.", False, "The tag `</think>` ends it.", None),
        ('It is "</think>"', False, 'It is "</think>"', None),
        ("a </thin", False, "a </thin", None),
    ],
)
def test_an_end_tag_of_reasoning_that_has_not_begun_is_no_content(text, in_reasoning, content, reasoning):
    whole = parse(HERMES, [text], in_reasoning=in_reasoning)
    assert whole == Message(content, reasoning, [])
    assert parse(HERMES, list(text), in_reasoning=in_reasoning) == whole


def test_an_end_tag_is_content_where_reasoning_is_not_read():
    assert parse(chat_format("hermes"), ["a</think>b"]).content == "a</think>b"
    granite = chat_format("granite", "granite")
    assert parse(granite, ["a Here is my response: b</think>c"]).content == "a Here is my response: bc"


def test_the_caller_knows_whether_the_text_is_reasoning():
    parser = MessageParser(HERMES, TOOLBOX)
    seen = []
    for text in ("<thi", "nk>", "a", "</think>", "b", "<think>"):
        parser.push(text)
        seen.append(parser.in_reasoning)
    assert seen == [False, True, True, False, False, False]
    assert MessageParser(HERMES, TOOLBOX, in_reasoning=True).in_reasoning
    assert not MessageParser(chat_format("hermes"), TOOLBOX, in_reasoning=True).in_reasoning


@pytest.mark.parametrize(
    ("format", "call", "num_behind"),
    [
        ("hermes", '<tool_call>\n{"name": "note", "arguments": {"text": "a}"}}\n</tool_call>', 14),
        ("hermes", '<tool_call>\n{"arguments": {"text": "a"}, "name": "note"}\n</tool_call>', 14),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', 13),
        (
            "qwen3_coder",
            "<tool_call>\n<function=note>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
            13,
        ),
        ("glm45", "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", 0),
        ("pythonic", '[note(text="a")]', 1),
        ("mistral_v11", '[TOOL_CALLS]note[ARGS]{"text": "a"}', 0),
        ("gemma4", '<|tool_call>call:note{text:<|"|>a<|"|>}<tool_call|>', 12),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "note", "parameters": {"text": "a"}}]<|END_ACTION|>', 16),
    ],
)
def test_a_call_is_complete_once_its_arguments_are(format, call, num_behind):
    """num_behind: characters behind the arguments, which the format does not need."""
    known = chat_format(format)
    assert [one.complete for one in parse(known, [call]).calls] == [True]
    for end in range(len(call)):
        calls = parse(known, [call[:end]]).calls
        complete = [json.loads(one.arguments) is not None for one in calls if one.complete]
        assert bool(complete) == (end >= len(call) - num_behind), call[:end]
        streamed = parse(known, list(call[:end])).calls
        assert streamed == calls


@pytest.mark.parametrize(
    ("format", "begun", "call"),
    [
        ("mistral", "[TOOL_CALLS]now", '[TOOL_CALLS]note[ARGS]{"text": "a"}'),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.now",
            '<|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>',
        ),
        (
            "openai",
            "<|channel|>commentary to=functions.now ",
            '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "a"}<|call|>',
        ),
    ],
)
def test_a_name_without_arguments_does_not_take_those_of_the_next_call(format, begun, call):
    text = begun + call
    for pieces in ([text], list(text)):
        message = parse(chat_format(format), pieces)
        assert message.calls == [Call("note", '{"text": "a"}')]
        assert message.content == begun.rstrip()


def test_a_call_whose_arguments_end_within_is_not_complete():
    text = '<tool_call>\n{"name": "note", "arguments": {"text": a/b}}\n</tool_call>'
    (call,) = parse(HERMES, [text]).calls
    assert (call.name, call.complete) == ("note", False)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"text": tru}', '{"text": tru}'),
        ('{"text": NaN}', '{"text": NaN}'),
        ('{"text" "a"]', '{"text" "a"]'),
        ('{"text": "a",}', '{"text": "a",}'),
        ('"a text"', "a text"),
        ('"[1]"', "[1]"),
        (r'"{\"text\": "', '{"text": '),
    ],
)
def test_a_call_whose_arguments_are_no_json_object_is_not_complete(arguments, written):
    for members in (f'"name": "note", "arguments": {arguments}', f'"arguments": {arguments}, "name": "note"'):
        text = f"<tool_call>\n{{{members}}}\n</tool_call>"
        for pieces in ([text], list(text)):
            assert parse(HERMES, pieces) == Message("", None, [Call("note", written, complete=False)])


def test_only_the_first_call_counts_if_calls_may_not_be_parallel():
    one = toolbox(TOOLS, parallel_tool_calls=False)
    message = parse(HERMES, [f"a{CALL}\n{CALL}b"], one)
    assert message == Message("ab", None, [Call("now", "{}")])


def test_texts_that_the_caller_names_are_dropped():
    options = {"drop": frozenset({"<|im_end|>", "<|eot|>"})}
    assert parse(HERMES, ["Hi\n<|im_", "end|>"], **options) == Message("Hi\n", None, [])
    assert parse(HERMES, [CALL, "<|im_end|>\n<|eot|>"], **options).content == ""
    assert parse(HERMES, ["<think>a<|eot|>b</think>c"], **options) == Message("c", "ab", [])


def test_tags_of_calls_that_are_dropped_are_neither_content_nor_reasoning():
    """So a text is the same with and without tools, if the tags are special tokens."""
    options = {"drop": frozenset({"<tool_call>", "</tool_call>"})}
    text = "<think>use <tool_call> here</think>Write <tool_call>, then </tool_call>."
    expected = Message("Write , then .", "use  here", [])
    assert parse(HERMES, [text], **options) == parse(HERMES, [text], None, **options) == expected
    assert parse(HERMES, [f"a {CALL} b"], **options) == Message("a b", None, [Call("now", "{}")])
    assert parse(HERMES, ["a <tool_call>{}</tool_call> b"], **options) == Message("a {} b", None, [])


def test_a_forced_call_that_is_cut_before_its_name_leaves_no_content():
    text = '<tool_call>\n{"name": "no'
    assert parse(HERMES, [text], forced=True) == Message("", None, [])
    assert parse(HERMES, [text]).content == text


def test_a_name_of_129_characters_is_no_call():
    text = CALL.replace("now", "n" * 129)
    assert parse(HERMES, [text]) == Message(text, None, [])
    assert parse(HERMES, [CALL.replace("now", "n" * 128)]).calls == [Call("n" * 128, "{}")]


@pytest.mark.parametrize("size", [MAX_HELD - 60, MAX_HELD, MAX_HELD + 60])
def test_text_held_back_as_a_possible_call_is_limited(size):
    """Text that may be a call for too long is content. The limit does not depend on the pieces."""
    text = '<tool_call>{"arguments": {"text": "' + "x" * size + '"}, "name": "note"}</tool_call>' + CALL
    message = parse(HERMES, [text])
    assert [call.name for call in message.calls] == (["note", "now"] if size < MAX_HELD else ["now"])
    assert parse(HERMES, [text[i : i + 97] for i in range(0, len(text), 97)]) == message
    parser = MessageParser(HERMES, TOOLBOX)
    num_out = num_in = 0
    for i in range(0, len(text), 500):
        num_in += len(text[i : i + 500])
        num_out += sum(len(getattr(part, "text", "")) for part in parser.push(text[i : i + 500]))
        assert num_in - num_out <= MAX_HELD + 500 or message.calls[0].name == "note"


@pytest.mark.parametrize("num_spaces", [MAX_SPACE, MAX_SPACE + 9])
def test_the_white_space_that_is_held_back_is_limited(num_spaces):
    text = "a" + " " * num_spaces + CALL
    message = parse(HERMES, [text])
    assert message.content == "a" + " " * (num_spaces - MAX_SPACE)
    assert parse(HERMES, list(text)) == message


def test_white_space_stays_where_there_is_no_markup():
    for text in (" a\n\n", "\n", "a \n <b> \n", ""):
        assert parse(HERMES, list(text)).content == text


def test_parts_give_a_message():
    parts = [Reasoning("a"), Content("b"), CallBegin(0, "f"), CallArguments(0, "{"), CallBegin(1, "g")]
    parts += [CallArguments(0, "}"), CallEnd(0), Content("c"), CallArguments(1, "{"), Reasoning("d")]
    assert message_of(parts) == Message("bc", "ad", [Call("f", "{}"), Call("g", "{", complete=False)])
    assert message_of([]) == Message("", None, [])


def test_the_beginning_of_reasoning_is_seen_in_a_prompt():
    think, harmony = REASONING_FORMATS["deepseek_r1"], REASONING_FORMATS["openai_gptoss"]
    assert think.is_begun_by("assistant: <think>\n")
    assert not think.is_begun_by("<think>\n\n</think>\n\n")
    assert not think.is_begun_by("Write <think> now: ")
    assert harmony.is_begun_by("<|start|>assistant<|channel|>analysis<|message|>")


def test_markup_may_be_special_tokens():
    assert HERMES.special_tokens == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert chat_format("mistral", "mistral").special_tokens >= {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
    assert "<|channel|>" in chat_format("openai").special_tokens
    gemma4 = chat_format("gemma4", "gemma4").special_tokens
    assert gemma4 == {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}
    assert not chat_format("pythonic").special_tokens
