"""Content blocks and whole calls: a stream of parts in any pieces gives what the parts give at once."""

import json
from itertools import pairwise

from anthropic_events import message_of
from hypothesis import given
from hypothesis import strategies as st

from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Reasoning
from quire.server.api.anthropic.content_blocks import ContentBlocks, whole_blocks
from quire.server.api.ollama.chat import WholeCalls

TEXT = st.text(min_size=1, max_size=5)
JSON = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.lists(st.integers()), max_size=2)


def call_id(index, name):
    return f"{name}-{index}"


def visible(text):
    """A text without white space."""
    return "".join(text.split())


@st.composite
def messages(draw):
    """The parts of a message, whose last call may be cut."""
    parts, num_calls = [], 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            text = json.dumps(draw(JSON))
            cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            parts.append(CallBegin(num_calls, draw(TEXT)))
            parts += [CallArguments(num_calls, piece) for piece in pieces if piece]
            parts.append(CallEnd(num_calls))
            num_calls += 1
        else:
            parts += [
                {"text": Content, "reasoning": Reasoning}[kind](text) for text in draw(st.lists(TEXT, max_size=3))
            ]
    if parts and isinstance(parts[-1], CallEnd):
        for _ in range(draw(st.integers(0, 2))):
            parts.pop()
    return parts


@given(messages(), st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_the_events_give_the_blocks_of_the_whole_message(parts, places, with_thinking):
    blocks = ContentBlocks(call_id, with_thinking=with_thinking)
    bounds = [0, *sorted(min(place, len(parts)) for place in places), len(parts)]
    events = [event for a, b in pairwise(bounds) for event in blocks.events(parts[a:b])]
    events += blocks.close()
    start = ("message_start", {"message": {"content": []}})
    found = message_of([start, *((event["type"], event) for event in events)])["content"]
    assert found == whole_blocks(parts, ContentBlocks(call_id, with_thinking=with_thinking))
    texts = {kind: "".join(block[kind] for block in found if block["type"] == kind) for kind in ("text", "thinking")}
    assert visible(texts["text"]) == visible("".join(part.text for part in parts if isinstance(part, Content)))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    assert visible(texts["thinking"]) == (visible(thought) if with_thinking else "")
    behind_others = [block.get("text") or block.get("thinking") or "" for block in found[1:]]
    assert behind_others == [text.lstrip() for text in behind_others]
    assert [block["name"] for block in found if block["type"] == "tool_use"] == [
        part.name for part in parts if isinstance(part, CallBegin)
    ]


@given(messages(), st.integers(0, 12))
def test_whole_calls_come_once_and_in_order(parts, place):
    collector = WholeCalls(call_id)
    found = collector.push(parts[:place]) + collector.push(parts[place:])
    assert found == WholeCalls(call_id).push(parts)
    expected = []
    for begun in (part for part in parts if isinstance(part, CallBegin)):
        text = "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == begun.index)
        if CallEnd(begun.index) not in parts:
            continue
        arguments = json.loads(text)
        expected.append(
            {
                "id": call_id(begun.index, begun.name),
                "function": {"index": begun.index, "name": begun.name, "arguments": arguments},
            }
        )
    assert found == expected


def test_thinking_blocks_are_signed_each_for_itself():
    blocks = [
        block["signature"]
        for parts in ([Reasoning("a")], [Reasoning("a"), Content("x"), Reasoning("b")])
        for block in whole_blocks(parts, ContentBlocks(call_id, with_thinking=True))
        if block["type"] == "thinking"
    ]
    assert blocks[0] == blocks[1] != blocks[2]
