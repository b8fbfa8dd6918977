"""The items of a response, and the events that tell of them."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Reasoning
from quire.server.api.openai.responses_output import ResponseWriter, item_id, response_of
from quire.server.api.openai.responses_tools import ToolOrigin

ORIGINS = {"a.run": ToolOrigin("run", "a"), "patch": ToolOrigin("patch", None, is_custom=True)}
ID = "resp_" + "0" * 32


def writer(status="in_progress", *, with_summary=False, with_encoded=False):
    return ResponseWriter(
        {"id": ID, "status": status, "output": []},
        2,
        lambda index, name: f"call_{index}_{name}",
        ORIGINS,
        with_summary=with_summary,
        with_encoded=with_encoded,
        logprobs=None,
    )


def written(steps, *, complete=True, **options):
    """All events of these steps, and the response at the end."""
    one = writer(**options)
    events = one.begin()
    for parts in steps:
        events += one.add(parts, None)
    events += one.close(complete=complete)
    one.change(status="completed" if complete else "incomplete")
    return [*events, one.last_event()], one.response


TEXTS = {  # by the begin of an event's type: fields of the item and of the event that have the text, its name
    "output_text": ("content", "content_index", "text"),
    "reasoning_text": ("content", "content_index", "text"),
    "reasoning_summary_text": ("summary", "summary_index", "text"),
    "function_call_arguments": (None, None, "arguments"),
    "custom_tool_call_input": (None, None, "input"),
}
PARTS_OF = {"content_part": ("content", "content_index"), "reasoning_summary_part": ("summary", "summary_index")}


def apply(event, output):
    """Apply one event to the output that a client has."""
    subject, _, verb = event["type"].removeprefix("response.").rpartition(".")
    if subject == "output_item":
        if verb == "added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append({**event["item"]})
        else:
            before = output[event["output_index"]]
            output[event["output_index"]] = event["item"]
            known = {name: value for name, value in before.items() if name not in ("status", "encrypted_content")}
            assert known == {name: event["item"][name] for name in known}, "nothing was left out before"
    elif subject in PARTS_OF:
        field, index = PARTS_OF[subject]
        parts = output[event["output_index"]][field]
        if verb == "added":
            assert event[index] == len(parts)
            output[event["output_index"]][field] = [*parts, {**event["part"]}]
        else:
            assert parts[event[index]] == event["part"]
    elif subject:
        field, index, name = TEXTS[subject]
        item = output[event["output_index"]]
        assert item["id"] == event["item_id"]
        holder = item if field is None else item[field][event[index]]
        if verb == "delta":
            holder[name] += event["delta"]
        else:
            assert holder[name] == event[name]
    else:
        assert verb in ("created", event["response"]["status"])


def folded(events):
    """The output that a client has when it applies each event."""
    output = []
    for event in events:
        apply(event, output)
    return output


TEXT = st.sampled_from(["a", " ", "\n", "b c", '"'])
PARTS = st.lists(
    st.one_of(
        *(TEXT.map(Content), TEXT.map(Reasoning), st.sampled_from(["begin", "end"])),
        TEXT.map(lambda text: ("arguments", text)),
    ),
    max_size=12,
)


def numbered(parts):
    """Calls with their indices. Arguments and the end belong to a call that has begun, and follow it at once."""
    found, index = [], -1
    for part in parts:
        if part == "begin":
            index += 1
            found.append(CallBegin(index, "f"))
        elif part == "end":
            found += [CallEnd(index)] if found and isinstance(found[-1], CallBegin | CallArguments) else []
        elif not isinstance(part, tuple):
            found.append(part)
        elif found and isinstance(found[-1], CallBegin | CallArguments):
            found.append(CallArguments(index, part[1]))
    return found


def joined(parts):
    """The same with neighbouring pieces joined."""
    result = []
    for kind, group in groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        pieces = list(group)
        result += (
            pieces
            if kind[0] in (CallBegin, CallEnd)
            else [kind[0](*([pieces[0].index] if kind[0] is CallArguments else []), "".join(p.text for p in pieces))]
        )
    return result


@given(
    parts=PARTS.map(numbered),
    cuts=st.sets(st.integers(0, 12)),
    complete=st.booleans(),
    with_summary=st.booleans(),
    with_encoded=st.booleans(),
    status=st.sampled_from(["queued", "in_progress"]),
)
@settings(max_examples=120, deadline=None)
def test_the_events_give_what_the_response_has(parts, cuts, complete, **options):
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(parts)), len(parts)]
    steps = [parts[start:stop] for start, stop in pairwise(places)]
    events, response = written(steps, complete=complete, **options)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert folded(events) == response["output"] == events[-1]["response"]["output"]
    assert written([joined(parts)], complete=complete, **options)[1] == response, "for any pieces"
    assert len({item["id"] for item in response["output"]}) == len(response["output"]) > 0
    texts = [part.text for part in joined(parts) if isinstance(part, Content)]
    shown = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert [one for one in "".join(shown) if not one.isspace()] == [one for one in "".join(texts) if not one.isspace()]
    ended = [CallEnd(part.index) in parts for part in parts if isinstance(part, CallBegin)]
    calls = [item["status"] == "completed" for item in response["output"] if item["type"] == "function_call"]
    assert calls == ended, "a call is complete if it ended, wherever the output ended"
    *before, last = [item["status"] for item in response["output"] if item["type"] != "function_call"] or ["completed"]
    assert before == ["completed"] * len(before)
    assert last == "completed" or (not complete and response["output"][-1]["type"] != "function_call")


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_the_order_of_events():
    call = [CallBegin(0, "f"), CallArguments(0, "{}"), CallEnd(0)]
    steps = [[Reasoning("Hm"), Reasoning(".")], [Content("Hi")], call]
    events, response = written(steps)
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    reasoning, message, call = response["output"]
    assert (reasoning["content"][0]["text"], reasoning["summary"], reasoning["encrypted_content"]) == ("Hm.", [], None)
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "Hi")
    assert (call["name"], call["arguments"], call["call_id"]) == ("f", "{}", "call_0_f")
    assert [item["id"][:3] for item in response["output"]] == ["rs_", "msg", "fc_"]
    events, response = written(steps, with_summary=True, status="queued")
    assert kinds(events)[:8] == [
        *("created", "queued", "in_progress", "output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta", "reasoning_summary_text.done"),
    ]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm."}]


@pytest.mark.parametrize(
    ("parts", "output"),
    [
        ([], [("message", "")]),
        ([Content(" \n")], [("message", " \n")]),
        ([Content("\n"), CallBegin(0, "f"), Content("\n")], [("function_call", "")]),
        ([Content("\n"), Content("a"), Content("\n")], [("message", "\na\n")]),
        ([CallBegin(0, "f"), Content("\n"), Content(" a "), Content("b")], [("function_call", ""), ("message", "a b")]),
        ([Reasoning("x"), Content("a"), Reasoning("\ny")], [("reasoning", "x"), ("message", "a"), ("reasoning", "y")]),
        ([Reasoning("\n\n"), Content("a")], [("message", "a")]),
        ([Reasoning("x"), Content("\n")], [("reasoning", "x")]),
    ],
)
def test_blank_text_between_items_is_no_item(parts, output):
    _, response = written([[part] for part in parts])
    shown = [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]
    assert shown == output


def test_a_response_in_progress_shows_what_it_has():
    one = writer()
    one.begin()
    one.add([Reasoning("x"), Content("Hel")], None)
    assert [item["status"] for item in one.response["output"]] == ["completed", "in_progress"]
    one.change(status="failed")
    assert one.response["output"][1]["status"] == "incomplete"
    assert one.response["output"][1]["content"][0]["text"] == "Hel"
    assert one.last_event()["type"] == "response.failed"


def test_ids_of_items_name_their_response():
    for kind in ("message", "reasoning", "function_call", "function_call_output", "something"):
        assert response_of(item_id(kind, ID, 12345)) == ID
    assert response_of("msg_1") != ID
    assert response_of("") == "resp_"


@pytest.mark.parametrize(
    ("arguments", "ends", "text"),
    [
        (['{"inp', 'ut": "a\\nb', '"}'], True, "a\nb"),
        (['{"input": "a\\n'], False, "a\n"),
        (['{"input": "a\\'], False, "a"),
        (['{"input": "a\\\\'], False, "a\\"),
        (['{"input": "a\\u00'], False, "a"),
        (['{"input": "\\ud83d'], False, "?"),
        (['{"input": "\\ud800"}'], True, "?"),
        (["[" * 200_000], False, "[" * 200_000),
        (['{"inp'], False, '{"inp'),
    ],
)
def test_the_call_of_a_custom_tool_has_its_input_as_text(arguments, ends, text):
    parts = [CallBegin(0, "patch"), *(CallArguments(0, piece) for piece in arguments), *([CallEnd(0)] if ends else [])]
    events, response = written([[part] for part in parts])
    (call,) = response["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", text)
    assert call["status"] == ("completed" if ends else "incomplete")
    assert call["id"].startswith("ctc_")
    output = []
    for event in events[2:-1]:
        apply(event, output)
    assert output == response["output"]


def test_the_call_of_a_function_in_a_namespace_names_both():
    _, response = written([[CallBegin(0, "a.run"), CallArguments(0, "{}"), CallEnd(0)]])
    (call,) = response["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "run", "a")
